"""A run as its workflow knows it, and its jobs on leased workers."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import LeaseRequest
    from activities.hosts.run_job import JobResult, ProgressReport, RunJob, RunJobRequest
    from activities.publishing.publish import Published
    from activities.records import FindCheckpoint, FindCheckpointRequest, RunRecords, saved_by_job
    from longshore.accounts import Room
    from longshore.runs import CRITIC
    from longshore.training import Lora
    from longshore.views import CheckpointRef, PhaseSpan, Problem, RunStatus
    from shared.errors import HostLeft, WorkerLost
    from shared.jobs.job import AnyPlan, GangLeader, JobPlan, LeaseGrant, WorkerKey
    from shared.runs.start import AnyStart, SessionState
    from shared.runs.status import STEP_COUNTS, RLState
    from workflows import control, policies
    from workflows.leases import Leasing, Lost, Turn, Turns, lost, on_leased_host
    from workflows.outcomes import RunCancelled, RunFailed, ended_early, result_or_raise
    from workflows.services import track
    from workflows.training import job_plan


# --- A run's jobs on leased workers ---
# A lost worker is replaced, and the job continues from its newest checkpoint.


class Damaged(Exception):
    """The checkpoint that a job was to resume from is damaged. An older one may be intact."""


@dataclass
class StepEta:
    """Estimates when a run's last step ends, from the times at which the steps of one lease ended.

    Measured from the end of the first step that a lease's worker did, so that waiting, a worker's start and warming up
    do not count; each lease is measured separately, since it may repeat steps. Holds the first and the last step of one
    lease: their numbers, and their ends in seconds since 1970 without the seconds of evaluations before them.
    """

    _lease: int = 0
    _first: tuple[int, float] | None = None
    _last: tuple[int, float] | None = None
    _evaluations: int = 0
    _evaluating_s: float = 0.0

    def take(self, step: int, time: float, lease: int, evaluations: int = 0, evaluating_s: float = 0.0) -> None:
        """Note that a step has ended. A step that was noted before, or of an earlier lease, changes nothing.

        Args:
            evaluations: those of this lease so far, which took `evaluating_s` seconds.
        """
        if self._first is None or lease != self._lease:
            self._lease, self._first, self._last = lease, (step, time - evaluating_s), None
        elif step > (self._last or self._first)[0]:
            self._last = step, time - evaluating_s
        else:
            return
        self._evaluations, self._evaluating_s = evaluations, evaluating_s

    def end(self, num_steps: int | None, lease: int, eval_every: int = 0) -> float | None:
        """Estimate when the step of this number ends, with the evaluations until then and after it.

        None until two steps of this lease have ended.

        Args:
            eval_every: steps from one evaluation to the next; 0: there is one only after the last step.
        """
        if num_steps is None or self._first is None or self._last is None or lease != self._lease:
            return None
        (first, began), (last, now) = self._first, self._last
        end = now + self._evaluating_s + (now - began) / (last - first) * max(0, num_steps - last)
        if not self._evaluations:
            return end
        to_come = 1 + ((num_steps - 1) // eval_every - last // eval_every if eval_every else 0)
        return end + max(0, to_come) * self._evaluating_s / self._evaluations


@dataclass
class Training:
    """A run's jobs and leases of workers. Signals with another fence than the current one are ignored.

    Attributes:
        is_ending: tells whether the run was paused or cancelled.
        changed: called when a lease begins, is granted, or ends.
        holds: keep a worker after its job for the next one, until `release`.
        must_yield: returns True if the worker is not kept after all, since the run waits for a sampler.
        shares: other runs may train on its worker, if the run was accepted with that.
        device: makes a context in which a job may use its device, which a sampler may share.
        num_lost: leases of this execution that ended in a loss.
        notices: messages for the run's user.
        eta: of the steps within a job.
        is_tracked: the workflow that writes the run to W&B was started, which happens with the run's first worker.
        first_epoch: epochs are above it. A run's two trainings get the same signals, and know theirs by that.
        leasing: its `epoch` counts the leases of all executions of the run.
    """

    start: AnyStart
    is_ending: Callable[[], bool]
    changed: Callable[[], None]
    holds: bool = False
    must_yield: Callable[[], bool] = lambda: False
    shares: bool = True
    device: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    num_lost: int = 0
    notices: tuple[str, ...] = ()
    eta: StepEta = field(default_factory=StepEta)
    is_tracked: bool = False
    first_epoch: int = 0
    leasing: Leasing = field(init=False)
    _found: CheckpointRef | None = None
    _last_epoch: int = 0
    _begun_step: int = 0
    _is_at_work: bool = False
    _passed_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        queue = policies.lease_queue(self.start.shape)
        self.leasing = Leasing(queue, self.start.timing, turns=Turns(queue))

    @property
    def is_idle(self) -> bool:
        """True while a worker is leased that has no job."""
        return self.leasing.grant is not None and not self._is_at_work

    def leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that a worker is up."""
        self.leasing.granted(grant)
        self.changed()

    def progress(self, report: ProgressReport) -> None:
        """Take a host's report on the job, unless it is of another lease or of an earlier step than is known."""
        grant = self.leasing.grant
        if grant is not None and report.fence == grant.fence and report.step >= self.step:
            self._note(report)
            if report.step > self._begun_step:
                self.eta.take(report.step, workflow.time(), self.leasing.epoch, report.evaluations, report.evaluating_s)

    def _note(self, news: ProgressReport | JobResult) -> None:
        self.step = news.step
        self.metrics = self.metrics | news.metrics
        self.checkpoint = news.checkpoint or self.checkpoint
        self.leasing.note_held(news.held_s)

    async def do(self, plan: AnyPlan) -> JobResult:
        """Do a job to its end. When a worker is lost, another is leased, provided that new checkpoints are made.

        Raises:
            RunFailed: the job cannot be done, or too many workers in a row were lost without a new checkpoint.
            RunCancelled: the worker ended the job because it was asked to, or was lost after that.
        """
        self._is_at_work = True
        try:
            return await self._do(plan)
        finally:
            self._is_at_work = False

    async def _do(self, plan: AnyPlan) -> JobResult:
        losses: list[Lost] = []
        num_crowded = num_ungathered = 0
        self._found = None
        while True:
            if not self.leasing.is_warm and await self._find_checkpoint(plan):
                losses.clear()
            # A host that leaves in good order is no fault of the run: such losses do not count.
            if sum(loss.kind != HostLeft.__name__ for loss in losses) >= self.start.timing.max_losses:
                times = "once" if len(losses) == 1 else f"{len(losses)} times in a row"
                message = f"the worker was lost {times} without a new checkpoint; the last time: {losses[-1]}"
                raise RunFailed(Problem(kind="worker_lost", message=message))
            if pause := policies.pause_before_lease(len(losses)):
                await workflow.sleep(pause)
            try:
                # The job may have killed its worker: next time it gets one that no other runs share.
                is_suspect = len(losses) > 1 or any(loss.kind == WorkerLost.__name__ for loss in losses)
                # A run that found no memory for its slot gets a new worker that others may join later. If that is
                # crowded again, it gets one that nobody shares.
                shares = not is_suspect and num_crowded < 2
                return await self._lease_and_run(plan, shares, joins=not num_crowded)
            except Damaged as damaged:
                assert self.checkpoint is not None
                self._passed_over += (self.checkpoint.artifact.uri,)
                self._add_notices([str(damaged)])
            except Lost as loss:
                if self.is_ending():
                    raise RunCancelled from loss  # it was lost while it was to end the job
                if loss.kind == policies.NO_MEMORY_FOR_SLOT and num_crowded < 2:
                    num_crowded += 1
                    continue
                if loss.kind == policies.NOT_GATHERED:
                    num_ungathered += 1
                    if num_ungathered >= policies.MAX_GATHERINGS:  # each is some 40 events of the run's history
                        raise RunFailed(
                            Problem(kind="worker_lost", message=f"{loss}, {num_ungathered} times")
                        ) from loss
                    continue
                losses.append(loss)
                self.num_lost += loss.kind != HostLeft.__name__
                workflow.logger.warning("lease %d came to nothing: %s", self.leasing.epoch, loss)

    def release(self) -> None:
        """Give the worker back, if there is one."""
        if workflow.in_workflow():  # else it was evicted, as in `Leasing.release`
            self.leasing.release()
            self.changed()

    def _add_notices(self, damaged: Sequence[str]) -> None:
        """Add a notice for each damaged checkpoint that has none yet."""
        for message in damaged:
            notice = f"{message}; the run goes on from an older one"
            if not any(known.startswith(message) for known in self.notices):
                self.notices += (notice,)
                workflow.logger.warning("%s", notice)

    async def _find_checkpoint(self, plan: AnyPlan) -> bool:
        """Find the last epoch and the checkpoint to resume from. Returns True if there is a newer one than before."""
        request = FindCheckpointRequest(run_id=self.start.run_id, passed_over=self._passed_over)
        find = FindCheckpoint.find_checkpoint
        point = await control.do(find, request, policies.PATIENT, policies.RECORD_TIMEOUT)
        self._add_notices(point.damaged)
        step_before = self._found.step if self._found else plan.first_step
        self._found = self.checkpoint = saved_by_job(plan, point.checkpoint)
        self._last_epoch = max(self.first_epoch, self.leasing.epoch, point.last_epoch)
        self.step = self._begun_step = self._found.step if self._found else plan.first_step
        return self.step > step_before

    async def _lease_and_run(self, plan: AnyPlan, shares: bool, joins: bool) -> JobResult:
        keep = False
        try:
            if not self.leasing.is_warm:
                self._take_lease(plan, shares, joins)
            grant = await self.leasing.wait()
            if not self.is_tracked:  # if the worker is lost during this, its job will fail
                self.is_tracked = True
                await track(self.start)
            result = await self._run_job(plan, grant)
            self._note(result)
            accepted = _accepted(result)
            keep = self.holds and not self.must_yield()
            return accepted
        except ActivityError as error:
            loss = lost(error)
            # A job whose lease has ended does not know the reason; the lease activity's error has it.
            raise (self.leasing.failure or loss) from error
        finally:
            if not keep:
                self.release()

    def _take_lease(self, plan: AnyPlan, shares: bool, joins: bool) -> None:
        key, group = WorkerKey.of(plan), self.start.shares_with
        shares = shares and self.shares and group is not None and isinstance(plan.trainable, Lora)
        shares = shares and key.layout.nodes == 1
        request = LeaseRequest(
            run_id=self.start.run_id,
            epoch=self._last_epoch + 1,
            key=key,
            ready_timeout_s=policies.WORKER_READY_TIMEOUT_S,
            join_queue=policies.join_queue(self.start.shape, key, group or "") if shares else None,
            sync_backend=plan.sync_target.backend if plan.sync_target is not None else "auto",
        )
        self.leasing.take_worker(request, joins)
        self.changed()

    async def _run_job(self, plan: AnyPlan, grant: LeaseGrant) -> JobResult:
        request = RunJobRequest(
            plan=plan,
            fence=grant.fence,
            worker_id=grant.worker_id,
            cancel_grace_s=self.start.timing.cancel_grace_s,
            passed_over=self._passed_over,
            tenant=self.start.tenant,
            tenant_weight=self.start.tenant_weight,
        )
        cancellation = workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
        async with self.device():
            return await on_leased_host(RunJob.run_job, request, grant, self.start.timing, policies.ONCE, cancellation)


