"""The runner on a small real engine: what it learns, writes and reports, to the same bits after any stop; failures."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from longshore.events import Best, Cancelled, Evaluated, Kept, Offloaded, Probed, Saved, Started, Step, Succeeded
from longshore.fields import Artifact
from longshore.training import Full, Layout, Lora, Watched
from megatron_worker.engine import Batch, LossFunction
from megatron_worker.process.job_queue import EventLog
from megatron_worker.training.evaluation import with_progress
from megatron_worker.warm_engine import BuildEngine
from shared.errors import InvalidInput
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, PackedData, Schedule
from shared.jobs.packed import UnitsWriter
from shared.storage.artifacts import seal, sha256_file
from tests.depth import drawn
from tests.megatron_worker.tiny_engine import TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses, new_worker, noted_in
from tests.megatron_worker.workshop import Workshop, packed, read_log, sealed, write_units


def test_a_job_reports_every_step_and_ends_with_one_terminal_event(workshop: Workshop):
    plan = workshop.plan(
        checkpointing=Checkpointing(every_steps=2),
        evaluation=Evaluation(data=workshop.held_out, every_steps=3, num_samples=2, sample_tokens=4),
    )
    job = do(workshop, "a", plan)
    events = read_log(job.log_path)
    assert [(type(e), getattr(e, "step", None)) for e in events] == [
        (Started, None),
        (Evaluated, 0),
        (Step, 1),
        (Step, 2),
        (Saved, 2),
        (Step, 3),
        (Evaluated, 3),
        (Step, 4),
        (Saved, 4),
        (Step, 5),
        (Step, 6),
        (Saved, 6),
        (Evaluated, 6),
        (Offloaded, None),
        (Succeeded, 6),
    ]
    assert [*events[0].seconds] == ["stage inputs", "build engine", "read weights", "make slot"]
    assert min(events[0].seconds.values()) >= 0.0 and events[0].seconds["stage inputs"] > 0.0
    assert events[-1].device == "released"
    assert events[-2].device_bytes_after == 0 < events[-2].device_bytes_before
    step = events[2].metrics
    assert {"loss", "learning_rate", "grad_norm", "clipped", "tokens", "target_tokens", "num_bins"} < set(step)
    assert {"tokens_per_s", "step_s", "memory_bytes"} < set(step)
    assert step["num_bins"] == 3
    assert step["tokens"] == step["target_tokens"] + 6
    assert not Path(job.scratch_dir).exists()


def test_the_loss_falls_on_data_that_is_seen_again(workshop: Workshop):
    data = packed(workshop.root, "units", "again", [[[0, 1, 2], [3, 4]]] * 30)
    evaluation = Evaluation(data=workshop.held_out)
    job = do(workshop, "a", workshop.plan(data=data, num_steps=30, evaluation=evaluation, trainable=Full()))
    assert losses(job)[-1] < 0.5 * losses(job)[0]


def test_the_loss_is_the_weighted_mean_over_all_bins(workshop: Workshop):
    """Against float64 and numpy, from the model's own matrices."""
    job = do(workshop, "a", workshop.plan(num_steps=1))
    weights = {k: v.double().numpy() for k, v in load_file(workshop.root / "model" / "model.safetensors").items()}
    total = weight_sum = 0.0
    random = np.random.default_rng(0)
    for _ in range(6):
        length = int(random.integers(4, 13))
        ids = random.integers(0, 64, length)
        token_TH = weights["embed"][ids]
        hidden_TH = token_TH + 0.5 * np.vstack([np.zeros(16), token_TH[:-1]])
        logit_TV = hidden_TH[:-1] @ weights["out"].T
        logprob_TV = logit_TV - np.log(np.exp(logit_TV).sum(1, keepdims=True))
        weight_T = np.where(np.arange(length - 1) % 3 == 0, 0.5, 1.0)
        total -= (weight_T * logprob_TV[np.arange(length - 1), ids[1:]]).sum()
        weight_sum += weight_T.sum()
    assert losses(job)[0] == pytest.approx(total / weight_sum, rel=1e-6)


