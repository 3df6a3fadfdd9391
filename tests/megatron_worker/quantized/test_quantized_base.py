"""An engine whose base is quantized against one that has the whole weights which the codes stand for."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.fields import Artifact
from longshore.training import Full, Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.quantized import CODES
from megatron_worker.warm_engine import build_engine
from shared.jobs.job import SessionPlan
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, furthest, gradient
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.parallel_ranks import SFT_LOSS, scores, sft_bins, step
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.trees import LOSS

ROWS = random_rows([40, 17, 90])
STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(6))]
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "gemma4", "nemotron_h", "deepseek_v3"]
CASES = [(family, "nf4") for family in FAMILIES] + [(f, kind) for f in FAMILIES[:2] for kind in ("int8", "fp8")]


def start(model, kind, dtype="float32"):
    return MegatronEngine(model, Layout(), dtype, quantize=kind)


def named(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def write_whole(named, model, folder):
    """A folder as `model`'s, with the weights that a quantized base stands for in place of its own."""
    shutil.copytree(model, folder)
    kept = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name not in named}
    whole = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(kept | whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_quantized(name):
    linear = "_proj" in name or "experts.gate_up" in name
    return linear and "bias" not in name and "per_layer" not in name


@pytest.mark.parametrize(("family", "kind"), drawn(CASES, len(CASES) // 2))
def test_it_computes_and_trains_as_the_whole_weights_do(tmp_path, family, kind):
    model = distinct_model(tmp_path / "model", family, tied=False)
    engine = start(model, kind)
    whole, published = named(engine), load_file(model / "model.safetensors")
    changed = {name for name, weight in whole.items() if not torch.equal(weight, published[name])}
    assert changed == {name for name in whole if is_quantized(name)}
    for name in changed:
        off = (whole[name] - published[name]).norm() / published[name].norm()
        assert off <= {"nf4": 0.12, "int8": 0.02, "fp8": 0.04}[kind], name
    reference = MegatronEngine(write_whole(whole, model, tmp_path / "whole"), Layout(), "float32")
    batch = bin_of(ROWS)
    assert (logprobs(engine, batch) - logprobs(reference, batch)).abs().max() <= 1e-5
    plain = MegatronEngine(model, Layout(), "float32")
    assert (logprobs(engine, batch) - logprobs(plain, batch)).abs().max() > 1e-3
    found = []
    for name, each in (("quantized", engine), ("reference", reference)):
        each.add_adapter("run", LORA, seed=3)
        train(each, STEPS[:2])  # B is not zero any more
        each.forward_backward(batch, LOSS)
        found.append(gradient(each, tmp_path / name))
        train(each, STEPS[2:4])
    largest = max(float(tensor.abs().max()) for tensor in found[1].values())
    assert furthest(*found) <= 1e-4 * largest
    assert (logprobs(engine, batch) - logprobs(reference, batch)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", CODES)
def test_bytes_of_the_base_are_those_of_its_codes_and_go_away_and_come_back(model, kind):
    engine = start(model, kind, "bfloat16")
    linears = sum(weight.numel() for name, weight in engine.named_weights() if is_quantized(name))
    others = engine._model.flat.num_bytes
    held = engine.memory().parts["weights"].device - others
    padding = 64 * 5 * 2 * 4  # between tensors, of codes and of scales
    size = {"nf4": 1 / 2 + 4 / 64, "int8": 1 + 4 / 64, "fp8": 4 / 3 + 4 / 64}[kind]  # rows have 64 numbers, or 192
    assert (1 / 2 if kind == "nf4" else 1) * linears < held <= size * linears + padding < 2 * linears
    before = logprobs(engine, bin_of(ROWS))
    engine.place("host")
    assert engine.memory().device_bytes == 0
    engine.place("device")
    assert torch.equal(logprobs(engine, bin_of(ROWS)), before)
    engine.place("dropped")
    engine.place("device")
    assert torch.equal(logprobs(engine, bin_of(ROWS)), before)


def test_it_is_never_trained(model):
    with pytest.raises(AssertionError, match="frozen"):
        start(model, "nf4").train_full(Full())


def test_a_job_s_engine_is_as_its_plan_says(model):
    nothing = Artifact(uri="file:///x", sha256="0" * 64)
    fields = {"run_id": "r", "job_id": "000001", "model": nothing, "trainable": LORA, "max_tokens": 64}
    engine = build_engine(SessionPlan(**fields, quantize_base="int8", optimizer_states="8bit"), model)
    engine.add_adapter("run", LORA, seed=3)
    expected = MegatronEngine(model, Layout(), "float32", quantize="int8", optimizer_states="8bit")
    expected.add_adapter("run", LORA, seed=3)
    plain = build_engine(SessionPlan(**fields), model)
    plain.add_adapter("run", LORA, seed=3)
    assert engine.memory() == expected.memory()
    assert engine.memory().parts["weights"].device < plain.memory().parts["weights"].device
    assert engine.memory().parts["optimizer"].device < plain.memory().parts["optimizer"].device


def test_it_takes_adapters_beside_some_linears_and_none(model, tmp_path):
    """Those without one are multiplied by themselves."""
    engine = start(model, "nf4")
    reference = MegatronEngine(write_whole(named(engine), model, tmp_path / "whole"), Layout(), "float32")
    for each in (engine, reference):
        each.add_adapter("run", Lora(rank=4, targets=("q_proj", "down_proj")), seed=0)
        train(each, STEPS[:2])
    assert (logprobs(engine, bin_of(ROWS)) - logprobs(reference, bin_of(ROWS))).abs().max() <= 1e-5


SOME = Lora(rank=3, alpha=6, targets=("q_proj", "down_proj"))  # other linears have a backward of their own


def apart_and_moved(model, layout, kind, folder):
    """Of scores before two steps of an adapter and after them: how far they are from those of whole weights on the same
    layout, and how far the steps have moved them."""

    def scored(engine):
        found = [scores(engine, sft_bins(0)[0])[0]]
        engine.add_adapter("run", SOME, seed=5)
        for seed in range(2):
            step(engine, sft_bins(seed), SFT_LOSS, 1e-2)
        return torch.tensor([*found, scores(engine, sft_bins(0)[0])[0]])

    engine = MegatronEngine(model, layout, "float32", quantize=kind)
    whole = write_whole(named(engine), model, folder / f"{model.name}-{layout.label}-{engine.facts.rank}")
    found = scored(engine)
    expected = scored(MegatronEngine(whole, layout, "float32"))
    return float((found - expected).abs().max()), float((found[0] - found[1]).abs().max())


def test_layouts_compute_with_the_codes_of_their_own_parts(tmp_path):
    dense = distinct_model(tmp_path / "dense", "qwen3", num_kv_heads=2)
    mixture = distinct_model(tmp_path / "mixture", "qwen3_moe", num_kv_heads=2)
    stacked = distinct_model(tmp_path / "stacked", "gpt_oss")
    cases = [
        (dense, Layout(tp=2), "nf4"),
        (dense, Layout(tp=2, sp=True), "int8"),
        (dense, Layout(pp=2), "fp8"),
        (mixture, Layout(ep=2, dp=2), "nf4"),
        (mixture, Layout(tp=2, sp=True, etp=2), "int8"),
        (stacked, Layout(ep=2, dp=2), "nf4"),
    ]
    for found in on_ranks(2, in_turn, apart_and_moved, [(*case, tmp_path) for case in cases]):
        for case, (apart, moved) in zip(cases, found, strict=True):
            assert apart <= 2e-5, case
            assert moved > 1e-3, case
