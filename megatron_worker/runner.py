"""A job, from its inputs to its last checkpoint: its slot is made or loaded, then its program's commands are done.

There are two programs: the steps of the job's plan (planned.py), and what a client sends (session.py). Every rank runs
this with the same job. A job is a generator that yields between its passes, so that the worker can do passes of other
jobs there; it then ends the job (worker.py).
"""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

import torch

from megatron_worker.planned import PlannedSteps, open_data
from megatron_worker.process.background import Awaited
from megatron_worker.process.event_log import EventLog
from megatron_worker.process.faults import CancelledEarly, JobFailed
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Folders, Inputs, Staging
from megatron_worker.session import SessionProgram
from megatron_worker.trained_slot import Outcome, Passes, Program, TrainedSlot
from megatron_worker.training.checkpoint import (
    CheckpointState,
    go_on_from,
    load_checkpoint,
    load_initial_checkpoint,
    read_state,
)
from megatron_worker.training.profiling import StepProfiler
from megatron_worker.warm_engine import WarmEngine, WarmState, critic_of, make_trainable, slots_of, take_engine
from shared.jobs.events import Started
from shared.jobs.job import Job, JobPlan, SessionPlan, WorkerPlan
from shared.provenance import code_sha256


class Phases:
    """Seconds of a job's phases before it starts, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, phase: str, within: Mapping[str, float] = MappingProxyType({})) -> None:
        """End a phase. `within`: its last parts, which are reported separately."""
        now = time.perf_counter()
        self.seconds |= {phase: now - self._since - sum(within.values()), **within}
        self._since = now


def run_job(
    job: Job,
    warm: WarmEngine,
    staging: Staging,
    report: EventLog,
    ranks: WorkerRanks,
    cancelled: Callable[[], bool],
    by_hand: bool = False,
) -> Passes:
    """Do a job, a pass at a time. A fault that all ranks agree on is an outcome; any other error propagates.

    `by_hand`: a session ends when there is no further command.
    """
    slot: TrainedSlot | None = None
    phases, built = Phases(), warm.dispatcher
    with ExitStack() as open_files:
        try:
            make_deterministic(job.plan)
            (folders, model_sha256), kept = yield from _stage_inputs(job, warm, staging, cancelled)
            phases.end("stage inputs")
            with_slot = ranks.agree(lambda: _program(job, folders, warm, staging, open_files))
            dispatcher = take_engine(warm, job.plan, folders, kept, ranks)
            phases.end("build engine", {"read weights": dispatcher.facts.weights_s if dispatcher is not built else 0.0})
            yield None  # not before: until it is taken, other jobs may have what was kept dropped
            trained = slots_of(job.plan.run_id, job.plan.trainable).trained
            slot = TrainedSlot(job, trained, model_sha256, dispatcher, report, ranks, cancelled, at=job.plan.first_step)
            slot.critic = critic_of(dispatcher, job.plan, kept.critic[1] if kept and kept.critic else None)
            slot.profiler = open_files.enter_context(StepProfiler(job.log_path if ranks.rank == 0 else None))
            program = with_slot(slot)
            yield from _begin(slot, program, folders, kept, phases)
            return (yield from _agreed_on(ranks, program.run(by_hand)))
        except JobFailed as failed:
            return Outcome("failed", slot.at if slot else job.plan.first_step, failed.fault)
        except CancelledEarly:
            return Outcome("cancelled", job.plan.first_step)


def _program(
    job: Job, folders: Folders, warm: WarmEngine, staging: Staging, open_files: ExitStack
) -> Callable[[TrainedSlot], Program]:
    """Open what the job's program needs besides its slot."""
    match job.plan:
        case JobPlan() as plan:
            return partial(PlannedSteps, plan, folders, *open_data(plan, folders, open_files))
        case SessionPlan() as plan:
            return partial(SessionProgram, plan, folders, warm, staging)


def _stage_inputs(
    job: Job, warm: WarmEngine, staging: Staging, cancelled: Callable[[], bool]
) -> Generator[Awaited, None, tuple[Inputs, WarmState | None]]:
    """Stage the job's inputs, except those that its run's last job left in the engine. Returns what it left, too."""
    kept = warm.kept_for(job)
    at_hand = (job.plan.initial_checkpoint, kept.reference) if kept else ()
    inputs = yield from staging.fetch(job, cancelled, at_hand)
    if kept is not None and warm.kept_for(job) is None:  # it was dropped in the meantime to make room
        return (yield from staging.fetch(job, cancelled)), None
    return inputs, kept


def _begin(
    slot: TrainedSlot, program: Program, folders: Folders, kept: WarmState | None, phases: Phases
) -> Generator[None, None, None]:
    """Make the slot's weights, load the state that the job resumes from, and report `started`.

    Raises:
        JobFailed: one rank failed.
        CancelledEarly: the job was cancelled while log-probabilities for its steps were computed.
    """
    job, plan, ranks, dispatcher = slot.job, slot.job.plan, slot.ranks, slot.dispatcher
    if kept is None:
        ranks.agree(lambda: make_trainable(dispatcher, job, folders))
        yield None
    before = ranks.agree(lambda: _state_before(job, folders, kept))
    if before is not None and job.start is not None:
        slot.at = before.step
    yield from program.before_loading(before, kept)
    if kept is not None:
        ranks.agree(lambda: go_on_from(kept.checkpoint, plan, slot.model_sha256))
    elif job.needs_its_beginning and plan.initial_checkpoint is not None:
        beginning = folders[plan.initial_checkpoint]
        ranks.agree(lambda: load_initial_checkpoint(slot.load, plan, slot.model_sha256, beginning))
    yield from program.at_the_beginning()
    if job.start is not None:
        recorded = folders[job.start]
        ranks.agree(lambda: load_checkpoint(slot.load, plan, slot.model_sha256, recorded))
    phases.end("make slot")
    slot.report.emit(
        Started,
        run_id=plan.run_id,
        job_id=plan.job_id,
        fence=job.fence,
        first_step=slot.at,
        num_steps=slot.at if plan.last_step is None else plan.last_step,
        device=dispatcher.facts.device_name,
        world_size=ranks.world_size,
        code=code_sha256(),
        seconds=phases.seconds,
    )
    slot.profiler.at_boundary()


def _state_before(job: Job, folders: Folders, kept: WarmState | None) -> CheckpointState | None:
    """Return the state of the checkpoint that the job resumes from, or else begins with."""
    begins_with = job.start or job.plan.initial_checkpoint
    return None if begins_with is None else kept.checkpoint.state if kept else read_state(folders[begins_with])


def _agreed_on(ranks: WorkerRanks, passes: Passes) -> Passes:
    """Do a program's passes. An error of one rank is agreed on: raises JobFailed on all."""
    try:
        return (yield from passes)
    except (JobFailed, CancelledEarly):
        raise
    except Exception as error:
        raise ranks.agree_on(error) from None


def make_deterministic(plan: WorkerPlan) -> None:
    """Set threads, deterministic algorithms and the seed, so that results do not depend on earlier jobs."""
    torch.set_num_threads(plan.threads_per_rank)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:  # the same, without an import of torch's compiler, which nothing uses there: a third of a second
        torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # costly, finds only bugs
    torch.manual_seed(plan.seed)