def test_samples_are_decoded_with_the_models_tokenizer(workshop: Workshop):
    evaluation = Evaluation(data=workshop.held_out, num_samples=2, sample_tokens=3)
    job = do(workshop, "a", workshop.plan(evaluation=evaluation))
    before = next(e for e in read_log(job.log_path) if isinstance(e, Evaluated))
    assert [(s.prompt, s.reference) for s in before.samples] == [("c e", "g"), ("i", None)]
    expected = TinyEngine(workshop.root / "model")
    expected.add_adapter("default", Lora(rank=4, alpha=8), 7)
    ids = expected.greedy([[3, 5]], 3, frozenset({63}))[0]
    assert before.samples[0].completion == " ".join(f"w{i}" for i in ids)
    assert before.metrics["target_tokens"] > 0
    assert before.metrics["perplexity"] == pytest.approx(np.exp(before.metrics["loss"]))


def test_bits_are_those_of_an_uninterrupted_job_from_any_checkpoint(workshop: Workshop):
    plan = workshop.plan(checkpointing=Checkpointing(every_steps=1))
    whole = do(workshop, "whole", plan)
    for step in range(1, 7):
        resumed = do(workshop, f"from-{step}", plan, start=checkpoint(whole, step))
        assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)
        assert losses(resumed) == losses(whole)[step:]
        assert read_log(resumed.log_path)[0].first_step == step


def test_bits_do_not_depend_on_what_a_warm_worker_did_before(workshop: Workshop):
    plan = workshop.plan()
    worker = new_worker(workshop.root)
    do(workshop, "other", workshop.plan(seed=99, trainable=Lora(rank=2, alpha=3)), worker=worker)
    do(workshop, "full", workshop.plan(trainable=Full()), worker=worker)
    do(workshop, "kept", workshop.plan(after="keep"), worker=worker)
    warm = do(workshop, "warm", plan, worker=worker)
    cold = do(workshop, "cold", plan)
    assert adapter_sha256(warm, 6) == adapter_sha256(cold, 6)
    assert losses(warm) == losses(cold)


def test_another_seed_gives_another_adapter(workshop: Workshop):
    one, other = do(workshop, "one", workshop.plan()), do(workshop, "other", workshop.plan(seed=8))
    assert adapter_sha256(one, 6) != adapter_sha256(other, 6)


def test_a_warm_engine_is_built_once_and_offloaded_between_jobs(workshop: Workshop):
    built: list[TinyEngine] = []
    worker = new_worker(workshop.root, noted_in(built))
    do(workshop, "a", workshop.plan(), worker=worker)
    assert built[0].memory().device_bytes == 0
    do(workshop, "b", workshop.plan(after="keep"), worker=worker)
    assert built[0].memory().device_bytes > 0
    assert len(built) == 1


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled"])
def test_the_end_comes_in_the_order_that_is_promised(workshop: Workshop, ending: str):
    """Seen from the moment of archiving: everything before it is done, and the terminal event is not there yet."""
    engines: list[TinyEngine] = []
    job, seen = workshop.job("a", workshop.plan(checkpointing=Checkpointing(every_steps=1))), []

    def archive() -> None:
        events = [event.event for event in read_log(job.log_path)]
        assert events[-1] == "offloaded"
        assert events.index("saved") < events.index("offloaded")
        assert not Path(job.scratch_dir).exists()
        assert engines[0].memory().device_bytes == 0
        assert str(workshop.root) not in Path("/proc/self/maps").read_text()
        seen.append(True)

    worker = new_worker(workshop.root, noted_in(engines, Diverging if ending == "failed" else TinyEngine))
    worker.run(job, EventLog(Path(job.log_path)), lambda: ending == "cancelled" and bool(engines), archive)
    assert seen
    assert read_log(job.log_path)[-1].event == ending


def test_keep_holds_the_device_and_says_so(workshop: Workshop):
    events = read_log(do(workshop, "a", workshop.plan(after="keep")).log_path)
    assert events[-1].device == "held"
    assert not [e for e in events if isinstance(e, Offloaded)]


def stop_after(num_steps: int) -> tuple[BuildEngine, Callable[[], bool]]:
    """An engine that counts its updates, and a cancel that comes while the update of that number runs."""
    engines: list[TinyEngine] = []

    class Counting(TinyEngine):
        updates = 0

        def optim_step(self, *args, **kwargs):
            self.updates += 1
            return super().optim_step(*args, **kwargs)

    return noted_in(engines, Counting), lambda: bool(engines) and engines[-1].updates >= num_steps


