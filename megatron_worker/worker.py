"""The worker's main loop: rank 0 watches the folder, and all ranks do the jobs that it broadcasts."""

import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from longshore.events import Cancelled, Failed, Offloaded, Started, Succeeded
from longshore.fields import Frozen
from megatron_worker.planned import PlannedSteps, open_data
from megatron_worker.process.job_queue import ClaimedJob, EventLog, JobQueue
from megatron_worker.process.ranks import (
    Awaited,
    CancelledEarly,
    Fault,
    Folders,
    Inputs,
    JobFailed,
    Staging,
    WorkerRanks,
)
from megatron_worker.session import SessionProgram
from megatron_worker.trained_slot import Outcome, Passes, Program, StepProfiler, TrainedSlot
from megatron_worker.training.checkpoint import (
    RandomState,
    go_on_from,
    load_checkpoint,
    load_initial_checkpoint,
    random_state,
    read_state,
    set_random_state,
)
from megatron_worker.warm_engine import (
    BuildEngine,
    WarmEngine,
    WarmState,
    collect_garbage,
    critic_of,
    fits_beside,
    make_trainable,
    slots_of,
    take_engine,
)
from shared.jobs.job import Job, JobPlan, SessionPlan, WorkerPlan
from shared.provenance import code_sha256
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths

# --- A job, from its inputs to its last checkpoint ---
# Its slot is made or loaded, then its program's commands are done.
#
# There are two programs: the steps of the job's plan (planned.py), and what a client sends (session.py). Every rank
# runs this with the same job. A job is a generator that yields between its passes, so that the worker can do passes of
# other jobs there; it then ends the job.


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
            try:
                return (yield from program.run(by_hand))
            except (JobFailed, CancelledEarly):
                raise
            except Exception as error:
                raise ranks.agree_on(error) from None
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
    begins_with, before = job.start or plan.initial_checkpoint, None
    if begins_with is not None:
        before = kept.checkpoint.state if kept else ranks.agree(lambda: read_state(folders[begins_with]))
    if before is not None and job.start is not None:
        slot.at, slot.evaluations = before.step, before.evaluations
    yield from program.before_loading(before, kept)
    if kept is not None:
        ranks.agree(lambda: go_on_from(kept.checkpoint, plan, slot.model_sha256))
    elif job.needs_its_beginning and plan.initial_checkpoint is not None:
        beginning = folders[plan.initial_checkpoint]
        ranks.agree(lambda: load_initial_checkpoint(slot.load_initial, plan, slot.model_sha256, beginning))
    if (critic := slot.critic) is not None and (apart := critic.plan.checkpoint) is not None:
        ranks.agree(lambda: critic.load(folders[apart]))
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


def make_deterministic(plan: WorkerPlan) -> None:
    """Set threads, deterministic algorithms and the seed, so that results do not depend on earlier jobs."""
    torch.set_num_threads(plan.threads_per_rank)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:  # the same, without an import of torch's compiler, which nothing uses there: a third of a second
        torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # costly, finds only bugs
    torch.manual_seed(plan.seed)


POLL_S, SOON_POLL_S = 0.05, 0.005  # SOON_POLL_S for SOON_S seconds, while another job is likely to come
READY_POLL_S = 0.001  # for as long, of what jobs in hand wait for: a session's client waits for each command
SOON_S = 10.0
KEEP_ALIVE_S = 60.0  # idle ranks wait in a broadcast, which may not time out


class WorkerOrder(Frozen):
    """Rank 0's order to all ranks: begin a job, continue a run's job, wait, offload, or end.

    `stale`: why a job is refused.
    """

    kind: Literal["wait", "begin", "go_on", "offload", "leave"]
    job: Job | None = None
    stale: str | None = None
    run_id: str | None = None


