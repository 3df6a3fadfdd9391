"""The one loop: a job from its inputs to its last checkpoint. What follows, the end of the job, is ending.py's.

Every rank runs this file with the same job and takes the same turns.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_worker.engine import Engine, LossFunction
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.process.event_log import Report
from megatron_worker.process.faults import Fault, JobFailed, fault_of
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Staging
from megatron_worker.sums import reported
from megatron_worker.training.batches import PackedBatches, Sums
from megatron_worker.training.checkpoint import load_checkpoint, load_initial_checkpoint, read_state, save_checkpoint
from megatron_worker.training.evaluation import Evaluator, held_out_loss, read_prompts
from megatron_worker.training.frozen_logprobs import bins_to_score, score, score_reference
from megatron_worker.training.probe import check_probe, probe
from megatron_worker.training.schedule import learning_rate
from megatron_worker.warm_engine import WarmEngine
from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.jobs.events import Evaluated, Probed, Saved, Started, Step
from shared.jobs.job import Full, Job, JobPlan, Lora, PackedData, reference_of, scores_old
from shared.jobs.packed import Ints

ADAPTER = "default"

Folders = dict[Artifact, Path]


@dataclass(frozen=True)
class Outcome:
    """How a job came out, and the steps that were done by then. A fault belongs to `failed`."""

    state: Literal["succeeded", "failed", "cancelled"]
    step: int
    fault: Fault | None = None


@dataclass
class Work:
    """What the steps of one job need. `done`: steps done; `saved`: the step of this attempt's newest checkpoint."""

    job: Job
    model_sha256: str
    engine: Engine
    data: PackedBatches
    loss: LossFunction
    evaluator: Evaluator
    report: Report
    ranks: WorkerRanks
    cancelled: Callable[[], bool]
    done: int = 0
    saved: int | None = None

    @property
    def plan(self) -> JobPlan:
        return self.job.plan

    @property
    def step(self) -> int:
        """Steps done in the whole run, as events and checkpoints count them."""
        return self.plan.first_step + self.done


def run_job(
    job: Job, warm: WarmEngine, staging: Staging, report: Report, ranks: WorkerRanks, cancelled: Callable[[], bool]
) -> Outcome:
    """Do a job. A fault that all ranks know is an outcome; any other error is this rank's alone, and propagates."""
    work: Work | None = None
    with ExitStack() as open_files:
        try:
            work = prepare(job, warm, staging, report, ranks, cancelled, open_files)
            return train(work)
        except JobFailed as failed:
            return Outcome("failed", work.step if work else job.plan.first_step, failed.fault)


def prepare(
    job: Job,
    warm: WarmEngine,
    staging: Staging,
    report: Report,
    ranks: WorkerRanks,
    cancelled: Callable[[], bool],
    open_files: ExitStack,
) -> Work:
    """Stage inputs, put the engine on the device, load what to go on from, report `started`."""
    plan = job.plan
    make_deterministic(plan)
    folders = staging.fetch(job)
    model_sha256 = staging.contents_sha256(plan.model)
    data, evaluator = ranks.agree(lambda: _open_data(plan, folders, open_files))
    engine = _take_engine(warm, plan, folders, ranks)
    ranks.agree(lambda: check_probe(plan.probe, engine.facts.vocab_size))
    loss = loss_function(plan.loss, plan.temperature)
    work = Work(job, model_sha256, engine, data, loss, evaluator, report, ranks, cancelled)
    # Two agreements: loading is collective, so no rank may come to it alone.
    ranks.agree(lambda: _make_trainable(engine, job, folders))
    ranks.agree(lambda: _score_reference(work, folders))
    if job.needs_its_beginning and plan.initial_checkpoint is not None:
        before = folders[plan.initial_checkpoint]
        ranks.agree(lambda: load_initial_checkpoint(engine, plan, work.model_sha256, before))
    ranks.agree(lambda: _score_old(work, folders))
    if job.start is not None:
        checkpoint = folders[job.start]
        work.done = ranks.agree(lambda: load_checkpoint(engine, plan, work.model_sha256, checkpoint))
    report.emit(
        Started,
        run_id=plan.run_id,
        job_id=plan.job_id,
        fence=job.fence,
        first_step=work.step,
        num_steps=plan.first_step + plan.num_steps,
        device=engine.facts.device_name,
        world_size=ranks.world_size,
    )
    return work