@pytest.mark.parametrize("steps_before", [0, 2, 3])
def test_a_cancelled_job_leaves_a_checkpoint_that_goes_on_to_the_same_bits(workshop: Workshop, steps_before: int):
    plan = workshop.plan(checkpointing=Checkpointing(every_steps=2), evaluation=Evaluation(data=workshop.held_out))
    whole = do(workshop, "whole", plan)
    build_one, cancelled = stop_after(steps_before)
    worker, job = new_worker(workshop.root, build_one), workshop.job("cancelled", plan)
    worker.run(job, EventLog(Path(job.log_path)), cancelled=cancelled)
    events = read_log(job.log_path)
    assert isinstance(events[-1], Cancelled)
    assert events[-1].step == steps_before
    assert [type(e) for e in events[-3:]] == [Saved, Offloaded, Cancelled]
    assert len([e for e in events if isinstance(e, Saved) and e.step == steps_before]) == 1
    resumed = do(workshop, "resumed", plan, start=checkpoint(job, steps_before))
    assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)


def test_a_cancel_does_not_wait_for_the_last_token_of_the_samples(workshop: Workshop):
    turns: list[int] = []

    class Talking(TinyEngine):
        def greedy(self, prompts, max_tokens, stop_ids):
            turns.append(max_tokens)
            return super().greedy(prompts, max_tokens, stop_ids)

    evaluation = Evaluation(data=workshop.held_out, num_samples=2, sample_tokens=1000)
    worker = new_worker(workshop.root, lambda plan, model: Talking(model))
    job = workshop.job("cancelled", workshop.plan(evaluation=evaluation))
    worker.run(job, EventLog(Path(job.log_path)), cancelled=lambda: bool(turns))
    assert [type(e) for e in read_log(job.log_path)] == [Started, Saved, Offloaded, Cancelled]
    assert len(turns) == 1
    assert turns[0] < 100


@pytest.mark.parametrize("sample_tokens", [1, 7, 8, 9, 30])
def test_samples_do_not_depend_on_the_turns_they_are_made_in(workshop: Workshop, sample_tokens: int):
    evaluation = Evaluation(data=workshop.held_out, num_samples=2, sample_tokens=sample_tokens)
    job = do(workshop, "a", workshop.plan(evaluation=evaluation, num_steps=1))
    before = next(e for e in read_log(job.log_path) if isinstance(e, Evaluated))
    engine = TinyEngine(workshop.root / "model")
    engine.add_adapter("default", Lora(rank=4, alpha=8), 7)
    in_one_call = engine.greedy([[3, 5], [9]], sample_tokens, frozenset({63}))
    assert [s.completion for s in before.samples] == [" ".join(f"w{i}" for i in ids) for ids in in_one_call]


def test_a_job_that_starts_at_its_end_saves_the_same_bytes_and_evaluates(workshop: Workshop):
    plan = workshop.plan(evaluation=Evaluation(data=workshop.held_out))
    whole = do(workshop, "whole", plan)
    again = do(workshop, "again", plan, start=checkpoint(whole, 6))
    assert [type(e) for e in read_log(again.log_path)] == [Started, Evaluated, Saved, Offloaded, Succeeded]
    assert checkpoint(again, 6).sha256 == checkpoint(whole, 6).sha256


PROBE = (3, 5, 9, 63)


