"""Models as they are published: what `models check` accepts is read, trained, saved and served; all else is named.

The models of ../shared/layouts are compared with transformers by benchmarks/published_layouts.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from activities.model_look import look_at
from benchmarks.published_layouts import MODELS, compare
from longshore.training import Lora
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_model_config
from shared.settings import DownloadSettings, Settings
from tests.activities.models.resolving import edit, refusal, resolve
from tests.activities.publishing.test_export import exported, source_of
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.published import LAYOUTS, VARIANTS
from tests.megatron_worker.rows import bin_of, distinct_model, model_with_tower, random_rows
from tests.megatron_worker.scores import logprobs

REFUSED = {"GLM-4.5-Air": "model_type 'glm4_moe' is not a known family"}
ROWS = bin_of(random_rows([30, 20]))
LORA = Lora(rank=4, alpha=8)


@pytest.mark.skipif(not LAYOUTS.exists(), reason="the facts of published models, ../shared/layouts, are not here")
@pytest.mark.drawn
@pytest.mark.parametrize("name", drawn([*MODELS], 2))
def test_a_published_model_is_what_transformers_computes_or_is_refused(tmp_path: Path, name: str) -> None:
    found = compare(name, tmp_path)
    found.pop("model")
    if name in REFUSED:
        assert found["refused"].startswith(REFUSED[name])
    else:
        assert "refused" not in found, found
        assert [column for column, figure in found.items() if figure is None] == ["merged"] * (name == "DeepSeek-V3")
        assert max(figure for figure in found.values() if figure is not None) <= 1e-5


def test_all_published_models_are_compared() -> None:
    assert {*MODELS} >= {*VARIANTS, *(path.stem for path in LAYOUTS.glob("*.json"))}


def stacked(folder: Path, target: Path) -> Path:
    """A model with its experts in stacks, as Qwen3.5's and 3.6's mixtures are published."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts.0.gate_proj" in name]:
        experts = name.partition(".0.gate_proj")[0]
        num = sum(each.startswith(f"{experts}.") and "gate_proj" in each for each in tensors)
        gates, ups, downs = (
            [tensors.pop(f"{experts}.{number}.{linear}.weight") for number in range(num)]
            for linear in ("gate_proj", "up_proj", "down_proj")
        )
        both = [torch.cat(two) for two in zip(gates, ups, strict=True)]
        tensors |= {f"{experts}.gate_up_proj": torch.stack(both), f"{experts}.down_proj": torch.stack(downs)}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("family", "engine"), [("qwen3_5_moe", "megatron"), ("qwen3_moe", "fsdp")])
def test_stacked_experts_are_computed_as_those_apart_and_written_as_they_were(
    tmp_path: Path, family: str, engine
) -> None:
    apart = distinct_model(tmp_path / "apart", family, tied=False)
    model = stacked(apart, tmp_path / "stacked")
    assert look_at(model, LORA).problems == ()
    found, expected = start(engine, model, "full"), start(engine, apart, "full")
    assert torch.equal(logprobs(found, ROWS), logprobs(expected, ROWS))
    for each, folder in ((found, tmp_path / "found"), (expected, tmp_path / "expected")):
        train(each, [[random_rows([30])]])
        each.save(folder)
    stacked(tmp_path / "expected/weights", tmp_path / "both")
    saved, both = (load_file(each / "model.safetensors") for each in (tmp_path / "found/weights", tmp_path / "both"))
    assert saved.keys() == both.keys() and all(torch.equal(saved[name], both[name]) for name in both)
    found.load(tmp_path / "expected")  # which has them apart: a checkpoint may be of either form
    decoders = [Decoder(each, torch.float32, torch.device("cpu")).named_weights() for each in (model, apart)]
    assert all(torch.equal(decoders[0][name], one) for name, one in decoders[1].items())

    lora = start(engine, model, "lora")
    train(lora, [[random_rows([30])]], learning_rate=1e-2)
    lora.save(tmp_path / "lora")
    source = source_of(model, "merged", adapter=tmp_path / "lora" / "weights")
    merged = exported(source, tmp_path / "merged")
    assert load_file(merged / "model.safetensors").keys() == saved.keys()
    assert (logprobs(start(engine, merged), ROWS) - logprobs(lora, ROWS)).abs().max() <= 1e-5


