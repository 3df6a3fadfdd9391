"""An engine whose base is quantized against one that has the whole weights which the codes stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file

from longshore.fields import Artifact
from longshore.layout import Layout
from longshore.training import Full, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.quantized import CODES
from megatron_worker.warm_engine import build_engine
from shared.jobs.job import SessionPlan
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA, checkpoint_bytes, furthest, gradient
from tests.megatron_worker.quantized.quantized_ranks import Trial
from tests.megatron_worker.quantized.whole_models import write_whole
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.trees import LOSS
from tests.megatron_worker.trials import run_trials

ROWS = random_rows([40, 17, 90])
STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(6))]
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "gemma4", "nemotron_h", "deepseek_v3"]
CASES = [(family, "nf4") for family in FAMILIES] + [(f, kind) for f in FAMILIES[:2] for kind in ("int8", "fp8")]


def start(model, kind, dtype="float32"):
    return MegatronEngine(model, Layout(), dtype, quantize=kind)


def named(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


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


@pytest.mark.parametrize(("kind", "dtype"), drawn([("nf4", "float32"), ("int8", "bfloat16"), ("fp8", "float32")], 1))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_run_killed_and_resumed_ends_with_the_same_bits(tmp_path, family, kind, dtype):
    model = distinct_model(tmp_path / "model", family)

    def begin():
        engine = start(model, kind, dtype)
        engine.add_adapter("run", LORA, seed=3)
        return engine

    whole = begin()
    train(whole, STEPS[:3])
    whole.save(tmp_path / "middle")
    train(whole, STEPS[3:])
    whole.save(tmp_path / "end")
    resumed = begin()
    resumed.load(tmp_path / "middle")
    train(resumed, STEPS[3:])
    resumed.save(tmp_path / "again")
    assert checkpoint_bytes(tmp_path / "end") == checkpoint_bytes(tmp_path / "again")


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


def test_layouts_compute_with_the_codes_of_their_own_parts(tmp_path):
    """Of every rank the scores before and after two steps, beside whole weights on the same layout."""
    dense = distinct_model(tmp_path / "dense", "qwen3", num_kv_heads=2)
    mixture = distinct_model(tmp_path / "mixture", "qwen3_moe", num_kv_heads=2)
    stacked = distinct_model(tmp_path / "stacked", "gpt_oss")
    trials = [
        Trial(model=dense, layout=Layout(tp=2), quantize="nf4"),
        Trial(model=dense, layout=Layout(tp=2, sp=True), quantize="int8"),
        Trial(model=dense, layout=Layout(pp=2), quantize="fp8"),
        Trial(model=mixture, layout=Layout(ep=2, dp=2), quantize="nf4"),
        Trial(model=mixture, layout=Layout(tp=2, sp=True, etp=2), quantize="int8"),
        Trial(model=stacked, layout=Layout(ep=2, dp=2), quantize="nf4"),
    ]
    results = tmp_path / "results"
    results.mkdir()
    run_trials("quantized.quantized_ranks", results, trials, 2, 240)
    found = {path.name: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert len(found) == 2 * len(trials)
    for name, figures in found.items():
        assert figures["furthest"] <= 2e-5, name
        assert figures["moved"] > 1e-3, name