def probed(job: Job) -> Probed:
    (event,) = [e for e in read_log(job.log_path) if isinstance(e, Probed)]
    return event


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()], ids=["lora", "full"])
def test_a_probe_is_scored_by_the_weights_that_a_job_leaves(workshop: Workshop, trainable: Lora | Full):
    """After the last evaluation, from the checkpoint's own matrices, in float64; again where no step is left."""
    evaluation = Evaluation(data=workshop.held_out)
    plan = workshop.plan(trainable=trainable, probe=PROBE, evaluation=evaluation)
    job = do(workshop, "a", plan)
    order = [Step, Saved, Evaluated, Probed, Offloaded, Succeeded]
    assert [type(e) for e in read_log(job.log_path)][-6:] == order
    tensors = load_file(workshop.root / "model" / "model.safetensors")
    for path in (Path(job.checkpoint_dir) / "step-00000006" / "weights").glob("*.safetensors"):
        tensors |= load_file(path)
    if isinstance(trainable, Lora):
        tensors["out"] = tensors["out"] + 2.0 * tensors["lora_B"] @ tensors["lora_A"]
    token_TH = tensors["embed"].double()[list(PROBE)]
    hidden_TH = token_TH + 0.5 * torch.cat([torch.zeros(1, 16), token_TH[:-1]])
    logprob_NV = (hidden_TH[:-1] @ tensors["out"].double().T).log_softmax(-1)
    expected = logprob_NV.gather(1, torch.tensor(PROBE)[1:, None])[:, 0].tolist()
    assert probed(job).logprobs == pytest.approx(expected, abs=1e-6)
    again = do(workshop, "again", plan, start=checkpoint(job, 6))
    assert probed(again).model_dump(include={"step", "logprobs"}) == {"step": 6, "logprobs": probed(job).logprobs}


def test_no_probe_after_a_cancel_and_none_unasked(workshop: Workshop):
    build_one, cancelled = stop_after(2)
    worker, job = new_worker(workshop.root, build_one), workshop.job("cancelled", workshop.plan(probe=PROBE))
    worker.run(job, EventLog(Path(job.log_path)), cancelled=cancelled)
    unasked = do(workshop, "unasked", workshop.plan(num_steps=1))
    for events in (read_log(job.log_path), read_log(unasked.log_path)):
        assert not [e for e in events if isinstance(e, Probed)]


def test_a_step_without_weight_is_skipped_and_changes_nothing(workshop: Workshop):
    writer = UnitsWriter(workshop.root / "weightless")
    for weight in (0.0, 1.0):
        ids = np.arange(5)
        writer.append(token_id=ids, hidden_index=np.arange(4), label=ids[1:], weight=np.full(4, weight))
    writer.close()
    data = packed(workshop.root, "weightless", "weightless-plan", [[[0]], [[1]]])
    job = do(workshop, "a", workshop.plan(data=data, num_steps=2, checkpointing=Checkpointing(every_steps=1)))
    first, second = [e.metrics for e in read_log(job.log_path) if isinstance(e, Step)]
    assert first["skipped"] == 1.0
    assert "loss" not in first
    assert second["grad_norm"] > 0
    one = load_file(Path(job.checkpoint_dir) / "step-00000001" / "weights" / "adapter_model.safetensors")
    assert not one["lora_B"].any()
    assert isinstance(read_log(job.log_path)[-1], Succeeded)


def test_an_initial_adapter_is_gone_on_from(workshop: Workshop):
    whole = do(workshop, "whole", workshop.plan())
    published = workshop.root / "published"
    shutil.copytree(Path(whole.checkpoint_dir) / "step-00000006" / "weights", published)
    evaluation = Evaluation(data=workshop.held_out)
    job = do(workshop, "on", workshop.plan(initial_adapter=sealed(published), evaluation=evaluation))
    after = do(workshop, "after", workshop.plan(evaluation=evaluation))
    first = next(e for e in read_log(job.log_path) if isinstance(e, Evaluated))
    last = [e for e in read_log(after.log_path) if isinstance(e, Evaluated)][-1]
    assert first.metrics["loss"] == last.metrics["loss"]


def test_an_evaluation_tells_every_few_seconds_how_far_it_is():
    clock = [0.0]

    def passes(number: int, each_s: float):
        for _ in range(number):
            clock[0] += each_s
            yield None
        return number

    def told(number: int, each_s: float) -> list[float]:
        found: list[float] = []
        turns = with_progress(passes(number, each_s), number, found.append, lambda: clock[0])
        while True:
            try:
                next(turns)
            except StopIteration as end:
                assert end.value == number
                return found

    assert told(19, 0.1) == []
    assert told(4, 3.0) == [0.5, 1.0]


# Evaluations that decide.


