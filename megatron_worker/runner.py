"""The training loop: a job from its inputs to its last checkpoint. ending.py then ends the job.

Every rank runs this with the same job. A job is a generator that yields between its passes, so that the worker can do
passes of other jobs there.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from megatron_worker.dispatch import BINS_A_PASS, Dispatcher
from megatron_worker.engine import LossFunction
from megatron_worker.losses import loss_function
from megatron_worker.process.background import Awaited
from megatron_worker.process.event_log import Report
from megatron_worker.process.faults import CancelledEarly, Fault, JobFailed
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Folders, Inputs, Staging
from megatron_worker.sums import reported
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.checkpoint import (
    Written,
    go_on_from,
    load_checkpoint,
    load_initial_checkpoint,
    read_state,
    save_checkpoint,
)
from megatron_worker.training.evaluation import Evaluator, told
from megatron_worker.training.inputs import check_probe, open_data
from megatron_worker.training.schedule import learning_rate
from megatron_worker.training.sending import sent_meanwhile
from megatron_worker.warm_engine import Kept, WarmEngine, make_trainable, slots_of, take_engine
from shared.contract import Artifact
from shared.jobs.events import Evaluated, Evaluating, Probed, Saved, Started, Step
from shared.jobs.job import Job, JobPlan, WorkerPlan, is_policy_loss, reference_of, scores_old

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job, and the number of steps done. `fault`: the reason if it failed.

    `kept`: the state that it left in its slots, if another job is expected to go on with it.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    step: int
    fault: Fault | None = None
    kept: Kept | None = None


Passes = Generator[Awaited | None, None, Outcome]
"""A job in progress. It yields between its passes: None, or a function that tells when the next one can be done."""


@dataclass
class Work:
    """What the steps of one job need. `done`: steps done; `saved`: this attempt's newest checkpoint."""

    job: Job
    model_sha256: str
    dispatcher: Dispatcher
    data: PackedBatches
    loss: LossFunction
    evaluator: Evaluator
    report: Report
    ranks: WorkerRanks
    cancelled: Callable[[], bool]
    done: int = 0
    saved: Written | None = None

    @property
    def plan(self) -> JobPlan:
        assert isinstance(self.job.plan, JobPlan)
        return self.job.plan

    @property
    def is_continued(self) -> bool:
        """True if another job is expected to go on from this one's end."""
        return self.plan.after == "keep" or is_policy_loss(self.plan.loss)

    @property
    def reference(self) -> Artifact | None:
        """The adapter that is the loss's reference, if it is one."""
        reference = reference_of(self.plan.loss)
        return reference if isinstance(reference, Artifact) else None

    @property
    def slot(self) -> str | None:
        """The slot that is trained: the run's own; None for the base."""
        return slots_of(self.plan.run_id, self.plan.trainable)[0]

    @property
    def reference_slot(self) -> str | None:
        """The slot of the loss's reference: that of an adapter; None for the base."""
        return None if self.reference is None else slots_of(self.plan.run_id, self.plan.trainable)[1]

    @property
    def step(self) -> int:
        """Steps done in the whole run, as events and checkpoints count them."""
        return self.plan.first_step + self.done


def run_job(
    job: Job, warm: WarmEngine, staging: Staging, report: Report, ranks: WorkerRanks, cancelled: Callable[[], bool]
) -> Passes:
    """Do a job, a pass at a time. A fault that all ranks agree on is an outcome; any other error propagates."""
    work: Work | None = None
    with ExitStack() as open_files:
        try:
            work = yield from prepare(job, warm, staging, report, ranks, cancelled, open_files)
            return (yield from train(work))
        except JobFailed as failed:
            return Outcome("failed", work.step if work else job.plan.first_step, failed.fault)
        except CancelledEarly:
            return Outcome("cancelled", job.plan.first_step)


def prepare(
    job: Job,
    warm: WarmEngine,
    staging: Staging,
    report: Report,
    ranks: WorkerRanks,
    cancelled: Callable[[], bool],
    open_files: ExitStack,
) -> Generator[Awaited | None, None, Work]:
    """Stage inputs, put the engine on the device, load what to go on from, report `started`.

    Raises:
        JobFailed: what one rank could not do.
        CancelledEarly: while inputs were staged, or log-probabilities were computed that the steps need.
    """
    plan = job.plan
    assert isinstance(plan, JobPlan)
    make_deterministic(plan)
    (folders, model_sha256), kept = yield from _stage_inputs(job, warm, staging, cancelled)
    data, evaluator = ranks.agree(lambda: open_data(plan, folders, open_files))
    dispatcher = take_engine(warm, plan, folders, kept, ranks)
    ranks.agree(lambda: check_probe(plan.probe, dispatcher.facts.vocab_size))
    yield None  # not before: until it is taken, other jobs may have what was kept dropped
    loss = loss_function(plan.loss, plan.temperature)
    work = Work(job, model_sha256, dispatcher, data, loss, evaluator, report, ranks, cancelled)
    load = partial(dispatcher.load_state, work.slot)
    # Several agreements: loading is collective, so no rank may come to it alone.
    if kept is None:
        ranks.agree(lambda: make_trainable(dispatcher, job, folders))
        yield None
    ranks.agree(lambda: _load_reference(work, folders, kept))
    yield None
    ranks.agree(lambda: _take_up(work, folders, kept))
    yield from _agreed(work, _score_reference(work))
    if kept is not None:
        ranks.agree(lambda: go_on_from(kept.checkpoint, plan, model_sha256))
    elif job.needs_its_beginning and plan.initial_checkpoint is not None:
        before = folders[plan.initial_checkpoint]
        ranks.agree(lambda: load_initial_checkpoint(load, plan, model_sha256, before))
    yield from _agreed(work, _score_old(work))
    if job.start is not None:
        recorded = folders[job.start]
        ranks.agree(lambda: load_checkpoint(load, plan, model_sha256, recorded))
    report.emit(
        Started,
        run_id=plan.run_id,
        job_id=plan.job_id,
        fence=job.fence,
        first_step=work.step,
        num_steps=plan.first_step + plan.num_steps,
        device=dispatcher.facts.device_name,
        world_size=ranks.world_size,
    )
    return work