def train(work: Work) -> Outcome:
    """The steps that are left, with evaluations and checkpoints between them."""
    try:
        evaluated = evaluate(work)
        while work.done < work.plan.num_steps and not work.cancelled():
            metrics = train_step(work, work.done)
            work.done += 1
            work.report.emit(Step, step=work.step, metrics=metrics)
            save_if_due(work)
            evaluated = evaluate(work)
        save(work)
        is_whole = work.done == work.plan.num_steps and evaluated
        if is_whole and work.plan.probe:
            work.report.emit(Probed, step=work.step, logprobs=probe(work.engine, work.plan.probe))
    except JobFailed:
        raise
    except Exception as error:
        raise work.ranks.agree_on(error) from None
    return Outcome("succeeded" if is_whole else "cancelled", work.step)


def train_step(work: Work, step: int) -> dict[str, float]:
    """One update, from this rank's share of the step's bins. Metrics are sums and means over all ranks.

    Raises:
        JobFailed: `not_finite`; no weight has changed since the step before.
    """
    began = time.perf_counter()
    engine, facts = work.engine, work.engine.facts
    sums = Sums(work.loss, facts.device)
    batches = work.data.batches(step, facts.dp_rank, facts.dp_size, facts.device)
    for batch, found in engine.forward_backward_all(batches, work.loss):
        sums.add(found, batch)
    reduced = engine.reduce(sums.totals)
    update = _update(work, step, reduced)
    duration_s = time.perf_counter() - began
    return {
        **update,
        **{name: value for name, value in reported(reduced).items() if name not in ("loss", "weight")},
        "step_s": duration_s,
        "tokens_per_s": reduced["tokens"] / duration_s,
        "memory_bytes": float(work.ranks.largest([engine.memory().device_bytes])[0]),
    }


def _update(work: Work, step: int, reduced: dict[str, float]) -> dict[str, float]:
    """Loss, learning rate and norm of one update. A step without a trained token is skipped: nothing to learn from."""
    if not reduced["weight"]:
        work.engine.zero_grad()
        return {"skipped": 1.0}
    loss = reduced["loss"] / reduced["weight"]
    if not math.isfinite(loss):
        raise _not_finite(work.step, "the loss", loss)
    first, num_steps = work.plan.first_step, work.plan.num_steps
    rate = learning_rate(work.plan.schedule, first + step, first + num_steps)
    norms = work.engine.optim_step(work.plan.optimizer, rate, reduced["weight"])
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
    """A checkpoint of what is done, unless it stands."""
    if work.saved == work.done:
        return
    path, sha256 = save_checkpoint(work.engine, work.ranks, work.job, work.model_sha256, work.step)
    work.saved = work.done
    if work.ranks.rank == 0:
        work.report.emit(Saved, step=work.step, path=str(path), manifest_sha256=sha256)


def evaluate(work: Work) -> bool:
    """Held-out metrics and samples of the weights as they are, if they are due now. False when a cancel cut in."""
    if not work.evaluator.is_due(work.done, work.plan.num_steps):
        return True
    metrics = work.evaluator.metrics(work.engine, work.cancelled)
    if metrics is None:
        return False
    samples = work.evaluator.samples(work.engine, work.cancelled)
    if samples is None:
        return False
    work.report.emit(Evaluated, step=work.step, metrics=metrics, samples=samples)
    return True