def test_what_is_carried_along_is_written_as_it_was_whatever_its_type_and_shape(tmp_path: Path) -> None:
    """Clip bounds in Gemma 4's towers have no dimension."""
    _, model = model_with_tower(tmp_path, "gemma4")
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int32, torch.uint8, torch.bool, torch.int16]
    more = {f"model.vision_tower.bound.{number}": torch.ones((), dtype=dtype) for number, dtype in enumerate(dtypes)}
    more["model.audio_tower.table"] = torch.arange(6, dtype=torch.uint8).view(2, 3)
    path = model / "model.safetensors"
    save_file(load_file(path) | more, path, {"format": "pt"})
    assert look_at(model, LORA).problems == ()
    engine = start("megatron", model, "full")
    engine.save(tmp_path / "saved")
    written = load_file(tmp_path / "saved/weights/model.safetensors")
    assert all(written[name].dtype == one.dtype and torch.equal(written[name], one) for name, one in more.items())
    engine.load(tmp_path / "saved")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 with a layer of multi-token prediction behind its others."""
    model = distinct_model(tmp_path_factory.mktemp("latent"), "deepseek_v3", tied=False)
    edit(model / "config.json", num_nextn_predict_layers=1)
    tensors = load_file(model / "model.safetensors")
    behind = {name.replace("layers.1.", "layers.2."): one for name, one in tensors.items() if "layers.1." in name}
    tensors |= {name: one.clone() for name, one in behind.items()}
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(64, 128)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


DAMAGES = {
    "nothing": lambda tensors: tensors,
    "a layer behind that predicts nothing": lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"),
    "a tensor of nobody": lambda tensors: tensors.update({"model.layers.1.mlp.gate.scale": torch.ones(8)}),
    "a layer too many": lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.ones(64)}),
    "no expert": lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
    "another shape": lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": torch.ones(7, 64)}),
    "a correction of another shape": lambda tensors: tensors.update(
        {"model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(7)}
    ),
    "no correction": lambda tensors: tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
    "whole numbers": lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_worker_would_refuse_is_refused_before_a_lease_in_the_same_words(
    latent: Path, tmp_path: Path, damage: str
) -> None:
    config = Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))
    model = Path(shutil.copytree(latent, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    DAMAGES[damage](tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    look = look_at(model, LORA)
    if damage == "nothing":
        assert look.problems == () and look.layouts and resolve(config, model)
        start("megatron", model)
        return
    (problem,) = look.problems
    assert refusal(config, model) == problem
    for opening in (lambda: start("megatron", model), lambda: Decoder(model, torch.float32, torch.device("cpu"))):
        with pytest.raises(InvalidInput) as refused:
            opening()
        assert problem.endswith(refused.value.message)


@pytest.mark.parametrize("family", FAMILIES)
def test_switches_that_transformers_sets_in_every_model_of_a_family_pass(family: str) -> None:
    own = {"head_dim": 128} if family == "glm4_moe" else {}  # half of its default of 42 cannot be rotated by pairs
    read_model_config(AutoConfig.for_model(family, **own).to_dict(), "config.json")


@pytest.mark.parametrize(
    ("family", "switch", "passes"),
    [
        ("deepseek_v3", {"seq_aux": True, "aux_loss_alpha": 0.001}, True),
        ("qwen3_moe", {"use_qk_norm": True}, True),
        ("llama", {"use_qk_norm": True}, False),
        ("qwen3_moe", {"use_parallel_residual": True}, False),
    ],
)
def test_a_switch_passes_that_says_what_the_family_does_or_what_a_loss_reads(family, switch, passes) -> None:
    values = AutoConfig.for_model(family).to_dict() | switch
    if passes:
        read_model_config(values, "config.json")
    else:
        with pytest.raises(InvalidInput, match=f"{next(iter(switch))} = True is not supported"):
            read_model_config(values, "config.json")