def _stage_inputs(
    job: Job, warm: WarmEngine, staging: Staging, cancelled: Callable[[], bool]
) -> Generator[Awaited, None, tuple[Inputs, Kept | None]]:
    """Stage the job's inputs, except those that its run's last job left in the engine. Returns what it left, too."""
    kept = warm.kept_for(job)
    at_hand = (job.plan.initial_checkpoint, kept.reference) if kept else ()
    inputs = yield from staging.fetch(job, cancelled, at_hand)
    if kept is not None and warm.kept_for(job) is None:  # it was dropped meanwhile to make room
        return (yield from staging.fetch(job, cancelled)), None
    return inputs, kept


def train(work: Work) -> Passes:
    """Do the steps that are left, with evaluations and checkpoints between them."""
    try:
        with work.dispatcher.resident(work.slot):
            evaluated = yield from _train(work)
        is_whole = work.done == work.plan.num_steps and evaluated
        if is_whole and work.plan.probe:
            work.report.emit(Probed, step=work.step, logprobs=work.dispatcher.probe(work.slot, work.plan.probe))
    except JobFailed:
        raise
    except Exception as error:
        raise work.ranks.agree_on(error) from None
    if not is_whole:
        return Outcome("cancelled", work.step)
    assert work.saved is not None
    kept = Kept(work.plan.trainable, work.saved, work.reference) if work.is_continued else None
    return Outcome("succeeded", work.step, kept=kept)


def _train(work: Work) -> Generator[None, None, bool]:
    """Do the steps. Returns False if a cancellation interrupted the last evaluation."""
    evaluated = yield from evaluate(work)
    while work.done < work.plan.num_steps and not work.cancelled():
        yield None
        metrics = yield from train_step(work, work.done)
        work.done += 1
        work.report.emit(Step, step=work.step, metrics=metrics)
        save_if_due(work)
        evaluated = yield from evaluate(work)
    with sent(work) if work.done == work.plan.num_steps else nullcontext():
        save(work)
    return evaluated


def sent(work: Work) -> AbstractContextManager[None]:
    """Send the weights to samplers during a `with` block."""
    send = partial(work.dispatcher.send_weights, work.slot, work.plan.run_id)
    return sent_meanwhile(send, work.job, work.step, work.report, work.ranks, work.plan.sync)


def train_step(work: Work, step: int) -> Generator[None, None, dict[str, float]]:
    """Do one update. Metrics are sums and means over all ranks; `step_s` does not count passes of other jobs.

    Raises:
        JobFailed: `not_finite`; no weight has changed since the step before.
    """
    reduced, duration_s = yield from _timed(work.dispatcher.forward_backward(work.slot, work.data, step, work.loss))
    began = time.perf_counter()
    update = _update(work, step, reduced)
    duration_s += time.perf_counter() - began
    return {
        **update,
        **{name: value for name, value in reported(reduced).items() if name not in ("loss", "weight")},
        "step_s": duration_s,
        "tokens_per_s": reduced["tokens"] / duration_s,
        "memory_bytes": float(work.ranks.largest([work.dispatcher.engine.memory().device_bytes])[0]),
    }


def _timed(passes: Generator[None, None, T]) -> Generator[None, None, tuple[T, float]]:
    """Do the passes of a command. Returns its result, and the seconds that the passes took."""
    seconds = 0.0
    while True:
        began = time.perf_counter()
        try:
            next(passes)
        except StopIteration as end:
            return end.value, seconds + time.perf_counter() - began
        seconds += time.perf_counter() - began
        yield None


