"""A run of any kind: its status and Temporal handlers, its pause and cancellation, its beginning and its end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypedDict, TypeVar, Unpack

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.hosts.progress import ProgressReport
    from activities.records.run_records import RunRecords
    from shared.jobs.leases import GangLeader, LeaseGrant
    from shared.runs.start import AnyStart
    from shared.runs.status import STATUS_MEMO, STEP_COUNTS, CheckpointRef, Phase, PhaseSpan, Problem, RunStatus, State
    from workflows import control
    from workflows.leases.gang_turns import Turn
    from workflows.outcomes import ended_early, result_or_raise
    from workflows.training.training import Training

Result = TypeVar("Result")

_MOST_SPANS = 64
# Fields of the status that a resumed run keeps from before until it has newer values.
_KEPT_WHEN_RESUMED = (
    *("started_at", "step", "num_steps", "planned_tokens", "metrics", "checkpoint", "dataset_report"),
    *("adapter", "adapter_sha256", "name", "version", "policy_version"),
    *("notices", *STEP_COUNTS),
)


class StatusChanges(TypedDict, total=False):
    """The fields of a RunStatus that change during a run."""

    state: State
    phase: Phase
    step: int
    num_steps: int
    planned_tokens: int | None
    metrics: dict[str, float]
    checkpoint: CheckpointRef | None
    adapter: str | None
    adapter_sha256: str | None
    name: str | None
    version: int | None
    policy_version: int | None
    dataset_report: str
    skipped_steps: int
    failed_steps: int
    equal_reward_steps: int
    zero_gradient_steps: int
    notices: tuple[str, ...]
    estimated_end: float | None
    paused_by: str | None
    client_away: bool
    gpu_seconds: float
    ended_at: float


def changed(status: RunStatus, **changes: Unpack[StatusChanges]) -> RunStatus:
    """Return a copy of a status with some fields changed."""
    return status.model_copy(update=dict(changes))


class ActiveRun:
    """A run in progress: the status as its workflow set it last, its phases, and its jobs on leased workers.

    Args:
        before: the status at the end of the execution that this one continues, if it continues one.
        current: returns the status, updated by the state of the run's jobs and leases.
        holds: keep the worker between jobs.
    """

    def __init__(
        self, start: AnyStart, current: Callable[[], RunStatus], before: RunStatus | None = None, holds: bool = False
    ) -> None:
        self.start = start
        self.status = before or _first_status(start)
        self.current = current
        self.training = Training(start, lambda: self.is_ending, self._note, holds=holds)
        self.is_pausing = False
        self._task: asyncio.Task[Any] | None = None
        self._has_begun = False
        self._timeline: tuple[PhaseSpan, ...] = before.timeline if before else ()
        self._gpu_seconds_before = before.gpu_seconds if before else 0.0
        self._workers_lost_before = before.workers_lost if before else 0
        self._noted: tuple[str, str, int] | None = None
        self.problem_before: Problem | None = None  # of a resumed run: why it had ended

    @property
    def is_ending(self) -> bool:
        """True once a pause or a cancellation was asked for."""
        return self.is_pausing or workflow.cancellation_reason() is not None

    async def to_its_end(
        self, work: Callable[[], Awaitable[None]], leave: Callable[[], Awaitable[None]] | None = None
    ) -> RunStatus:
        """Begin the run, do its work, and record its end in the store, however it ends.

        Args:
            leave: releases what the run holds; called before the end is recorded.

        Raises:
            asyncio.CancelledError, ApplicationError: the run was cancelled, or failed.
        """
        try:
            await uninterrupted(self._begin())
            await work()
        except (Exception, asyncio.CancelledError) as error:
            if not self._has_begun:  # no end is recorded: it would replace the one on record
                raise
            self.status = ended_early(self.status, error, self.is_pausing)
        if leave is not None:
            await leave()
        self.show(ended_at=workflow.now().timestamp())
        await control.record(RunRecords.record_result, self.current())
        await workflow.wait_condition(workflow.all_handlers_finished)
        return result_or_raise(self.current())

    async def interruptible(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do work that a pause ends as a cancellation would: at a step boundary, with a checkpoint.

        Raises:
            asyncio.CancelledError: it was interrupted; or the error that the work raises for that.
        """
        self._task = asyncio.create_task(work)
        if self.is_pausing:
            self._task.cancel()
        return await self._task

    def pause(self, limit: str | None = None, client_away: bool = False) -> None:
        """Interrupt the run's work. `limit`: the limit that pauses it, in words; None if a user does."""
        self.is_pausing = True
        self.status = changed(self.status, paused_by=limit, client_away=client_away)
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise CancelledError if a pause was asked for after the work was done."""
        if self.is_pausing:
            raise asyncio.CancelledError

    def show(self, **changes: Unpack[StatusChanges]) -> None:
        """Change the run's status, and its memo if state, phase or lease changed."""
        self.status = changed(self.status, **changes)
        self._note()

    def add_notices(self, notices: tuple[str, ...]) -> None:
        """Show the run's user notices, each once."""
        self.status = changed(self.status, notices=tuple(dict.fromkeys((*self.status.notices, *notices))))

    def with_jobs(self) -> RunStatus:
        """Return the status, updated with phase, notices, losses, timeline and GPU seconds of the jobs and leases."""
        status, training = self.status, self.training
        is_training = status.phase == "waiting_for_worker" and training.leasing.grant is not None
        return status.model_copy(
            update={
                "phase": "training" if is_training else status.phase,
                "epoch": training.leasing.epoch,
                "notices": (*status.notices, *training.notices),
                "workers_lost": self._workers_lost_before + training.num_lost,
                "timeline": self._timeline,
                "gpu_seconds": self._gpu_seconds_before + training.leasing.held_s * self.start.run.layout.world_size,
            }
        )

    async def _begin(self) -> None:
        """Begin the run. A resumed one takes over timeline, counters and fields from its recorded end."""
        before = await control.begin(self.start)
        self._has_begun = True
        if self.start.resumed:
            self.show(phase="checking")
        if before is None:
            return
        self._timeline = before.timeline + self._timeline
        self._gpu_seconds_before = before.gpu_seconds
        self._workers_lost_before = before.workers_lost
        self.problem_before = before.problem
        kept = {name: value for name in _KEPT_WHEN_RESUMED if (value := getattr(before, name)) is not None}
        self.status = self.status.model_copy(update=kept)
        self._note()

    def _note(self) -> None:
        """Put the status into the workflow's memo, if its state, phase or lease changed, and the phase on the timeline.

        A listing of workflows includes their memos, which saves a query to each workflow.
        """
        status = self.current()
        now = (status.state, status.phase, status.epoch)
        if now == self._noted:
            return
        self._noted = now
        time = workflow.time()
        spans = list(self._timeline)
        if spans and spans[-1].ended is None:
            spans[-1] = spans[-1].model_copy(update={"ended": time})
        if status.state == "running":
            spans.append(PhaseSpan(phase=status.phase, began=time, lease=status.epoch))
        self._timeline = tuple(spans[-_MOST_SPANS:])
        workflow.upsert_memo({STATUS_MEMO: status.model_dump(mode="json", exclude={"metrics", "timeline"})})