def _accepted(result: JobResult) -> JobResult:
    match result.outcome:
        case "succeeded":
            return result
        case "cancelled":
            raise RunCancelled
        case "failed":
            problem = result.problem
            assert problem is not None
            if result.damaged is not None:
                raise Damaged(result.damaged)
            if problem.kind in policies.FINAL_KINDS:
                raise RunFailed(problem)
            raise Lost(problem.message, problem.kind)


# --- A run of any kind ---
# Its status and Temporal handlers, its pause and cancellation, its beginning and its end.

Result = TypeVar("Result")

_MOST_SPANS = 64
_OF_CRITICS = 500_000  # a run has fewer leases
_RECORDED_TOGETHER = timedelta(seconds=1)
# Fields of the status that a resumed run keeps from before until it has newer values.
_KEPT_WHEN_RESUMED = (
    *("started_at", "step", "num_steps", "planned_tokens", "metrics", "checkpoint", "dataset_report"),
    *("adapter", "adapter_sha256", "name", "version", "policy_version"),
    *("notices", *STEP_COUNTS),
)


StatusChanges = dict[str, Any]
"""Fields of a RunStatus that change during a run."""


def version_shown(published: Published) -> StatusChanges:
    """Return what the status shows of a published version."""
    named = {"name": published.name, "version": published.version}
    return {"adapter": published.uri, "adapter_sha256": published.sha256, **named}