def make_deterministic(plan: JobPlan) -> None:
    """The same bits whatever this process did before."""
    torch.set_num_threads(plan.threads_per_rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # costly, finds only bugs
    torch.manual_seed(plan.seed)


def _take_engine(warm: WarmEngine, plan: JobPlan, folders: Folders, ranks: WorkerRanks) -> Engine:
    if plan.layout.world_size != ranks.world_size:
        place, message = "layout", f"it has {plan.layout.world_size} ranks, this worker {ranks.world_size}"
        raise JobFailed(fault_of(InvalidInput(message, place)))
    try:
        return ranks.agree(lambda: warm.take(plan, folders[plan.model]))
    except JobFailed:
        warm.discard()  # on every rank: an engine that some ranks have and others lack is of no use to the next job
        raise


def _open_data(plan: JobPlan, folders: Folders, open_files: ExitStack) -> tuple[PackedBatches, Evaluator]:
    def open_packed(data: PackedData) -> PackedBatches:
        return open_files.enter_context(PackedBatches(folders[data.units], folders[data.plan]))

    training, held_out, loss = open_packed(plan.data), plan.evaluation.data, held_out_loss(plan.loss)
    check_columns(training.units, plan.loss)
    if plan.num_steps > training.num_steps:
        raise InvalidInput(f"the job has {plan.num_steps} steps, its data {training.num_steps}", "num_steps")
    if held_out is None:
        return training, Evaluator(plan.evaluation, None, [], folders[plan.model], loss)
    evaluated, prompts = open_packed(held_out), read_prompts(folders[held_out.units])
    check_columns(evaluated.units, loss)
    return training, Evaluator(plan.evaluation, evaluated, prompts, folders[plan.model], loss)


def _make_trainable(engine: Engine, job: Job, folders: Folders) -> None:
    """Make the weights to train, fresh or from an adapter. A checkpoint to start from comes after, and into them."""
    plan = job.plan
    begins_here = job.needs_its_beginning and plan.initial_checkpoint is None
    match plan.trainable:
        case Lora() as lora if plan.initial_adapter is not None and begins_here:
            engine.load_adapter(ADAPTER, folders[plan.initial_adapter], lora, trainable=True)
        case Lora() as lora:
            engine.add_adapter(ADAPTER, lora, plan.seed)
        case Full() if plan.initial_adapter is not None:
            raise InvalidInput("full training does not start from an adapter", "initial_adapter")
        case Full() as full:
            engine.train_full(full)
    # Whatever setting up drew from the generators, the steps begin at the seed.
    torch.manual_seed(plan.seed)


def _score_reference(work: Work, folders: Folders) -> None:
    """Before any checkpoint is loaded: full training has the base as it was published only now."""
    reference = reference_of(work.plan.loss)
    if reference is None:
        return
    folder = None if reference == "base" else folders[reference]
    trained = ADAPTER if isinstance(work.plan.trainable, Lora) else None
    scored = [(work.data, _turns(work, folders, 0))]
    if (held_out := work.evaluator.wants_reference) is not None:
        scored.append((held_out, bins_to_score(held_out, 0, 1, work.engine.facts.dp_rank, work.engine.facts.dp_size)))
    score_reference(work.engine, scored, reference, folder, trained, work.plan.temperature)


def _score_old(work: Work, folders: Folders) -> None:
    """All but what the first step alone trains on: there the old policy is the policy itself (targets.py)."""
    if scores_old(work.plan.loss):
        whose, temperature = _turns(work, folders, 1), work.plan.temperature
        work.data.put("old_logprob_N", score(work.engine, work.data, whose, temperature))


def _turns(work: Work, folders: Folders, first_step: int) -> list[Ints]:
    """What is to be scored for the steps from `first_step` on that are not done."""
    plan, start, facts = work.plan, work.job.start, work.engine.facts
    done = 0 if start is None else read_state(folders[start]).step - plan.first_step
    return bins_to_score(work.data, max(done, first_step), plan.num_steps, facts.dp_rank, facts.dp_size)