def watched(workshop: Workshop, **fields: object) -> JobPlan:
    """Thirty steps on the rows that are evaluated, too: their loss falls, and rises from the 13th step on."""
    data = packed(workshop.root, "units", "again", [[[0, 1, 2], [3, 4]]] * 30)
    evaluation = Evaluation.model_validate({"data": data, "every_steps": 2, **fields})
    return workshop.plan(
        data=data,
        num_steps=30,
        evaluation=evaluation,
        schedule=Schedule(kind="constant", learning_rate=2.0, rates=(0.01,) * 12 + (2.0,) * 18),
        trainable=Full(),
        checkpointing=Checkpointing(every_steps=5),
    )


def evaluations(job: Job) -> dict[int, float]:
    return {e.step: e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Evaluated) and e.step}


def test_the_weights_of_the_best_evaluation_are_kept(workshop: Workshop):
    job = do(workshop, "a", watched(workshop, keep="best"))
    events, found = read_log(job.log_path), evaluations(job)
    best = min(found, key=found.__getitem__)
    assert 2 < best < 30, found
    assert events[-1].best == Best(step=best, metric="eval_loss", value=found[best])
    falling = [step for step in found if all(found[step] < found[before] for before in found if before < step)]
    assert [e.step for e in events if isinstance(e, Kept)] == falling
    saved = [e.step for e in events if isinstance(e, Saved)]
    assert sorted(saved) == sorted({*falling, *range(5, 31, 5)})
    scored = do(workshop, "b", job.plan, start=checkpoint(job, best))
    assert evaluations(scored)[best] == found[best], "the weights that are kept have this loss"


def test_a_job_ends_early_with_the_last_checkpoint_and_the_same_bits_from_every_one_before(workshop: Workshop):
    plan = watched(workshop, keep="best", early_stop={"patience": 3})
    whole = do(workshop, "whole", plan)
    found, end = evaluations(whole), read_log(whole.log_path)[-1]
    best = min(found, key=found.__getitem__)
    assert isinstance(end, Succeeded) and (end.step, end.best.step) == (best + 6, best)
    assert end.step < 30
    saved = [e.step for e in read_log(whole.log_path) if isinstance(e, Saved)]
    assert saved[-1] == end.step
    for step in saved:
        resumed = do(workshop, f"from-{step}", plan, start=checkpoint(whole, step))
        last = read_log(resumed.log_path)[-1]
        assert (last.event, last.step, last.best) == ("succeeded", end.step, end.best), step
        if step < end.step:
            weights = [Path(job.checkpoint_dir, f"step-{end.step:08d}", "weights") for job in (whole, resumed)]
            assert sha256_file(weights[0] / "model.safetensors") == sha256_file(weights[1] / "model.safetensors")


def test_a_metric_that_the_evaluations_lack_is_refused_before_the_first_step(workshop: Workshop):
    job = do(workshop, "a", watched(workshop, early_stop={"patience": 3, "metric": "eval_accuracy"}))
    failed = failure(job)
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert "no eval_accuracy; they have eval_loss, eval_perplexity" in failed.message


def graded(workshop: Workshop, step: int | None, **fields: object) -> JobPlan:
    """Twelve steps, of which samplers grade each third; known are the grades of one: 1 less the step's share."""
    told = (
        None
        if step is None
        else {"step": step, "metrics": {"eval_reward_mean": GRADES[step]}, "samples": {"eval": "u"}}
    )
    evaluation = Evaluation.model_validate({"graded_every": 3, "graded": told, **fields})
    data = packed(workshop.root, "units", "again", [[[0, 1, 2], [3, 4]]] * 12)
    return workshop.plan(data=data, num_steps=12, evaluation=evaluation)


GRADES = {0: 0.9, 3: 0.2, 6: 0.5, 9: 0.4, 12: 0.3}


def graded_to_its_end(workshop: Workshop, **fields: object) -> tuple[list[Job], Succeeded]:
    """Jobs of one run, each from the last one's checkpoint with the grades of its step."""
    jobs, step, start = [], 0, None
    while True:
        jobs.append(do(workshop, f"from-{step}-{len(jobs)}", graded(workshop, step, **fields), start=start))
        end = read_log(jobs[-1].log_path)[-1]
        assert isinstance(end, Succeeded), end
        if not end.awaits_grades:
            return jobs, end
        step, start = end.step, checkpoint(jobs[-1], end.step)


