"""Jobs in little memory: micro-batches that fit a budget, layers that are computed again in the backward."""

import dataclasses
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from longshore.events import Failed, Step
from longshore.losses import CrossEntropy
from longshore.training import Adam, EngineName, Full, Layout, Lora, Quantization
from megatron_worker.dispatch import Dispatcher
from megatron_worker.forwards import pack
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.memory import measure_step
from megatron_worker.training.batches import PackedBatches, cut, logprobs_role
from shared.jobs.packed import Units, UnitsWriter
from tests.depth import drawn
from tests.megatron_worker.driving import LOSS
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.rows import VOCAB_SIZE, bin_of, distinct_model, random_rows, routed
from tests.megatron_worker.test_megatron_job import (  # noqa: F401 (fixtures)  # noqa: F401 (fixtures)
    NUM_STEPS,
    checkpoint,
    do,
    new_worker,
    plan,
    weights_sha256,
    worker,
    workshop,
)
from tests.megatron_worker.test_policy_jobs import COLUMNS, TRAINER, rollouts
from tests.megatron_worker.trees import as_tree, random_sequences
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


def test_a_policy_s_jobs_within_a_budget_repeat_their_micro_batches(worker, workshop):  # noqa: F811 (fixtures)
    """Old policy and reference are scored in the same micro-batches. A run's next job takes them over."""
    data = rollouts(workshop.root, 512)
    of_policy = {"data": data, "loss": TRAINER, "temperature": 0.7}
    of_policy["evaluation"] = plan(workshop).evaluation.model_copy(update={"data": None})
    budget = smallest_budget(workshop, num_tokens=9, loss=TRAINER)  # a trajectory has 8 at most
    bins = do(worker, workshop, "policy-bins", plan(workshop, **of_policy))
    within = plan(workshop, **of_policy, memory_budget_bytes=budget)
    narrow = do(worker, workshop, "policy-narrow", within)
    assert bins_of(bins) == [2] * NUM_STEPS and bins_of(narrow) == [3, 3, 3, 3]
    for ours, theirs in zip(steps_of(narrow), steps_of(bins), strict=True):
        for name in ("loss", "grad_norm", "ratio_max", "kl_old_new", "kl_reference", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)
    assert steps_of(narrow)[0]["grad_norm"] == pytest.approx(steps_of(bins)[0]["grad_norm"], rel=1e-6)

    other = plan(workshop, **of_policy, memory_budget_bytes=1 << 30)  # what is recorded is repeated
    resumed = do(worker, workshop, "policy-resumed", other, checkpoint(narrow, 2))
    killed_early = do(new_worker(workshop.root), workshop, "policy-again", within)
    assert weights_sha256(resumed) == weights_sha256(killed_early) == weights_sha256(narrow)
    next_job = {"job_id": "000002", "first_step": NUM_STEPS, "initial_checkpoint": checkpoint(narrow, NUM_STEPS)}
    following = do(worker, workshop, "policy-next", other.model_copy(update=next_job))
    recorded = state(narrow, NUM_STEPS)["micro_batch_tokens"]
    assert state(following, 2 * NUM_STEPS)["micro_batch_tokens"] == recorded < 16
    assert bins_of(following) == bins_of(narrow)


def smallest_budget(workshop, num_tokens, loss=CrossEntropy()):  # noqa: B008, F811 (a constant; fixtures)
    """What a pass of so many tokens needs."""
    engine = MegatronEngine(Path(workshop.model.uri.removeprefix("file://")), Layout(), "float32")
    engine.add_adapter("default", Lora(rank=4, alpha=8), 0)
    cost = measure_step(engine, loss_function(loss, 1.0), False, 1 << 24)
    low, high = 1000, 1 << 24
    while high - low > 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if cost.size_within(middle / 1.08) >= num_tokens else (middle, high)
    return high


@pytest.mark.parametrize(("kind", "dtype"), drawn([*product(("chains", "trees"), ("float32", "bfloat16"))], 1))
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