class RunHandlers:
    """The query and signals of a run's workflow, whatever its kind."""

    _run: ActiveRun

    @workflow.query
    def status(self) -> RunStatus:
        """Return the run's status."""
        return self._run.current()

    @workflow.signal
    def leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that a worker is up for this run."""
        self._run.training.leased(grant)

    @workflow.signal
    def gathers(self, leader: GangLeader) -> None:
        """Take a host's signal that it has the first part of a worker of several machines."""
        self._run.training.gathers(leader)

    @workflow.signal
    async def gang_turn(self, turn: Turn) -> None:
        """Take the signal that this run may gather the hosts of such a worker."""
        await self._run.training.has_turn(turn)

    @workflow.signal
    def pause(self) -> None:
        """End at the next step boundary, with a checkpoint, until somebody resumes the run."""
        self._run.pause()

    @workflow.signal
    def pause_for_limit(self, limit: str) -> None:
        """Pause for a limit, named in words: the service resumes the run when that is raised."""
        self._run.pause(limit)

    @workflow.signal
    def progress(self, report: ProgressReport) -> None:
        """Take a host's report on the job: steps, metrics, a checkpoint."""
        self._run.training.progress(report)


class ClientDrivenHandlers(RunHandlers):
    """The handlers of a workflow whose client sends work at any time, and that may hold an idle worker in between."""

    _wanted_epoch: int | None = None  # the lease whose worker another run waits for

    @workflow.signal
    def make_room(self) -> None:
        """Give the worker back as soon as no work waits: another run waits for it. The next work leases another one."""
        self._wanted_epoch = self._run.training.leasing.epoch

    @workflow.signal
    def pause_for_client(self) -> None:
        """Pause if nothing waits to be done: the client is away, and the service resumes the run for its next work."""
        phase = self._run.current().phase
        if phase in ("waiting_for_commands", "waiting_for_groups") and not (self._has_work() or self._run.is_ending):
            self._run.pause(client_away=True)

    def _has_work(self) -> bool:
        raise NotImplementedError

    def _is_wanted(self) -> bool:
        return self._wanted_epoch == self._run.training.leasing.epoch

    def _has_ended(self) -> bool:
        return self._run.status.ended_at is not None


async def uninterrupted(part: Coroutine[Any, Any, Result]) -> Result:
    """Await a coroutine to its end. A cancellation that arrives before is raised only then."""
    task = asyncio.create_task(part)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _first_status(start: AnyStart) -> RunStatus:
    run = start.run
    return RunStatus(
        run_id=start.run_id,
        kind=run.kind,
        name=run.name or start.run_id,
        policy_version=0 if run.kind == "rl" else None,
        started_at=workflow.info().start_time.timestamp(),
    )