def test_a_job_in_parts_between_which_samplers_are_graded_has_the_bits_of_a_whole_one(workshop: Workshop):
    data = graded(workshop, 0).data
    whole = do(workshop, "whole", workshop.plan(data=data, num_steps=12))
    jobs, end = graded_to_its_end(workshop, data=workshop.held_out, every_steps=4)
    assert len(jobs) == 5 and end.step == 12 and end.best is None
    assert adapter_sha256(jobs[-2], 12) == adapter_sha256(whole, 12)
    evaluated = [e for job in jobs for e in read_log(job.log_path) if isinstance(e, Evaluated)]
    assert [(e.step, "loss" in e.metrics, e.metrics.get("reward_mean"), e.drawn) for e in evaluated] == [
        (0, True, 0.9, {"eval": "u"}),
        (3, False, 0.2, {"eval": "u"}),
        (4, True, None, {}),
        (6, False, 0.5, {"eval": "u"}),
        (8, True, None, {}),
        (9, False, 0.4, {"eval": "u"}),
        (12, True, 0.3, {"eval": "u"}),
    ]


def test_grades_that_were_lost_are_waited_for_again(workshop: Workshop):
    first = do(workshop, "first", graded(workshop, None))
    assert [type(e) for e in read_log(first.log_path)] == [Started, Saved, Offloaded, Succeeded]
    assert read_log(first.log_path)[-1].awaits_grades
    part = do(workshop, "part", graded(workshop, 0))
    other = do(workshop, "other", graded(workshop, 0), start=checkpoint(part, 3))
    assert [(e.step, e.awaits_grades) for e in (read_log(job.log_path)[-1] for job in (part, other))] == [(3, True)] * 2


def test_grades_decide_which_weights_are_kept_and_when_the_run_ends(workshop: Workshop):
    jobs, end = graded_to_its_end(
        workshop, keep="best", best_by="eval_reward_mean", early_stop={"patience": 1, "metric": "eval_reward_mean"}
    )
    assert (end.step, end.best) == (9, Best(step=6, metric="eval_reward_mean", value=0.5))
    assert [e.step for job in jobs for e in read_log(job.log_path) if isinstance(e, Kept)] == [3, 6]
    lacking = do(workshop, "lacking", graded(workshop, 0, keep="best", best_by="eval_reward_meen"))
    assert "no eval_reward_meen; they have eval_reward_mean" in failure(lacking).message


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan]), min_size=1, max_size=12),
    patience=st.integers(1, 4),
)
@pytest.mark.parametrize("metric", ["eval_loss", "eval_reward_mean"])
def test_a_run_is_over_as_soon_as_patience_is_at_its_end(metric: str, values: list[float], patience: int):
    """Against a loop that remembers the best and counts. The first of equal values is best, what is no number worst."""
    sign = -1 if metric == "eval_reward_mean" else 1
    watch = Watched.model_validate({"keep": "best", "early_stop": {"patience": patience, "metric": metric}})
    best, best_step, waited, found = math.inf, None, 0, {}
    for step, value in enumerate(values, 1):
        found = watch.with_evaluation(found, step, {metric: sign * value, "eval_other": 1.0})
        assert len(found) <= patience + 2
        if best_step is None or value < best or (math.isnan(best) and not math.isnan(value)):
            best, best_step, waited = value, step, 0
        else:
            waited += 1
        assert watch.best(found) == best_step
        assert watch.is_over(found) == (waited >= patience)
        if waited >= patience:
            break


def test_a_probe_of_tokens_that_the_model_lacks_fails_before_any_step(workshop: Workshop):
    job = do(workshop, "a", workshop.plan(probe=(3, 64)))
    assert failure(job).kind == "invalid_input"
    assert "probe[1]: token 64 is outside the vocabulary of 64" in failure(job).message
    assert not losses(job)


class Diverging(TinyEngine):
    """The loss of the fourth bin (the second step) is not a number."""

    calls = 0

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, torch.Tensor]:
        self.calls += 1
        sums = super().forward_backward(batch, loss)
        return sums | {"loss": sums["loss"] * torch.nan} if self.calls == 4 else sums


