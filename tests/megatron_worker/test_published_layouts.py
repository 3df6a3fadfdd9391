"""Models as they are published: what `models check` accepts is read, trained, saved, served: fused, wrapped, in FP8.

The models of ../shared/layouts are compared with transformers by benchmarks/published_layouts.py.
"""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from activities.model_look import look_at
from benchmarks.published_layouts import MODELS, compare
from longshore.training import Full, Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.tensors.safetensors_files import single_file
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_model_config
from shared.models.merging import Merger
from shared.models.peft import WEIGHTS, read_config
from shared.settings import DownloadSettings, Settings
from tests.activities.models.resolving import edit, refusal, resolve
from tests.activities.publishing.test_export import exported, source_of
from tests.depth import drawn
from tests.megatron_worker.driving import ADAM, LEARNING_RATE, train
from tests.megatron_worker.engines import ENGINES, start
from tests.megatron_worker.published import LAYOUTS, VARIANTS
from tests.megatron_worker.rows import bin_of, distinct_model, model_with_tower, random_rows, reference_steps
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers

PUBLISHED_ROWS = bin_of(random_rows([30, 20]))
LORA = Lora(rank=4, alpha=8)


@pytest.mark.skipif(not LAYOUTS.exists(), reason="the facts of published models, ../shared/layouts, are not here")
@pytest.mark.drawn
@pytest.mark.parametrize("name", drawn([*MODELS], 2))
def test_a_published_model_is_what_transformers_computes(tmp_path: Path, name: str) -> None:
    found = compare(name, tmp_path)
    found.pop("model")
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
    assert torch.equal(logprobs(found, PUBLISHED_ROWS), logprobs(expected, PUBLISHED_ROWS))
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
    assert (logprobs(start(engine, merged), PUBLISHED_ROWS) - logprobs(lora, PUBLISHED_ROWS)).abs().max() <= 1e-5


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
    own: dict[str, Any] = {
        "glm4_moe": {"head_dim": 128},  # half of its default of 42 cannot be rotated by pairs
        "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},  # no default has attention
    }.get(family, {})
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


