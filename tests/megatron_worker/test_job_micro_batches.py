"""Jobs with a memory budget: the worker forms micro-batches that fit it, records them, and repeats them."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_worker.dispatch import Dispatcher
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank.packing import pack
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.micro_batches import cut, measure_passes, tokens_that_fit
from shared.jobs.events import Failed, Step
from shared.jobs.job import CrossEntropy, Lora
from shared.jobs.layout import Layout
from shared.jobs.packed import Units, UnitsWriter
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.test_megatron_job import (  # noqa: F401 (fixtures)
    NUM_STEPS,
    checkpoint,
    do,
    plan,
    weights_sha256,
    worker,
    workshop,
)
from tests.megatron_worker.workshop import read_log, write_plan


def steps_of(job):
    return [event.metrics for event in read_log(job.log_path) if isinstance(event, Step)]


def bins_of(job):
    return [metrics["num_bins"] for metrics in steps_of(job)]


def state(job, step):
    return json.loads((Path(job.checkpoint_dir) / f"step-{step:08d}" / "state.json").read_text())


def test_a_job_within_a_budget_repeats_its_micro_batches(worker, workshop):  # noqa: F811 (fixtures)
    bins = do(worker, workshop, "bins", plan(workshop))
    wide = do(worker, workshop, "wide", plan(workshop, memory_budget_bytes=1 << 30))
    assert bins_of(bins) == [3] * NUM_STEPS and bins_of(wide) == [1] * NUM_STEPS
    assert "micro_batch_tokens" not in state(bins, 2) and state(wide, 2)["micro_batch_tokens"] > 100
    first, cut_otherwise = (steps_of(job)[0] for job in (bins, wide))
    for name in ("loss", "grad_norm", "target_tokens"):
        assert cut_otherwise[name] == pytest.approx(first[name], rel=1e-6)

    budget = smallest_budget(workshop, num_tokens=14)  # an example has 12 at most
    narrow = do(worker, workshop, "narrow", plan(workshop, memory_budget_bytes=budget))
    assert min(bins_of(narrow)) > 3
    resumed = do(worker, workshop, "resumed", plan(workshop, memory_budget_bytes=budget), checkpoint(narrow, 2))
    # What a checkpoint records is repeated, whatever would be measured now.
    other = do(worker, workshop, "other", plan(workshop, memory_budget_bytes=1 << 30), checkpoint(narrow, 2))
    assert weights_sha256(resumed) == weights_sha256(other) == weights_sha256(narrow)
    assert bins_of(other) == bins_of(narrow)[2:]

    capped = do(worker, workshop, "capped", plan(workshop, memory_budget_bytes=1 << 30, max_micro_batch_tokens=14))
    assert min(bins_of(capped)) > 3 and state(capped, 2)["micro_batch_tokens"] == 14

    job = workshop.job("too-small", plan(workshop, memory_budget_bytes=1000))
    worker.do_one(job)
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and failed.message.startswith("memory_budget_bytes: the longest example has")


def smallest_budget(workshop, num_tokens):  # noqa: F811 (fixtures)
    """What a pass of so many tokens needs."""
    engine = MegatronEngine(Path(workshop.model.uri.removeprefix("file://")), Layout(), "float32")
    engine.add_adapter("default", Lora(rank=4, alpha=8), 0)
    cost = measure_passes(engine, loss_function(CrossEntropy(), 1.0), 1 << 24, has_branches=False)
    low, high = 1000, 1 << 24
    while high - low > 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if tokens_that_fit(cost, middle) >= num_tokens else (middle, high)
    return high


@pytest.mark.parametrize("kind", ["chains", "trees"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_pass_exceeds_the_budget_and_the_largest_uses_it(tmp_path, dtype, kind):
    engine = MegatronEngine(distinct_model(tmp_path / "model", num_layers=1), Layout(), dtype)
    dispatcher, loss = Dispatcher(engine), loss_function(CrossEntropy(), 1.0)
    dispatcher.create_slot("one", Lora(rank=4, alpha=8), 0)
    generator = np.random.default_rng(3)
    for number, budget in enumerate((1_000_000, 2_000_000, 5_000_000)):
        units, folder = tmp_path / f"units-{number}", tmp_path / f"plan-{number}"
        write_random_units(units, generator, 5 * budget // 5_000, num_branches=6 if kind == "trees" else 1)
        with PackedBatches.open(units, folder_of_plan(units, folder)) as data:
            dispatcher.form_micro_batches("one", data, loss, budget)
            most_tokens = data.most_tokens
            peaks = [peak_of(engine, data.batch(bin_units, engine.facts.device), loss) for bin_units in data.bins(0)]
            assert np.concatenate(data.bins(0)).tolist() == list(range(data.units.header.num_units))
            gradient = gradient_of(dispatcher, data, loss)
            data.most_tokens = None  # the plan's bins: each example alone
            difference = (gradient - gradient_of(dispatcher, data, loss)).norm() / gradient.norm()
        print(dtype, kind, budget, most_tokens, len(peaks), max(peaks) / budget, float(difference))
        assert difference <= (1e-6 if dtype == "float32" else 1e-2)
        assert len(peaks) > 3 and (0.85 if kind == "chains" else 0.75) * budget <= max(peaks) <= budget


def write_random_units(folder, generator, num_tokens, num_branches):
    """Sequences of 5 to 40 tokens, or so many on one prompt; all tokens but the first are targets."""
    writer = UnitsWriter(folder, ("token_id", "position", "parent", "hidden_index", "label", "weight"))
    while num_tokens > 0:
        prompt = generator.integers(3, VOCAB_SIZE, int(generator.integers(3, 30)))
        ends = [generator.integers(3, VOCAB_SIZE, int(generator.integers(2, 10))) for _ in range(num_branches)]
        tree = pack([np.concatenate([prompt, end]) for end in ends], 2)
        target_N = np.flatnonzero(tree.parent_T >= 0)
        writer.append(
            token_id=tree.token_id_T,
            position=tree.position_T,
            parent=tree.parent_T,
            hidden_index=tree.parent_T[target_N],
            label=tree.token_id_T[target_N],
            weight=np.ones(len(target_N)),
        )
        num_tokens -= len(tree.token_id_T)
    writer.close()


def folder_of_plan(units, folder):
    with Units(units) as read:
        write_plan(folder, units, [[[unit] for unit in range(read.header.num_units)]])
    return folder


def gradient_of(dispatcher, data, loss):
    dispatcher.zero_grad("one")
    for _ in dispatcher.forward_backward("one", data, 0, loss):
        pass
    return dispatcher.engine._slots.trainings["one"].optimizer.grad.buffer.clone()


def peak_of(engine, batch, loss):
    with LiveBytes() as live:
        engine.forward_backward(batch, loss)
    return live.peak


def test_steps_are_cut_in_their_order():
    units, lengths = np.array([5, 3, 9, 1]), np.array([4, 4, 2, 8])
    assert [part.tolist() for part in cut(units, lengths, 8)] == [[5, 3], [9], [1]]
    assert [part.tolist() for part in cut(units, lengths, 100)] == [[5, 3, 9, 1]]
    assert list(cut(units[:0], lengths[:0], 8)) == []
