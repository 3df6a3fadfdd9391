"""`longshore models check`: what is told of a folder; and what is refused there is refused at submission, too."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from activities.model_look import look_at
from examples.tiny_model import make_tiny_model
from longshore.training import Lora
from shared.families import FAMILIES
from shared.settings import DownloadSettings, Settings
from tests.activities.models.resolving import edit, refusal, resolve
from tests.activities.templates import CHATML

LONGSHORE = str(Path(sys.executable).with_name("longshore"))
WEIGHTS = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate.weight"
LORA = Lora(rank=4)


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", ["How many sacks are on the quay?"] * 8, family="qwen3_moe", tied=False)


def spoil(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def without(folder: Path, name: str) -> None:
    spoil(folder, lambda tensors: tensors.__delitem__(name))


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])


def test_it_says_what_would_be_computed_and_what_each_layout_wants(folder: Path) -> None:
    found = look_at(folder, LORA, "float32")
    num_parameters = sum(tensor.size for tensor in load_file(folder / WEIGHTS).values())
    assert found.shape is not None and (found.shape.family, found.shape.num_layers) == ("qwen3_moe", 2)
    assert found.num_parameters == num_parameters
    num_mlps = 2 * found.shape.num_experts
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 2)
    assert found.targets == attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), num_mlps)
    assert found.stops == ("<|im_end|>",) and found.problems == ()
    assert found.conversations["tool calls"] is None
    by_label = {(row.engine, row.layout): row for row in found.layouts}
    assert by_label["megatron", "single"].base_bytes == 4 * num_parameters
    halves = by_label["megatron", "ep2-dp2"].base_bytes
    assert 2 * num_parameters < halves < 4 * num_parameters
    assert by_label["megatron", "dp2"].full_bytes < by_label["megatron", "single"].full_bytes
    assert by_label["megatron", "tp8-sp"].refused == "layout.tp: tp=8 does not divide the model's 4 attention heads"
    split = by_label["fsdp", "dp2"]
    assert split.refused is None and split.base_bytes == 4 * num_parameters // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_are_those_that_an_engine_counts(tmp_path: Path, family: str, dtype: str) -> None:
    from longshore.training import Full, Layout
    from megatron_worker.megatron.engine import MegatronEngine

    model = make_tiny_model(tmp_path / "model", ["quay"] * 8, family=family, tied=False)
    engine = MegatronEngine(model, Layout(), dtype)  # type: ignore[arg-type]
    told = look_at(model, LORA, dtype).layouts[0]
    held = engine.memory().device_bytes
    for said, trainable in ((told.lora_bytes, LORA), (told.full_bytes, Full())):
        assert said == pytest.approx(held + sum(engine.slot_bytes(trainable).values()), rel=0.01)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a switch that nobody reads": (
        lambda folder: edit(folder / "config.json", use_parallel_residual=True),
        "config.json: use_parallel_residual = True is not supported: it is not known in models of the family qwen3_moe",
    ),
    "a cap that nobody reads": (
        lambda folder: edit(folder / "config.json", final_logit_softcapping=30.0),
        "config.json: final_logit_softcapping = 30.0 is not supported",
    ),
    "a tensor is missing": (
        lambda folder: without(folder, "model.layers.1.mlp.experts.2.up_proj.weight"),
        f"{WEIGHTS}: the weights lack the tensor model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "a tensor has a row too many": (
        lambda folder: spoil(
            folder, lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": np.zeros((65, 64), np.float32)})
        ),
        f"{WEIGHTS}: tensor model.layers.1.self_attn.q_proj.weight is (65, 64), config.json says (64, 64)",
    ),
    "a norm is of another size": (
        lambda folder: spoil(folder, lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)})),
        f"{WEIGHTS}: tensor model.norm.weight is (63,), config.json says (64,)",
    ),
    "tied, and yet another head": (
        lambda folder: edit(folder / "config.json", tie_word_embeddings=True),
        "config.json: tie_word_embeddings is true, but lm_head.weight of model.safetensors differs",
    ),
    "not tied, and no head": (
        lambda folder: without(folder, "lm_head.weight"),
        f"{WEIGHTS}: the weights lack the tensor lm_head.weight; tie_word_embeddings is false in config.json",
    ),
    "a cut file": (cut, f"{WEIGHTS}: truncated or damaged: the header tells of"),
    "a router that is not finite": (
        lambda folder: spoil(folder, lambda t: t.update({ROUTER: np.full_like(t[ROUTER], np.nan)})),
        f"{WEIGHTS}: tensor {ROUTER} holds a number that is not finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_is_refused_before_any_lease_with_file_key_and_rule(
    config: Settings, folder: Path, case: str
) -> None:
    resolve(config, folder)
    change, rule = CASES[case]
    change(folder)
    assert rule in refusal(config, folder)
    [problem] = look_at(folder, LORA).problems
    assert rule in problem and str(folder.resolve()) in problem


def test_numbers_of_other_tensors_are_looked_at_where_all_is_to_be_read(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    spoil(folder, lambda tensors: tensors[name].__setitem__((-1, -1), np.inf))
    assert look_at(folder, LORA).problems == ()
    [problem] = look_at(folder, LORA, read_all=True).problems
    assert problem.endswith(f"{WEIGHTS}: tensor {name} holds a number that is not finite")


def test_settings_that_change_nothing_are_no_switches(config: Settings, folder: Path) -> None:
    settings = {"use_cache": True, "output_router_logits": True, "embedding_multiplier": 1.0, "_sizes": [1], "x": "y"}
    edit(folder / "config.json", **settings)
    resolve(config, folder)


def test_the_command_tells_all_of_it_and_ends_with_100_where_a_run_would_be_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    command = [LONGSHORE, "models", "check", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "qwen3_moe: 2 layers of 64" in done.stdout and "ep2-dp2" in done.stdout
    rule = "messages[1].tool_calls: the chat template shows no tool calls (chat_template.jinja)"
    assert rule in done.stdout and "refused: layout.tp: tp=8" in done.stdout

    edit(folder / "config.json", use_parallel_residual=True)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 100
    assert "use_parallel_residual" in json.loads(done.stdout)["problems"][0]
    missing = subprocess.run([*command[:3], str(folder / "nothing")], capture_output=True, text=True)
    assert missing.returncode == 102 and "there is no such folder" in missing.stderr
