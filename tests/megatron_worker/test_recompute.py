"""Layers that are computed again in the backward: the same bits in less memory, and when a job takes that way."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from longshore.events import Failed
from longshore.training import Adam, EngineName, Full, Layout, Lora, Quantization
from megatron_worker.dispatch import Dispatcher
from megatron_worker.memory import measure_step
from megatron_worker.training.batches import PackedBatches
from tests.depth import drawn
from tests.megatron_worker.driving import LOSS
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows, routed
from tests.megatron_worker.test_job_micro_batches import folder_of_plan, peak_of, state, steps_of, write_random_units
from tests.megatron_worker.test_megatron_job import NUM_STEPS, checkpoint, do, plan, weights_sha256, worker, workshop  # noqa: F401 (fixtures)
from tests.megatron_worker.trees import as_tree, random_sequences
from tests.megatron_worker.workshop import read_log

pytestmark = pytest.mark.usefixtures("one_thread")

DROPPING = Lora(rank=4, alpha=8, dropout=0.3)
DORA = DROPPING.model_copy(update={"dora": True})
CASES = {
    "dense": ("qwen3", DORA, {}),
    "whole": ("qwen3", Full(), {}),
    "quantized": ("qwen3", DROPPING, {"quantize": "nf4"}),
    "mixture": ("qwen3_moe", Full(), {}),
    "routes": ("qwen3_moe", Full(), {"routes": True}),
    "hybrid": ("qwen3_5", DROPPING, {}),
    "hybrid whole": ("qwen3_5", Full(), {}),
    "sinks": ("gpt_oss", Full(), {}),
    "shared keys": ("gemma4", DROPPING, {}),
    "mamba": ("nemotron_h", Full(), {}),
    "latents": ("deepseek_v3", Full(), {}),
    "fsdp": ("qwen3", DORA, {"engine": "fsdp"}),
    "fsdp whole": ("qwen3", Full(), {"engine": "fsdp"}),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    model: Path
    trainable: Lora | Full
    layout: Layout = dataclasses.field(default_factory=Layout)
    engine: EngineName = "megatron"
    routes: bool = False
    quantize: Quantization | None = None


def trained(trial: Trial, recompute: bool) -> dict[str, torch.Tensor]:
    """This rank's sums, gradients and weights of three steps, of three bins of rows and one with a prefix tree each."""
    settings = {"quantize": trial.quantize} if trial.quantize else {}
    engine = ENGINES[trial.engine](trial.model, trial.layout, "float32", **settings)
    if isinstance(trial.trainable, Lora):
        engine.add_adapter("run", trial.trainable, seed=3)
    else:
        engine.train_full(trial.trainable)
    engine.recompute = recompute
    optimizer, found = engine.trained.optimizer, {}
    for step in range(3):
        rows = [random_rows([19 + step, 7, 12], seed=3 * step + number) for number in range(3)]
        bins = [*map(bin_of, rows), as_tree(random_sequences(step, num_groups=1))]
        bins = bins[engine.facts.dp_rank :: engine.facts.dp_size]
        if trial.routes:
            bins = [routed(engine.facts.routes, batch, number) for number, batch in enumerate(bins)]
        for number, (_, sums) in enumerate(engine.forward_backward_all(bins, LOSS)):
            found |= {f"{step}.{number}.{name}": value for name, value in sums.items()}
        found |= {f"{step}.{name}": p.grad.clone() for name, p in parameters(engine) if p.grad is not None}
        engine.optim_step(Adam(), 1e-2, 100.0)
    assert optimizer.step_count == 3
    return found | {name: p.detach().clone() for name, p in parameters(engine)}


def parameters(engine):
    owner = engine._model if engine.active is None else engine.adapters[engine.active]
    return [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in owner.parameters.items()]


def has_the_same_bits(trial: Trial) -> bool:
    plain, again = (trained(trial, recompute) for recompute in (False, True))
    assert len(plain) > 4 and plain.keys() == again.keys()
    return all(torch.equal(tensor, again[name]) for name, tensor in plain.items())


@pytest.mark.parametrize("case", drawn([*CASES], 3))
def test_gradients_and_weights_are_the_same_bits(tmp_path, case):
    family, trainable, changes = CASES[case]
    model = distinct_model(tmp_path / "model", family, num_layers=4)
    assert has_the_same_bits(Trial(model, trainable, **changes))


