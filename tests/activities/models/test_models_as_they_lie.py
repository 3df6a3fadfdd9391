"""Models as they lie about: what `longshore models check` tells of them; refused by file, key and rule, or computed."""

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
from megatron_worker.tensors.safetensors_files import model_files, single_file
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_architecture, read_model_config
from shared.families.tensor_slices import TensorSlice
from shared.settings import DownloadSettings, Settings
from tests.activities.models.resolving import edit, refusal, resolve
from tests.activities.models.test_resolve_adapter import adapter_refusal, resolve_adapter, shape_with
from tests.activities.models.test_resolve_model import shard
from tests.activities.templates import CHATML

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
INDEX, WEIGHTS, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"


def add_tensors(path: Path, **tensors: np.ndarray) -> None:
    save_file({**load_file(path), **{name.replace("__", "."): one for name, one in tensors.items()}}, path)


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_tied_model_may_hold_its_output_twice_and_no_other_one(config, model, in_shards) -> None:
    """transformers unties what differs, and uses it."""
    from transformers import AutoModelForCausalLM

    embedding = load_file(model / WEIGHTS)[EMBEDDING]
    add_tensors(model / WEIGHTS, lm_head__weight=embedding)
    resolve(config, model)
    with model_files(model) as files:
        files.check_equal(OUTPUT, EMBEDDING)
    other = embedding.copy()
    other[-1, -1] += 1
    add_tensors(model / WEIGHTS, lm_head__weight=other)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    assert theirs.lm_head.weight[-1, -1] == other[-1, -1] != theirs.model.embed_tokens.weight[-1, -1]
    if in_shards:
        shard(model)
    message = refusal(config, model)
    assert "config.json: tie_word_embeddings is true, but lm_head.weight of model" in message
    assert "differs from model.embed_tokens.weight: set it to false, or remove that tensor" in message
    with model_files(model) as files, pytest.raises(InvalidInput, match=r"ties 'lm_head\.weight'"):
        files.assign(read_architecture(model).slices(1), model)
    edit(model / "config.json", tie_word_embeddings=False)
    resolve(config, model)


def test_an_index_beside_other_weights_is_refused_on_the_control_host_and_in_the_worker(config, model) -> None:
    """transformers reads the single file, and others read the shards."""
    whole = (model / WEIGHTS).read_bytes()
    shard(model)
    (model / WEIGHTS).write_bytes(whole)
    assert f"{INDEX}: beside it lies {WEIGHTS}, which it does not name" in refusal(config, model)
    with pytest.raises(InvalidInput, match="beside the index lies another"):
        model_files(model)
    names = dict.fromkeys(load_file(model / WEIGHTS), WEIGHTS)
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    resolve(config, model)
    model_files(model)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", EMBEDDING])
def test_an_index_that_lacks_a_tensor_is_refused(config, model, name) -> None:
    files = shard(model)
    edit(model / INDEX, weight_map={each: file for each, file in files.items() if each != name})
    assert f"{INDEX}: it lacks tensor {name}, which is in {files[name]}" in refusal(config, model)


def test_a_chat_template_that_tokenizers_do_not_read_is_none(config, model) -> None:
    from transformers import AutoTokenizer

    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert AutoTokenizer.from_pretrained(model).chat_template is None
    message = refusal(config, model)
    assert "chat_template.json: tokenizers do not read it" in message and "to chat_template.jinja" in message


@pytest.mark.parametrize(
    ("family", "fields"), [("deepseek_v2", {"intermediate_size": None}), ("gemma2", {"hidden_act": None}), (None, {})]
)
def test_an_unknown_family_is_refused_as_such_whatever_its_fields_are(config, model, family, fields) -> None:
    edit(model / "config.json", model_type=family, **fields)
    assert f"config.json: model_type {family!r} is not a known family: " in refusal(config, model)
    with pytest.raises(InvalidInput, match="is not a known family"):  # the worker's door
        read_model_config(json.loads((model / "config.json").read_text()), "config.json")