@pytest.mark.parametrize("family", drawn(["qwen3", "qwen3_moe"], 1))
def test_no_pass_of_a_policy_s_job_exceeds_the_budget(tmp_path, family):
    """Passes that score the old policy's and the reference's log-probabilities do not either; experts are as drawn."""
    model = distinct_model(tmp_path / "model", family, tied=family == "qwen3", num_layers=1)
    engine = MegatronEngine(model, Layout(), "float32")
    dispatcher, loss, budget = Dispatcher(engine), loss_function(TRAINER, 0.7), 2_000_000
    dispatcher.create_slot("one", Lora(rank=4, alpha=8), 0)
    write_random_units(tmp_path / "units", np.random.default_rng(3), 2000, num_branches=6, columns=COLUMNS)
    with PackedBatches.open(tmp_path / "units", folder_of_plan(tmp_path / "units", tmp_path / "plan")) as data:
        with LiveBytes() as live:
            dispatcher.form_micro_batches("one", data, loss, budget)
        assert live.peak <= budget  # of the passes that measure
        scored = []
        for slot, column in ((None, "ref_logprob_N"), ("one", "old_logprob_N")):
            with LiveBytes() as live:
                role = logprobs_role(slot, data, range(1), 0.7, column=column)
                for _ in dispatcher.score([role]):
                    scored.append(live.take_peak())
        peaks = [peak_of(engine, data.batch(units, engine.facts.device), loss) for units in data.bins(0)]
        gradient = gradient_of(dispatcher, data, loss)
        data.most_tokens = None
        difference = (gradient - gradient_of(dispatcher, data, loss)).norm() / gradient.norm()
    print(len(peaks), max(peaks) / budget, max(scored) / budget, float(difference))
    assert max(scored) <= budget and 0.85 * budget <= max(peaks) <= budget and len(peaks) > 3
    assert difference <= 1e-6


def write_random_units(folder, generator, num_tokens, num_branches, columns=()):
    """Sequences of 5 to 40 tokens, or so many on one prompt; all tokens but the first are targets."""
    columns = dict.fromkeys(("token_id", "position", "parent", "hidden_index", "label", "weight", *columns))
    writer = UnitsWriter(folder, tuple(columns))
    while num_tokens > 0:
        prompt = generator.integers(3, VOCAB_SIZE, int(generator.integers(3, 30)))
        ends = [generator.integers(3, VOCAB_SIZE, int(generator.integers(2, 10))) for _ in range(num_branches)]
        tree = pack([np.concatenate([prompt, end]) for end in ends], 2)
        target_N = np.flatnonzero(tree.parent_T >= 0)
        values = {
            "token_id": tree.token_id_T,
            "position": tree.position_T,
            "parent": tree.parent_T,
            "hidden_index": tree.parent_T[target_N],
            "label": tree.token_id_T[target_N],
            "weight": np.ones(len(target_N)),
            "advantage": generator.normal(size=len(target_N)),
            "old_logprob": -4 + 0.1 * generator.normal(size=len(target_N)),
            "sequence": np.zeros(len(target_N)),
        }
        writer.append(**{name: values[name] for name in columns})
        num_tokens -= len(tree.token_id_T)
    writer.close()


def folder_of_plan(units, folder):
    with Units(units) as read:
        write_plan(folder, units, [[[unit] for unit in range(read.header.num_units)]])
    return folder


def gradient_of(dispatcher, data, loss):
    dispatcher.engine.zero_grad()
    for _ in dispatcher.forward_backward("one", data, 0, loss):
        pass
    return dispatcher.engine.trainings["one"].optimizer.grad.buffer.clone()


def peak_of(engine, batch, loss):
    with LiveBytes() as live:
        engine.forward_backward(batch, loss)
    return live.peak


def test_steps_are_cut_in_their_order():
    units, lengths = np.array([5, 3, 9, 1]), np.array([4, 4, 2, 8])
    assert [part.tolist() for part in cut(units, lengths, 8)] == [[5, 3], [9], [1]]
    assert [part.tolist() for part in cut(units, lengths, 100)] == [[5, 3, 9, 1]]
    assert list(cut(units[:0], lengths[:0], 8)) == []


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
    auto = do(worker, workshop, "recomputes", plan(workshop, memory_budget_bytes=budget))
    recorded = state(auto, NUM_STEPS)
    assert recorded["recompute"] is True and recorded["micro_batch_tokens"] >= 12
    wide = do(worker, workshop, "recomputes-wide", plan(workshop, memory_budget_bytes=1 << 30))
    assert "recompute" not in state(wide, NUM_STEPS) and "recomputed" not in steps_of(wide)[0]
    # What a checkpoint records is repeated, whatever would be measured now.
    resumed = do(
        worker, workshop, "recomputes-resumed", plan(workshop, memory_budget_bytes=1 << 30), checkpoint(auto, 2)
    )
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
def test_no_recomputing_pass_exceeds_the_budget(tmp_path, num_branches):
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