def _update(work: Work, step: int, reduced: dict[str, float]) -> dict[str, float]:
    """Make one update. Returns its loss, learning rate and norm. A step without any trained token is skipped."""
    if not reduced["weight"]:
        work.dispatcher.zero_grad(work.slot)
        return {"skipped": 1.0}
    loss = reduced["loss"] / reduced["weight"]
    if not math.isfinite(loss):
        raise _not_finite(work.step, "the loss", loss)
    first, num_steps = work.plan.first_step, work.plan.num_steps
    rate = learning_rate(work.plan.schedule, first + step, first + num_steps)
    norms = work.dispatcher.optim_step(work.slot, work.plan.optimizer, rate, reduced["weight"])
    if not math.isfinite(norms.grad_norm):
        raise _not_finite(work.step, "the gradient's norm", norms.grad_norm)
    return {
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": norms.grad_norm,
        "clipped": float(norms.clipped),
    }


def _not_finite(step: int, what: str, value: float) -> JobFailed:
    advice = "try a lower learning rate, or look for broken rows"
    return JobFailed(Fault(kind="not_finite", message=f"step {step + 1}: {what} is {value}; {advice}"))


def save_if_due(work: Work) -> None:
    every = work.plan.checkpointing.every_steps
    if work.done == work.plan.num_steps or (every and work.done % every == 0):
        save(work)


def save(work: Work) -> None:
    """Save a checkpoint of the steps that are done, unless there is one already."""
    if work.saved is not None and work.saved.state.step == work.step:
        return
    write = partial(work.dispatcher.save_state, work.slot)
    work.saved = save_checkpoint(write, work.ranks, work.job, work.model_sha256, work.step, work.data.most_tokens)
    if work.ranks.rank == 0:
        work.report.emit(Saved, step=work.step, path=str(work.saved.path), manifest_sha256=work.saved.sha256)


def evaluate(work: Work) -> Generator[None, None, bool]:
    """Report held-out metrics and samples, if they are due now. Returns False if a cancellation interrupted it."""
    if not work.evaluator.is_due(work.done, work.plan.num_steps):
        return True
    evaluator, dispatcher = work.evaluator, work.dispatcher
    assert evaluator.data is not None
    passes = dispatcher.evaluate(work.slot, evaluator.data, evaluator.loss_function, work.cancelled)
    num_passes = math.ceil(len(evaluator.data.bins(0)) / dispatcher.facts.dp_size / BINS_A_PASS)
    sums = yield from told(passes, num_passes, lambda done: work.report.emit(Evaluating, step=work.step, fraction=done))
    if sums is None:
        return False
    samples = yield from evaluator.samples(partial(dispatcher.greedy, work.slot), work.cancelled)
    if samples is None:
        return False
    metrics = evaluator.metrics(sums)
    work.report.emit(Evaluated, step=work.step, metrics=metrics, samples=samples)
    return True


def make_deterministic(plan: WorkerPlan) -> None:
    """Set threads, deterministic algorithms and the seed, so that results do not depend on earlier jobs."""
    torch.set_num_threads(plan.threads_per_rank)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:  # the same, without an import of torch's compiler, which nothing uses there: a third of a second
        torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # costly, finds only bugs
    torch.manual_seed(plan.seed)


def _agreed(work: Work, passes: Iterator[None]) -> Iterator[None]:
    """Do a command's passes, each agreed on by all ranks. Raises CancelledEarly between them."""
    end = object()
    while work.ranks.agree(lambda: next(passes, end)) is not end:
        if work.cancelled():
            raise CancelledEarly
        yield None


def _load_reference(work: Work, folders: Folders, kept: Kept | None) -> None:
    if work.reference is not None and (kept is None or kept.reference is None):
        assert work.reference_slot is not None
        work.dispatcher.load_frozen(work.reference_slot, folders[work.reference])


def _take_up(work: Work, folders: Folders, kept: Kept | None) -> None:
    """Read how far the job is, and cut its steps to its memory budget, if it has one, as the checkpoint before it says.

    A job that begins with another's checkpoint keeps to its micro-batches, too: a run measures once.
    """
    job, plan = work.job, work.plan
    begins_with = job.start or plan.initial_checkpoint
    before = None if begins_with is None else kept.checkpoint.state if kept else read_state(folders[begins_with])
    if before is not None and job.start is not None:
        work.done = before.step - plan.first_step
    if plan.memory_budget_bytes is not None:
        tokens = None if before is None else before.micro_batch_tokens
        limits = plan.memory_budget_bytes, plan.max_micro_batch_tokens
        work.dispatcher.form_micro_batches(work.slot, work.data, work.loss, *limits, tokens)


def _score_reference(work: Work) -> Iterator[None]:
    """Compute the reference's log-probabilities, before any checkpoint is loaded, which may replace the base."""
    if reference_of(work.plan.loss) is None:
        return
    score = partial(
        work.dispatcher.score, work.reference_slot, column="ref_logprob_N", temperature=work.plan.temperature
    )
    yield from score(work.data, range(work.done, work.plan.num_steps))
    if (held_out := work.evaluator.wants_reference) is not None:
        yield from score(held_out, range(1))


def _score_old(work: Work) -> Iterator[None]:
    """Compute the old policy's log-probabilities, except for the first step, where it is the policy (targets.py)."""
    plan = work.plan
    if scores_old(plan.loss):
        steps = range(max(work.done, 1), plan.num_steps)
        yield from work.dispatcher.score(work.slot, work.data, steps, "old_logprob_N", plan.temperature)