def changed(status: RunStatus, **changes: Any) -> RunStatus:
    """Return a copy of a status with some fields changed."""
    assert changes.keys() <= RunStatus.model_fields.keys()
    return status.model_copy(update=changes)


class ShownRun(Protocol):
    """A run in progress, of a workflow or of this process: what users see of it, and its tenant's room."""

    @property
    def status(self) -> RunStatus: ...

    @property
    def room(self) -> Room: ...

    def show(self, **changes: Any) -> object: ...

    def add_notices(self, notices: tuple[str, ...]) -> None: ...


class ActiveRun:
    """A run in progress: the status as its workflow set it last, its phases, and its jobs on leased workers.

    Args:
        state: at the end of the execution that this one continues, if it continues one.
        current: returns the status, updated by the state of the run's jobs and leases.
        holds: keep the worker between jobs.
    """

    def __init__(
        self,
        start: AnyStart,
        current: Callable[[], RunStatus],
        state: RLState | SessionState | None = None,
        holds: bool = False,
    ) -> None:
        before = state.status if state else None
        self.start = start
        self.status = before or _first_status(start)
        self.current = current
        self.room = start.room
        self.training = Training(start, lambda: self.is_ending, self._note, holds=holds)
        self.training.leasing.epoch = state.epoch if state else 0
        self.training.is_tracked = self.training.leasing.epoch > 0
        of_critic = start.model_copy(update={"run_id": start.run_id + CRITIC})
        self._critic = Training(
            of_critic, lambda: self.is_ending, self._note, holds, shares=False, is_tracked=True, first_epoch=_OF_CRITICS
        )
        self.is_pausing = False
        self._task: asyncio.Task[Any] | None = None
        self._has_begun = False
        self._timeline: tuple[PhaseSpan, ...] = before.timeline if before else ()
        self._gpu_seconds_before = before.gpu_seconds if before else 0.0
        self._workers_lost_before = before.workers_lost if before else 0
        self._noted: tuple[str, str, int] | None = None
        self._recorded: tuple[str, str, int] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._is_over = False
        self.problem_before: Problem | None = None  # of a resumed run: why it had ended

    @property
    def is_ending(self) -> bool:
        """True once a pause or a cancellation was asked for."""
        return self.is_pausing or workflow.cancellation_reason() is not None

    async def to_its_end(
        self, work: Callable[[], Awaitable[None]], leave: Callable[[], Awaitable[None]] | None = None
    ) -> RunStatus:
        """Begin the run, do its work, and record its end in the store and in its row, however it ends.

        Args:
            leave: releases what the run holds; called before the end is recorded.

        Raises:
            asyncio.CancelledError, ApplicationError: the run was cancelled, or failed.
        """
        try:
            await uninterrupted(self._begin())
            self._recording = asyncio.create_task(self._record_changes())
            await work()
        except (Exception, asyncio.CancelledError) as error:
            if not self._has_begun:  # no end is recorded: it would replace the one on record
                raise
            self.status = ended_early(self.status, error, self.is_pausing)
        if leave is not None:
            await leave()
        self.show(ended_at=workflow.now().timestamp())
        await control.record(RunRecords.record_result, self.current())
        if self._recording is not None:
            self._is_over = True
            await self._recording
        await control.record_run(self.current())
        await workflow.wait_condition(workflow.all_handlers_finished)
        return result_or_raise(self.current())

    @property
    def trainings(self) -> tuple[Training, Training]:
        """The run's jobs, and those of its critic if that has its own worker."""
        return self.training, self._critic

    def release(self) -> None:
        """Give back the run's workers."""
        for training in self.trainings:
            training.release()

    async def train_beside(self, plan: JobPlan) -> tuple[JobResult, JobResult]:
        """Do a step's job as two at once, the policy's and the critic's, each on its own worker.

        Neither needs the other. Whichever has ended gives its worker back if the other one waits for any: then both
        can be done on one device, and no two runs wait for each other's.

        Raises as `Training.do`, once neither is in progress. The critic's part of a failed step counts for nothing.
        """
        both = [asyncio.create_task(t.do(p)) for t, p in zip(self.trainings, job_plan.beside(plan), strict=True)]

        def unused() -> list[Training]:
            pairs = zip(both, self.trainings, reversed(self.trainings), strict=True)
            return [own for task, own, other in pairs if task.done() and own.is_idle and not other.leasing.is_warm]

        async def give_way() -> None:
            while True:
                await workflow.wait_condition(lambda: bool(unused()))
                for training in unused():
                    training.release()

        giving_way = asyncio.create_task(give_way())
        try:
            policy, critic = await asyncio.gather(*both)
        except (Exception, asyncio.CancelledError):
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            self._critic.release()
            raise
        finally:
            giving_way.cancel()
        for training in unused():  # so that the next step's jobs can be done one after the other, too
            training.release()
        return policy, critic

    async def move_on(self, state: RLState | SessionState | None, own: Callable[[], dict[str, object]]) -> NoReturn:
        """Continue as a new execution with an empty history, when the handlers of this one have finished.

        `own`: returns the fields of the state that have changed, by then.
        """
        await workflow.wait_condition(workflow.all_handlers_finished)
        self.check()
        assert state is not None
        same = {"epoch": self.training.leasing.epoch, "status": self.current()}
        changes = {"state": state.model_copy(update=same | own()), "resumed": False, "room": self.room}
        workflow.continue_as_new(self.start.model_copy(update=changes))

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

    def show(self, **changes: Any) -> None:
        """Change the run's status; if state, phase or lease changed, its timeline and its row too."""
        self.status = changed(self.status, **changes)
        self._note()

    def add_notices(self, notices: tuple[str, ...]) -> None:
        """Show the run's user notices, each once."""
        self.status = changed(self.status, notices=tuple(dict.fromkeys((*self.status.notices, *notices))))

    def with_jobs(self) -> RunStatus:
        """Return the status, updated with phase, notices, losses, timeline and GPU seconds of the jobs and leases."""
        status, training = self.status, self.training
        is_training = status.phase == "waiting_for_worker" and training.leasing.grant is not None
        held_s = sum(each.leasing.held_s for each in self.trainings)
        return status.model_copy(
            update={
                "phase": "training" if is_training else status.phase,
                "epoch": training.leasing.epoch,
                "notices": (*status.notices, *training.notices, *self._critic.notices),
                "workers_lost": self._workers_lost_before + sum(each.num_lost for each in self.trainings),
                "timeline": self._timeline,
                "gpu_seconds": self._gpu_seconds_before + held_s * self.start.run.layout.world_size,
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

    async def _record_changes(self) -> None:
        """Record the status when state, phase or lease have changed, until the run is over.

        Changes that follow each other within a second are recorded together, as phases before the training are short.
        """
        while not self._is_over:
            self._recorded = self._noted
            self.room = await control.record_run(self.current()) or self.room
            # The end is recorded by `to_its_end`, once its result is in the store.
            await workflow.wait_condition(
                lambda: self._is_over or (self._noted != self._recorded and self.status.state == "running")
            )
            with suppress(TimeoutError):
                await workflow.wait_condition(lambda: self._is_over, timeout=_RECORDED_TOGETHER)

    def _note(self) -> None:
        """Put the phase on the timeline, if state, phase or lease changed. `_record_changes` looks at that."""
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
        for training in self._run.trainings:
            training.leased(grant)

    @workflow.signal
    def gathers(self, leader: GangLeader) -> None:
        """Take a host's signal that it has the first part of a worker of several machines."""
        self._run.training.leasing.gathers(leader)

    @workflow.signal
    async def gang_turn(self, turn: Turn) -> None:
        """Take the signal that this run may gather the hosts of such a worker."""
        if (turns := self._run.training.leasing.turns) is not None:
            await turns.given(turn)

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
        for training in self._run.trainings:
            training.progress(report)


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