def test_the_engine_fsdp_is_given_a_dense_model_of_any_family(config, model, adapter) -> None:
    """Of its config the sizes count, under their common names; which tensors it has the worker finds out."""
    edit(model / "config.json", model_type="olmo2", hidden_act="gelu", attention_bias=True)
    tensors = load_file(model / WEIGHTS)
    save_file({name.replace("input_layernorm", "other_norm"): one for name, one in tensors.items()}, model / WEIGHTS)
    shape = resolve(config, model, engine="fsdp").shape
    assert (shape.family, shape.is_generic, shape.num_layers) == ("olmo2", True, 2)
    named = {name.replace("self_attn", "attention"): one for name, one in load_file(adapter / ADAPTER).items()}
    save_file(named, adapter / ADAPTER)
    resolve_adapter(config, adapter, shape=shape)
    assert "belongs to none" in adapter_refusal(config, adapter)
    for changes, words in (
        ({"num_local_experts": 8}, "it has experts; the nearest is qwen3_moe"),
        ({"num_local_experts": None, "text_config": {}}, "it has other parts: take a folder of its decoder"),
        ({"text_config": None, "quantization_config": {"quant_method": "awq"}}, "weights that awq has quantized"),
        ({"quantization_config": None, "num_attention_heads": None}, "its config.json has no num_attention_heads"),
    ):
        edit(model / "config.json", **changes)
        assert words in refusal(config, model, engine="fsdp")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": LLAMA3, "rope_theta": 5e5}, False),
        ({"rope_parameters": PLAIN, "rope_scaling": {"type": "default", "rope_theta": 1e4}}, False),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3 | {"factor": 4.0}}, False),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3, "rope_theta": 5e5}, True),
        ({"rope_parameters": PLAIN, "rope_scaling": None}, True),
        ({"rope_parameters": {}, "rope_scaling": LLAMA3, "rope_theta": 5e5}, True),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1e6}, "rope_scaling": {}, "rope_theta": 5e5}, True),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 7e5}, True),
    ],
)
def test_rotary_settings_are_transformers_own_or_refused_where_two_disagree(config, model, fields, is_one) -> None:
    from transformers import AutoConfig

    edit(model / "config.json", **fields)
    if not is_one:
        assert "config.json: rope_scaling and rope_parameters say different things" in refusal(config, model)
        return
    resolve(config, model)
    theirs = AutoConfig.from_pretrained(model).rope_parameters
    ours = read_model_config(json.loads((model / "config.json").read_text()), "").rope
    assert (ours.rope_type, ours.rope_theta, ours.factor) == (
        theirs["rope_type"], theirs["rope_theta"], theirs.get("factor"),
    )  # fmt: skip


# Adapters


def test_a_pattern_of_modules_means_what_it_does_in_peft(config, adapter) -> None:
    edit(adapter / "adapter_config.json", target_modules=r".*\.(q|o)_proj")
    assert resolve_adapter(config, adapter).lora.target_pattern == r".*\.(q|o)_proj"
    edit(adapter / "adapter_config.json", target_modules="q_proj")  # which is no whole name
    assert "belongs to none of the adapter's target_modules" in adapter_refusal(config, adapter)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_adapter_with_a_number_that_is_not_finite_is_refused(config, adapter, bad, dtype) -> None:
    tensors = {name: one.astype(dtype) for name, one in load_file(adapter / ADAPTER).items()}
    save_file(tensors, adapter / ADAPTER)
    resolve_adapter(config, adapter)
    name = sorted(tensors)[-1]
    tensors[name].flat[-1] = bad
    save_file(tensors, adapter / ADAPTER)
    assert f"{ADAPTER}: tensor {name} holds a number that is not finite" in adapter_refusal(config, adapter)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.float64])