def test_a_loss_that_is_not_finite_fails_and_keeps_the_last_good_checkpoint(workshop: Workshop):
    plan = workshop.plan(checkpointing=Checkpointing(every_steps=1))
    job = workshop.job("nan", plan)
    new_worker(workshop.root, lambda plan, model: Diverging(model)).do_one(job)
    failed = failure(job)
    assert (failed.kind, failed.step, failed.device) == ("not_finite", 1, "released")
    assert failed.message.startswith("step 2: the loss is nan")
    assert [p.name for p in Path(job.checkpoint_dir).iterdir()] == ["step-00000001"]
    whole = do(workshop, "whole", plan)
    assert adapter_sha256(job, 1) == adapter_sha256(whole, 1)


def test_a_learning_rate_beyond_reason_is_reported_not_trained_on(workshop: Workshop):
    schedule = Schedule(kind="constant", learning_rate=1e25)
    job = do(workshop, "a", workshop.plan(schedule=schedule, trainable=Full()))
    assert failure(job).kind == "not_finite"


class FullDisk(TinyEngine):
    def save(self, folder: Path) -> None:
        super().save(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "weights"))


def test_a_full_disk_is_named_and_nothing_half_written_stays(workshop: Workshop):
    job = workshop.job("a", workshop.plan())
    new_worker(workshop.root, lambda plan, model: FullDisk(model)).do_one(job)
    assert failure(job).kind == "disk_full"
    assert "no space is left" in failure(job).message
    assert not Path(job.scratch_dir).exists()
    assert not list(Path(job.checkpoint_dir).glob("*"))


def test_an_error_is_told_without_its_trace(workshop: Workshop, capfd: pytest.CaptureFixture[str]):
    class Broken(TinyEngine):
        def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, torch.Tensor]:
            raise RuntimeError("the kernel is broken\nat line 3")

    job = workshop.job("a", workshop.plan())
    new_worker(workshop.root, lambda plan, model: Broken(model)).do_one(job)
    assert (failure(job).kind, failure(job).message) == ("error", "RuntimeError: the kernel is broken")
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_goes_on_after_a_failure(workshop: Workshop):
    worker = new_worker(workshop.root)
    missing = Artifact(uri=f"file://{workshop.root}/nowhere", sha256="0" * 64)
    failed = do(workshop, "failed", workshop.plan(model=missing), worker=worker)
    assert failure(failed).kind == "corrupt_artifact"
    good = do(workshop, "good", workshop.plan(), worker=worker)
    assert isinstance(read_log(good.log_path)[-1], Succeeded)


def corrupt_adapter(workshop: Workshop, job: Job) -> Artifact:
    """A checkpoint whose adapter was changed after it was sealed."""
    artifact = checkpoint(job, 6)
    path = Path(artifact.uri.removeprefix("file://")) / "weights" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return artifact


def without_state(workshop: Workshop, job: Job) -> Artifact:
    folder = Path(checkpoint(job, 6).uri.removeprefix("file://"))
    copy = workshop.root / "without-state"
    shutil.copytree(folder, copy)
    (copy / "state.json").unlink()
    return Artifact(uri=f"file://{copy}", sha256=seal(copy))


def without_adapter(workshop: Workshop, job: Job) -> Artifact:
    copy = workshop.root / "without-adapter"
    shutil.copytree(Path(checkpoint(job, 6).uri.removeprefix("file://")), copy)
    shutil.rmtree(copy / "weights")
    return Artifact(uri=f"file://{copy}", sha256=seal(copy))


def never_completed(workshop: Workshop, job: Job) -> Artifact:
    artifact = checkpoint(job, 6)
    (Path(artifact.uri.removeprefix("file://")) / "manifest.json").unlink()
    return artifact


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt_adapter, "SHA-256"),
        (without_state, "state.json"),
        (without_adapter, "missing"),
        (never_completed, "never completed"),
    ],
)
def test_a_damaged_checkpoint_fails_before_any_step(workshop: Workshop, damage, message: str):
    plan = workshop.plan()
    start = damage(workshop, do(workshop, "whole", plan))
    job = do(workshop, "resumed", plan, start=start)
    assert failure(job).kind == "corrupt_artifact"
    assert message in failure(job).message
    assert not [e for e in read_log(job.log_path) if isinstance(e, Step | Started)]