def test_ranks_have_the_same_bits(tmp_path):
    dense = distinct_model(tmp_path / "dense", num_layers=4)
    mixture = distinct_model(tmp_path / "mixture", "qwen3_moe", tied=False)
    layouts = [(dense, Layout(tp=2)), (dense, Layout(tp=2, sp=True)), (dense, Layout(pp=2)), (dense, Layout(cp=2))]
    layouts.append((mixture, Layout(dp=2, ep=2)))
    trials = [Trial(model=m, layout=layout, trainable=DROPPING, routes=m == mixture) for m, layout in layouts]
    trials.append(Trial(model=dense, layout=Layout(tp=2), trainable=DORA))
    trials += [Trial(model=dense, layout=Layout(dp=2), trainable=of, engine="fsdp") for of in (DROPPING, Full())]
    trials = drawn(trials, 3)
    for found in on_ranks(2, in_turn, has_the_same_bits, [(trial,) for trial in trials], timeout_s=240):
        assert all(found), [*zip(trials, found, strict=True)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_holds_less(tmp_path, engine):
    made = ENGINES[engine](distinct_model(tmp_path / "model", num_layers=6), Layout(), "float32")
    made.add_adapter("run", Lora(rank=4, alpha=8), seed=3)
    batch, peaks = bin_of(random_rows([150, 150])), []
    for made.recompute in (False, True):
        with LiveBytes() as live:
            made.forward_backward(batch, LOSS)
        peaks.append(live.peak)
    assert peaks[1] < 0.5 * peaks[0], peaks
    made.optim_step(Adam(), 0.0, 1.0)


def test_a_job_recomputes_where_its_longest_example_fits_in_no_other_way(worker, workshop):  # noqa: F811 (fixtures)
    engine = ENGINES["megatron"](Path(workshop.model.uri.removeprefix("file://")), Layout(), "float32")
    engine.add_adapter("default", Lora(rank=4, alpha=8), 0)
    needed = []
    for engine.recompute in (False, True):
        needed.append(measure_step(engine, LOSS, False, 1 << 24).at(12).forward * 1.08)  # the longest example
    budget = int(sum(needed) / 2)
    auto = do(worker, workshop, "auto", plan(workshop, memory_budget_bytes=budget))
    recorded = state(auto, NUM_STEPS)
    assert recorded["recompute"] is True and recorded["micro_batch_tokens"] >= 12
    wide = do(worker, workshop, "wide", plan(workshop, memory_budget_bytes=1 << 30))
    assert "recompute" not in state(wide, NUM_STEPS) and "recomputed" not in steps_of(wide)[0]
    # What a checkpoint records is repeated, whatever would be measured now.
    resumed = do(worker, workshop, "resumed", plan(workshop, memory_budget_bytes=1 << 30), checkpoint(auto, 2))
    assert all(step["recomputed"] == 1.0 for job in (auto, resumed) for step in steps_of(job))
    assert weights_sha256(resumed) == weights_sha256(auto) and state(resumed, NUM_STEPS) == recorded

    bins, again = (do(worker, workshop, recompute, plan(workshop, recompute=recompute)) for recompute in ("off", "on"))
    assert weights_sha256(bins) == weights_sha256(again) != weights_sha256(auto)
    assert "recomputed" not in steps_of(bins)[0] and steps_of(again)[0]["recomputed"] == 1.0
    assert "recompute" not in state(bins, 2) and state(again, 2)["recompute"] is True

    job = workshop.job("refused", plan(workshop, memory_budget_bytes=budget, recompute="off"))
    worker.do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.message.startswith("memory_budget_bytes: the longest example has")


@pytest.mark.parametrize("num_branches", drawn([1, 6], 1))
def test_no_pass_exceeds_the_budget_and_the_largest_uses_it(tmp_path, num_branches):
    engine = ENGINES["megatron"](distinct_model(tmp_path / "model"), Layout(), "float32")
    dispatcher, budget, found = Dispatcher(engine), 2_000_000, []
    dispatcher.create_slot("one", Lora(rank=4, alpha=8), 0)
    write_random_units(tmp_path / "units", np.random.default_rng(3), 4000, num_branches)
    for recompute in ("off", "on"):
        plans = folder_of_plan(tmp_path / "units", tmp_path / recompute)
        with PackedBatches.open(tmp_path / "units", plans) as data, dispatcher.resident("one"):
            dispatcher.form_micro_batches("one", data, LOSS, budget, recompute=recompute)
            peaks = [peak_of(engine, data.batch(units, engine.facts.device), LOSS) for units in data.bins(0)]
            assert 0.75 * budget <= max(peaks) <= budget and len(peaks) > 3
            found.append(data.most_tokens)
    assert found[1] > 1.5 * found[0], found