def test_an_adapter_of_other_numbers_than_floats_is_refused_at_both_doors(config, adapter, dtype) -> None:
    save_file({name: one.astype(dtype) for name, one in load_file(adapter / ADAPTER).items()}, adapter / ADAPTER)
    assert "weights must be one of F32, BF16, F16" in adapter_refusal(config, adapter)
    if np.issubdtype(dtype, np.integer):
        name, shape = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64)
        with single_file(adapter / ADAPTER) as files, pytest.raises(InvalidInput, match="and weights are floats"):
            files.local(TensorSlice(name, name, shape, None, 0, 4), name, 0, 1)


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"hidden_size": 128}, "q_proj of the model has 128 inputs"),
        ({"num_attention_heads": 8}, "q_proj of the model has 128 outputs"),
        ({"head_dim": 32}, "q_proj of the model has 128 outputs"),
        ({"num_attention_heads": 4}, None),
    ],
)
def test_an_adapter_of_another_size_is_refused(config, adapter, sizes, rule) -> None:
    tensors = load_file(adapter / ADAPTER)
    save_file({name: one for name, one in tensors.items() if "q_proj" in name}, adapter / ADAPTER)
    edit(adapter / "adapter_config.json", target_modules=["q_proj"])
    shape = shape_with(**sizes)
    if rule is None:
        resolve_adapter(config, adapter, shape=shape)
    else:
        assert rule in adapter_refusal(config, adapter, shape=shape)


LONGSHORE = str(Path(sys.executable).with_name("longshore"))
WEIGHTS_FILE = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate.weight"
LORA = Lora(rank=4)


@pytest.fixture
def looked_at(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", ["How many sacks are on the quay?"] * 8, family="qwen3_moe", tied=False)


def spoil(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def without(folder: Path, name: str) -> None:
    spoil(folder, lambda tensors: tensors.__delitem__(name))


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(whole[:-100])


def test_it_says_what_would_be_computed_and_what_each_layout_wants(folder: Path) -> None:
    found = look_at(folder, LORA, "float32")
    num_parameters = sum(tensor.size for tensor in load_file(folder / WEIGHTS_FILE).values())
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
        f"{WEIGHTS_FILE}: the weights lack the tensor model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "a tensor has a row too many": (
        lambda folder: spoil(
            folder, lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": np.zeros((65, 64), np.float32)})
        ),
        f"{WEIGHTS_FILE}: tensor model.layers.1.self_attn.q_proj.weight is (65, 64), config.json says (64, 64)",
    ),
    "a norm is of another size": (
        lambda folder: spoil(folder, lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)})),
        f"{WEIGHTS_FILE}: tensor model.norm.weight is (63,), config.json says (64,)",
    ),
    "not tied, and no head": (
        lambda folder: without(folder, "lm_head.weight"),
        f"{WEIGHTS_FILE}: the weights lack the tensor lm_head.weight; tie_word_embeddings is false in config.json",
    ),
    "a cut file": (cut, f"{WEIGHTS_FILE}: truncated or damaged: the header tells of"),
    "a router that is not finite": (
        lambda folder: spoil(folder, lambda t: t.update({ROUTER: np.full_like(t[ROUTER], np.nan)})),
        f"{WEIGHTS_FILE}: tensor {ROUTER} holds a number that is not finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_is_refused_before_any_lease_with_file_key_and_rule(
    looked_at: Settings, folder: Path, case: str
) -> None:
    resolve(looked_at, folder)
    change, rule = CASES[case]
    change(folder)
    assert rule in refusal(looked_at, folder)
    [problem] = look_at(folder, LORA).problems
    assert rule in problem and str(folder.resolve()) in problem


def test_numbers_of_other_tensors_are_looked_at_where_all_is_to_be_read(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    spoil(folder, lambda tensors: tensors[name].__setitem__((-1, -1), np.inf))
    assert look_at(folder, LORA).problems == ()
    [problem] = look_at(folder, LORA, read_all=True).problems
    assert problem.endswith(f"{WEIGHTS_FILE}: tensor {name} holds a number that is not finite")


def test_settings_that_change_nothing_are_no_switches(looked_at: Settings, folder: Path) -> None:
    settings = {"use_cache": True, "output_router_logits": True, "embedding_multiplier": 1.0, "_sizes": [1], "x": "y"}
    edit(folder / "config.json", **settings)
    resolve(looked_at, folder)


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