INPUTS = ("model", "units", "plan", "held-out-units", "held-out-plan", "checkpoint")


@pytest.mark.parametrize("kind", drawn(INPUTS, 2))
def test_a_flipped_byte_in_any_file_of_any_input_is_a_corrupt_artifact_before_any_step(workshop: Workshop, kind: str):
    """Manifests, headers, columns, weights, optimizer state, random state and cursor: each file, one byte."""
    plan = workshop.plan(evaluation=Evaluation(data=workshop.held_out))
    start = checkpoint(do(workshop, "whole", plan), 6)
    folder = Path(start.uri.removeprefix("file://")) if kind == "checkpoint" else workshop.root / kind
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert folder / "manifest.json" in files
    for number, path in enumerate(files):
        whole = path.read_bytes()
        for at in {len(whole) // 2} if whole else set():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            job = do(workshop, f"{number}-{at}", plan, start=start)
            assert failure(job).kind == "corrupt_artifact", (path, at, failure(job).message)
            assert str(folder) in failure(job).message
            assert not [e for e in read_log(job.log_path) if isinstance(e, Step | Started)]
        path.write_bytes(whole)


def test_a_checkpoint_of_another_base_model_is_refused(workshop: Workshop, tmp_path: Path):
    """Its weights alone differ: shape, data and seed are the job's."""
    start = checkpoint(do(workshop, "whole", workshop.plan()), 6)
    shutil.copytree(workshop.root / "model", tmp_path / "moved")
    shutil.copytree(workshop.root / "model", tmp_path / "other")
    moved = sealed(tmp_path / "moved")
    same = do(workshop, "moved", workshop.plan(model=moved), start=start)
    assert isinstance(read_log(same.log_path)[-1], Succeeded)
    weights = next((tmp_path / "other").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    other = sealed(tmp_path / "other")
    for changes, begins in (({}, {"start": start}), ({"initial_checkpoint": start, "first_step": 6}, {})):
        job = do(workshop, f"other-{len(changes)}", workshop.plan(model=other, **changes), **begins)
        assert failure(job).kind == "invalid_input"
        assert "the checkpoint is of another base model than the job's" in failure(job).message


def test_a_checkpoint_of_another_shape_or_of_other_data_is_refused(workshop: Workshop):
    whole = do(workshop, "whole", workshop.plan())
    other_rank = do(workshop, "rank", workshop.plan(trainable=Lora(rank=2)), start=checkpoint(whole, 6))
    assert "another shape" in failure(other_rank).message
    other_seed = do(workshop, "seed", workshop.plan(seed=8), start=checkpoint(whole, 6))
    assert "the checkpoint's seed is 7, the job's is 8" in failure(other_seed).message
    write_units(workshop.root / "other-units", num_units=36, seed=5)
    data = PackedData(units=sealed(workshop.root / "other-units"), plan=workshop.data.plan)
    other_data = do(workshop, "data", workshop.plan(data=data), start=checkpoint(whole, 6))
    assert "units_sha256" in failure(other_data).message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 7}, "the job has 7 steps, its data 6"),
        ({"layout": Layout(dp=2)}, "it has 2 ranks, this worker 1"),
    ],
)
def test_a_plan_that_cannot_be_done_is_refused(workshop: Workshop, changes: dict, message: str):
    failed = failure(do(workshop, "a", workshop.plan(**changes)))
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert message in failed.message


def test_prompts_that_are_no_prompts_are_named(workshop: Workshop):
    (workshop.root / "held-out-units" / "prompts.json").write_text(json.dumps([{"prompt": "no ids"}]))
    held_out = PackedData(units=sealed(workshop.root / "held-out-units"), plan=workshop.held_out.plan)
    failed = failure(do(workshop, "a", workshop.plan(evaluation=Evaluation(data=held_out, num_samples=1))))
    assert failed.kind == "corrupt_artifact"
    assert "prompts.json" in failed.message


def test_a_log_in_use_is_refused_and_left_alone(workshop: Workshop):
    job = do(workshop, "a", workshop.plan())
    before = Path(job.log_path).read_bytes()
    with pytest.raises(InvalidInput, match="already holds events"):
        new_worker(workshop.root).do_one(job)
    assert Path(job.log_path).read_bytes() == before