class CancelFlag:
    """Tells whether a job is cancelled. Calling it is collective: every rank gets rank 0's answer; True is final."""

    def __init__(self, ranks: WorkerRanks, asked: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._asked = asked
        self._seen = False

    def __call__(self) -> bool:
        if not self._seen:
            self._seen = bool(self._ranks.largest([int(self.is_asked())])[0])
        return self._seen

    def is_asked(self) -> bool:
        """Return True on rank 0 if the job is cancelled; not collective."""
        return self._ranks.rank == 0 and self._asked()


class FairTurns:
    """Chooses the next pass fairly: of the tenant that has had the least time, the run that has waited longest.

    Time is divided by the tenant's weight: twice the weight, twice the time. A tenant that comes (back) counts as
    having had at least as much time as the tenant that had the least: so it cannot take all the time to catch up, and
    gains nothing by going away.
    """

    def __init__(self) -> None:
        self._seconds_of: dict[str, float] = {}
        self._least_s = 0.0

    def count(self, tenant: str, seconds: float, weight: float = 1.0) -> None:
        """Count the seconds of a tenant's pass."""
        self._seconds_of[tenant] = self._seconds(tenant) + seconds / weight

    def next(self, waiting: Sequence[tuple[str, str]]) -> str:
        """Return the run to continue. `waiting`: pairs of run and tenant, the longest-waiting ones first."""
        run_id, tenant = min(waiting, key=lambda each: self._seconds(each[1]))
        self._least_s = self._seconds(tenant)
        return run_id

    def _seconds(self, tenant: str) -> float:
        return max(self._seconds_of.get(tenant, 0.0), self._least_s)


@dataclass
class ActiveJob:
    """A job in progress. `random_state`: its random generators' state, kept while passes of other jobs are done.

    `awaited`: tells when its next pass can be done; None: at once.
    """

    job: Job
    passes: Passes
    report: EventLog
    cancel: CancelFlag
    archive: Callable[[], None]
    awaited: Awaited | None = None
    random_state: RandomState = field(default_factory=random_state)

    def is_ready(self) -> bool:
        """Return True on rank 0 if the job's next pass can be done."""
        return self.awaited is None or self.awaited() or self.cancel.is_asked()


class Worker:
    """One rank's process, with its engine, and `slot_bytes` for slots on its device (None: `WarmEngine` says).

    Several jobs may be in progress, of runs that train adapters on one engine. Their passes are done in turn; the
    results of each are equal, to the bit, to those of the job on its own.
    """

    def __init__(self, ranks: WorkerRanks, staging: Staging, build: BuildEngine, slot_bytes: int | None = None) -> None:
        self._ranks = ranks
        self._staging = staging
        self._warm = WarmEngine(build, slot_bytes)
        self._in_hand: dict[str, ActiveJob] = {}
        self._turns = FairTurns()
        self._last: str | None = None

    def serve(self, paths: WorkerPaths) -> None:
        """Do jobs until the folder's `stop` exists and no job is active."""
        queue = JobQueue(paths) if self._ranks.rank == 0 else None
        # On machines other than rank 0's a job has separate folders, which that machine's host fills.
        is_elsewhere = self._ranks.rank != self._ranks.local_rank
        if queue or (is_elsewhere and self._ranks.local_rank == 0):
            write_atomically(paths.ready, b"")
        while True:
            order, claim = self._next_order(queue) if queue else (None, None)
            told = self._ranks.broadcast(order.model_dump_json().encode() if order else None)
            order = WorkerOrder.model_validate_json(told)
            match order.kind:
                case "leave":
                    return
                case "begin":
                    job = order.job
                    assert job is not None
                    if is_elsewhere:
                        job = job.model_copy(update=Job.places(paths, job.plan, job.fence))
                    self._begin_claimed(job, order.stale, queue, claim)
                    if not order.stale:
                        self._advance(job.plan.run_id)
                case "go_on":
                    assert order.run_id is not None
                    self._advance(order.run_id)
                case "offload":
                    self._offload(paths)

    def do_one(self, job: Job) -> Outcome:
        """Do one job by hand: nothing is claimed, archived or cancelled. Raises InvalidInput if its log is in use."""
        report = EventLog(Path(job.log_path) if self._ranks.rank == 0 else None)
        return self.run(job, report)

    def run(
        self,
        job: Job,
        report: EventLog,
        cancelled: Callable[[], bool] = lambda: False,
        archive: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """A job from its inputs to its terminal event. `cancelled` and `archive` are asked on rank 0 alone."""
        self._begin(job, report, cancelled, archive, by_hand=True)
        while (outcome := self._advance(job.plan.run_id)) is None:
            while self._ranks.rank == 0 and not self._in_hand[job.plan.run_id].is_ready():
                time.sleep(SOON_POLL_S)
        return outcome

    def _next_order(self, queue: JobQueue) -> tuple[WorkerOrder, ClaimedJob | None]:
        """Wait for something to do, on rank 0: begin a new job, or continue the run whose turn it is.

        A worker that is on its device and no longer serves a lease leaves the device.

        After KEEP_ALIVE_S seconds it returns an order to wait, so that the broadcast to other ranks does not time out.
        """
        began, in_hand = time.monotonic(), self._in_hand
        plans = [task.job.plan for task in in_hand.values()]
        while (waited_s := time.monotonic() - began) < KEEP_ALIVE_S:
            is_leaving = queue.should_leave()
            if is_leaving and not in_hand:
                return WorkerOrder(kind="leave"), None
            if not is_leaving and (claim := queue.claim(lambda plan: fits_beside(plan, plans))) is not None:
                return WorkerOrder(kind="begin", job=claim.job, stale=claim.stale), claim
            if ready := [(run_id, task.job.tenant) for run_id, task in in_hand.items() if task.is_ready()]:
                return WorkerOrder(kind="go_on", run_id=self._turns.next(ready)), None
            if self._warm.on_device and not in_hand and queue.has_no_lease():
                return WorkerOrder(kind="offload"), None
            if waited_s > SOON_S:
                time.sleep(POLL_S)
            else:
                until = time.monotonic() + SOON_POLL_S
                while time.monotonic() < until and not any(task.is_ready() for task in in_hand.values()):
                    time.sleep(READY_POLL_S)
        return WorkerOrder(kind="wait"), None

    def _offload(self, paths: WorkerPaths) -> None:
        """Take everything off the device, and tell the host how many bytes of its memory all ranks hold."""
        assert self._warm.dispatcher is not None
        self._warm.offload_all()
        [held] = self._ranks.total([self._warm.dispatcher.engine.memory().host_bytes])
        if self._ranks.rank == 0:
            write_atomically(paths.offloaded, str(held).encode(), is_durable=False)

    def _begin_claimed(self, job: Job, stale: str | None, queue: JobQueue | None, claim: ClaimedJob | None) -> None:
        """Begin a job; `queue` and `claim` are rank 0's alone."""
        report = claim.report if claim else EventLog(None)

        def archive() -> None:
            assert queue is not None and claim is not None
            queue.archive(claim.path)

        if stale:
            outcome = Outcome("failed", 0, Fault(kind="stale_fence", message=stale))
            end_job(job, outcome, self._warm, report, self._ranks, archive)
        else:
            self._begin(job, report, lambda: queue is not None and queue.is_cancelled(job), archive)

    def _begin(
        self,
        job: Job,
        report: EventLog,
        cancelled: Callable[[], bool],
        archive: Callable[[], None],
        by_hand: bool = False,
    ) -> None:
        flag = CancelFlag(self._ranks, cancelled)
        passes = run_job(job, self._warm, self._staging, report, self._ranks, flag, by_hand)
        self._in_hand[job.plan.run_id] = ActiveJob(job, passes, report, flag, archive)

    def _advance(self, run_id: str) -> Outcome | None:
        """Do one pass of a job, and put it last in line. After the last pass end the job, and return its outcome."""
        task = self._in_hand.pop(run_id)
        if self._last != run_id:
            set_random_state(task.random_state)
        self._last = run_id
        began = time.monotonic()
        try:
            task.awaited = next(task.passes)
        except StopIteration as end:
            outcome: Outcome = end.value
            end_job(task.job, outcome, self._warm, task.report, self._ranks, task.archive)
            return outcome
        finally:
            self._turns.count(task.job.tenant, time.monotonic() - began, task.job.tenant_weight)
        task.random_state = random_state()
        self._in_hand[run_id] = task
        return None


def end_job(
    job: Job, outcome: Outcome, warm: WarmEngine, report: EventLog, ranks: WorkerRanks, archive: Callable[[], None]
) -> None:
    """End a job, after the runner has returned and freed its own objects, and saved its last checkpoint (1).

    The numbers are those of docs/job_protocol.md. `archive` is called on rank 0; the terminal event comes last.
    """
    _free_device(job, outcome, warm, report, ranks)  # 2, 3
    ranks.barrier()  # 4
    if ranks.rank == 0:
        if Path(job.scratch_dir).exists():
            shutil.rmtree(job.scratch_dir)  # 5
        archive()  # 6
        _conclude(job, outcome, warm, report)  # 7


def _free_device(job: Job, outcome: Outcome, warm: WarmEngine, report: EventLog, ranks: WorkerRanks) -> None:
    """Drop what the job made, and offload what later jobs can use. A job that was refused has nothing to free."""
    if job.plan.run_id not in warm.in_hand or warm.dispatcher is None:
        collect_garbage()
        return
    engine = warm.dispatcher.engine
    began, before = time.perf_counter(), engine.memory()
    warm.give_back(job.plan, outcome.kept)
    collect_garbage()
    if job.plan.after == "offload":
        warm.offload(job.plan)
        after = engine.memory()
        sums = ranks.total([before.device_bytes, after.device_bytes, after.host_bytes])
        report.emit(
            Offloaded,
            device_bytes_before=sums[0],
            device_bytes_after=sums[1],
            host_bytes=sums[2],
            duration_s=time.perf_counter() - began,
        )


def _conclude(job: Job, outcome: Outcome, warm: WarmEngine, report: EventLog) -> None:
    """Emit the terminal event. `device` says whether the job's own part of the device's memory is still held."""
    is_held = warm.on_device and (job.plan.after == "keep" or not warm.in_hand)
    device = "held" if is_held else "released"
    match outcome.state:
        case "succeeded":
            ended = {"best": outcome.best, "awaits_grades": outcome.awaits_grades}
            report.emit(Succeeded, step=outcome.step, device=device, **ended)
        case "cancelled":
            report.emit(Cancelled, step=outcome.step, device=device)
        case "failed":
            assert outcome.fault is not None
            report.emit(Failed, step=outcome.step, device=device, **outcome.fault.model_dump())