ROWS = random_rows((60, 17))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def by_the_formula(code_OI: torch.Tensor, scale_BC: torch.Tensor) -> np.ndarray:
    """Each number of a code times the scale of the block that it is in, one after another."""
    codes, scales = code_OI.float().numpy(), scale_BC.numpy()
    made = np.empty_like(codes)
    for row, column in np.ndindex(*codes.shape):
        made[row, column] = codes[row, column] * scales[row // 128, column // 128]
    return made


def in_fp8(model: Path) -> Path:
    """Quantize a model's linears, also those of the layers behind. Returns a folder of the numbers they stand for."""
    same = shutil.copytree(model, model.with_name("same"))
    tensors = load_file(model / "model.safetensors")
    numbers, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        code_OI = (tensors[name] * 100).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in code_OI.shape]
        scale_BC = (0.5 + torch.rand(blocks, generator=generator)) / 100
        tensors |= {name: code_OI, f"{name}_scale_inv": scale_BC}
        numbers[name] = torch.from_numpy(by_the_formula(code_OI, scale_BC))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    save_file(numbers, same / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return same


def deepseek(folder: Path) -> Path:
    """A model whose linears are of no multiple of 128, with a layer behind the others that predicts more tokens."""
    model = distinct_model(folder / "model", "deepseek_v3", tied=False, hidden_size=200)
    tensors = load_file(model / "model.safetensors")
    behind = {"eh_proj": torch.randn(200, 400), "mlp.down_proj": torch.randn(200, 600), "enorm": torch.ones(200)}
    tensors |= {f"model.layers.2.{name}.weight": tensor for name, tensor in behind.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model


@pytest.mark.parametrize(("family", "engine"), [("deepseek_v3", "megatron"), ("qwen3", "megatron"), ("qwen3", "fsdp")])
def test_blocks_are_read_as_the_formula_says_and_written_as_they_are_trained(tmp_path, family, engine):
    small = {"hidden_size": 200, "head_dim": 24}
    model = deepseek(tmp_path) if family == "deepseek_v3" else distinct_model(tmp_path / "model", "qwen3", **small)
    same = in_fp8(model)
    driven, plain = start(engine, model, "lora"), start(engine, same, "lora")
    assert torch.equal(logprobs(driven, bin_of(ROWS)), logprobs(plain, bin_of(ROWS)))
    assert train(driven, [[ROWS]]) == train(plain, [[ROWS]])
    decoders = [Decoder(folder, torch.float32, torch.device("cpu")) for folder in (model, same)]
    assert torch.equal(*(logprobs_by_steps(decoder, ROWS[0].ids, range(20, 30), {}) for decoder in decoders))

    full = start(engine, model)
    full.train_full(Full())
    full.save(tmp_path / "saved")
    written = tmp_path / "saved" / "weights"
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    read, expected, found = (load_file(folder / "model.safetensors") for folder in (model, same, written))
    expected = {name: tensor for name, tensor in expected.items() if not name.startswith("model.layers.2.")}
    expected |= {name: tensor for name, tensor in read.items() if name.startswith("model.layers.2.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    full.load(tmp_path / "saved")


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (1, 257), (130, 1), (2, 130, 200)], ids=str)
def test_any_part_of_a_tensor_is_read(tmp_path, shape):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [*shape[:-2], *(-(-size // 128) for size in shape[-2:])]
    scales = torch.rand(blocks, generator=generator)
    save_file({"w": codes, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    pairs = zip(codes.reshape(-1, *shape[-2:]), scales.reshape(-1, *blocks[-2:]), strict=True)
    expected = torch.stack([torch.from_numpy(by_the_formula(*pair)) for pair in pairs]).reshape(shape)
    files = single_file(tmp_path / "model.safetensors")
    assert files.names == {"w"}
    assert torch.equal(files._slice("w")[:], expected)
    lazy = files._slice("w")
    for axis, size in enumerate(shape):
        for begin, end in {
            (0, size),
            (size // 3, size),
            (0, size // 2),
            (min(127, size - 1), size),
            (2 * size // 3, size),
            (size, size),
        }:
            key = (*[slice(None)] * axis, slice(begin, end))
            assert torch.equal(lazy[key], expected[key]), key
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"w", "w_scale_inv"}


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_scales_that_are_missing_or_of_another_shape_are_refused(tmp_path, engine):
    model = distinct_model(tmp_path / "model", hidden_size=200)
    in_fp8(model)
    tensors = load_file(model / "model.safetensors")
    scale = tensors[f"{NAME}_scale_inv"]
    for change, words in (
        ({}, f"{NAME} is FP8, and its scales, .*: it is missing"),
        ({f"{NAME}_scale_inv": scale[:, :-1].clone()}, r"_scale_inv, have to be floats of \(2, 5\): it is F32"),
        ({f"{NAME}_scale_inv": scale.flatten()}, r"_scale_inv, have to be floats of .*: it is F32 of \(10,\)"),
        ({f"{NAME}_scale_inv": scale * torch.nan}, "not finite"),
        (
            {f"{NAME}_scale_inv": scale, NAME: tensors[NAME].float()},
            f"not of this family, the first is '{NAME}_scale_inv'",
        ),
    ):
        others = {name: tensor for name, tensor in tensors.items() if name != f"{NAME}_scale_inv"}
        save_file(others | change, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidInput, match=words):
            start(engine, model)


STEPS = [random_rows([40, 17, 60, 8], seed=seed) for seed in range(3)]
FUSED_ROWS = random_rows([40, 17], seed=9)
KINDS = {"phi3": AutoModelForCausalLM, "mistral3": AutoModelForImageTextToText}
OWN = {"phi3": ("qkv_proj", "gate_up_proj", "o_proj", "down_proj"), "mistral3": ("q_proj", "v_proj", "up_proj")}


@pytest.fixture(scope="module", params=KINDS)
def fused(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mistral3":
        return request.param, model_with_tower(folder, "mistral")[1]
    return request.param, distinct_model(folder / "model", "phi3", tied=False)


def loaded(fused: tuple[str, Path], folder: Path | None = None):
    return KINDS[fused[0]].from_pretrained(folder or fused[1], dtype=torch.float32)


def furthest(*logprob: torch.Tensor) -> float:
    return float((logprob[0] - logprob[1]).abs().max())


def history_of(driven, rate: float) -> list[tuple[float, float]]:
    return train(driven, [[rows[:2], rows[2:]] for rows in STEPS], learning_rate=rate)


def apart(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The furthest of losses, and of norms of gradients, relative."""
    return float((torch.tensor(found) / torch.tensor(expected) - 1).abs().max())


def merged(base: Path, adapter: Path, target: Path) -> Path:
    shutil.copytree(base, target)
    with (adapter / WEIGHTS).open("rb") as weights:
        merger = Merger.of(read_config(adapter), weights, WEIGHTS)
    with (target / "model.safetensors").open("wb") as file:
        merger.merge(io.BytesIO((base / "model.safetensors").read_bytes()), file, "model.safetensors")
    merger.check_used(WEIGHTS)
    return target


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_trained_saved_and_merged_as_by_peft(fused, tmp_path, engine):
    driven = start(engine, fused[1])
    driven.add_adapter("run", Lora(rank=4, alpha=8, targets=(*OWN[fused[0]], "lm_head")), seed=3)
    driven.save(tmp_path / "fresh")
    reference = PeftModel.from_pretrained(loaded(fused), tmp_path / "fresh" / "weights", is_trainable=True)
    expected = reference_steps(reference, STEPS, LEARNING_RATE, ADAM.weight_decay, ADAM.clip_norm)
    assert apart(history_of(driven, LEARNING_RATE), expected) <= 1e-5
    driven.save(tmp_path / "saved")
    theirs = logprobs_in_transformers(reference.eval(), FUSED_ROWS)
    assert furthest(logprobs(driven, bin_of(FUSED_ROWS)), theirs) <= 1e-4
    again = PeftModel.from_pretrained(loaded(fused), tmp_path / "saved" / "weights").eval()
    assert furthest(logprobs(driven, bin_of(FUSED_ROWS)), logprobs_in_transformers(again, FUSED_ROWS)) <= 1e-5

    # Merged it is of the layout that was read, and computes the same.
    folder = merged(fused[1], tmp_path / "saved" / "weights", tmp_path / "merged")
    before, after = (load_file(each / "model.safetensors") for each in (fused[1], folder))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert furthest(logprobs(start(engine, folder), bin_of(FUSED_ROWS)), logprobs(driven, bin_of(FUSED_ROWS))) <= 1e-4
    assert (
        furthest(logprobs_in_transformers(loaded(fused, folder), FUSED_ROWS), logprobs(driven, bin_of(FUSED_ROWS)))
        <= 1e-4
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_that_peft_has_written_is_read(fused, tmp_path, engine):
    targets = rf".*language_model.*\.({'|'.join(OWN[fused[0]])})" if fused[0] == "mistral3" else list(OWN[fused[0]])
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = get_peft_model(loaded(fused), config)
    theirs.save_pretrained(tmp_path / "theirs")
    driven = start(engine, fused[1])
    before = logprobs(driven, bin_of(FUSED_ROWS))
    driven.load_adapter("theirs", tmp_path / "theirs", None, trainable=False)
    driven.set_adapter("theirs")
    found = logprobs(driven, bin_of(FUSED_ROWS))
    assert furthest(found, logprobs_in_transformers(theirs.eval(), FUSED_ROWS)) <= 1e-5 < furthest(found, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_weight_is_trained_and_saved_in_the_layout_that_was_read(fused, tmp_path, engine):
    driven = start(engine, fused[1], "full")
    reference = loaded(fused)
    for name, weight in reference.named_parameters():
        weight.requires_grad_("vision_tower" not in name and "multi_modal" not in name)
    expected = reference_steps(reference, STEPS, 3e-4, ADAM.weight_decay, ADAM.clip_norm)
    assert apart(history_of(driven, 3e-4), expected) <= 1e-5
    driven.save(tmp_path / "saved")
    before, after = (load_file(each / "model.safetensors") for each in (fused[1], tmp_path / "saved" / "weights"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith(("vision_tower.", "multi_modal_projector."))}
    with torch.no_grad():
        theirs = logprobs_in_transformers(reference.eval(), FUSED_ROWS)
    assert furthest(logprobs_in_transformers(loaded(fused, tmp_path / "saved" / "weights"), FUSED_ROWS), theirs) <= 1e-4


def test_the_sampler_draws_by_the_trainer_s_numbers(fused, tmp_path):
    driven = start("megatron", fused[1])
    decoder = Decoder(fused[1], torch.float32, torch.device("cpu"))
    row = random_rows([60])[0]
    expected = logprobs(driven, bin_of([dataclasses.replace(row, weights=[0.0] + [1.0] * 59)]))
    assert furthest(logprobs_by_steps(decoder, row.ids, range(20, 50), {}), expected[19:49]) <= 1e-5


def changed(folder: Path, target: Path, **settings: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", [1.0, 0.75])
def test_longrope_of_phi_is_that_of_transformers(tmp_path, engine, part):
    """As Phi-4-mini's file has it: what it was trained on stands beside the scaling, not in it."""
    size = int(16 * part) // 2
    scaling = {"type": "longrope", "short_factor": [1.0 + n / 4 for n in range(size)], "long_factor": [9.0] * size}
    more = {"rope_theta": 1e4, "partial_rotary_factor": part, "max_position_embeddings": 8192, "rope_parameters": None}
    plain = distinct_model(tmp_path / "plain", "phi3", tied=False)
    folder = changed(plain, tmp_path / "long", **more, rope_scaling=scaling, original_max_position_embeddings=700)
    rows = random_rows((90, 2, 700, 33))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    driven = start(engine, folder)
    assert furthest(logprobs(driven, bin_of(rows)), logprobs_in_transformers(reference, rows)) <= 1e-5
    assert furthest(logprobs(driven, bin_of(rows)), logprobs(start(engine, plain), bin_of(rows))) > 1e-3
    with pytest.raises(InvalidInput, match=r"a sequence has 701 tokens.*of up to 700"):
        logprobs(driven, bin_of(random_rows((701,))))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported; these are: default"),
        ({"rope_parameters": None, "partial_rotary_factor": 0.2}, "rotates 3 of 16 dimensions"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"qk_norm": True}, "qk_norm"),
    ],
    ids=str,
)
def test_what_phi_does_not_compute_is_refused(tmp_path, settings, words):
    folder = changed(distinct_model(tmp_path / "model", "phi3"), tmp_path / "changed", **settings)
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


def test_what_is_no_mistral_within_is_refused(tmp_path):
    _, whole = model_with_tower(tmp_path, "mistral")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    for inner, words in (("ministral3", "which needs queries whose scale grows"), ("llama", "of the family mistral")):
        folder = changed(whole, tmp_path / inner, text_config=text | {"model_type": inner})
        with pytest.raises(InvalidInput, match=f"text_config: its model_type is '{inner}'.*{words}"):
            MegatronEngine(folder, Layout(), "float32")
    tensors = load_file(whole / "model.safetensors")
    folder = changed(whole, tmp_path / "without")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"the weights lack the tensor language_model.lm_head.weight"):
        MegatronEngine(folder, Layout(), "float32")
