"""A run's jobs on leased workers. A lost worker is replaced, and the job continues from its newest checkpoint."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import LeaseRequest
    from activities.hosts.progress import ProgressReport
    from activities.hosts.run_job import JobResult, RunJob, RunJobRequest
    from activities.records.checkpoints import FindCheckpoint, FindCheckpointRequest, saved_by_job
    from longshore.training import Lora
    from shared.errors import AVOIDED, HostLeft, WorkerLost
    from shared.jobs.job import AnyPlan
    from shared.jobs.leases import GangLeader, LeaseGrant, WorkerKey
    from shared.runs.start import AnyStart
    from shared.runs.status import CheckpointRef, Problem
    from workflows import control, policies
    from workflows.leases.gang_turns import Turn, Turns
    from workflows.leases.leasing import Leasing, Lost, lost, on_leased_host
    from workflows.outcomes import RunCancelled, RunFailed
    from workflows.services.single_activity import track


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

    def gathers(self, leader: GangLeader) -> None:
        """Take the signal from the first host of a worker of several machines: the other hosts may join."""
        self.leasing.gathers(leader)

    async def has_turn(self, turn: Turn) -> None:
        """Take the signal that this run has the lock for gathering hosts."""
        if self.leasing.turns is not None:
            await self.leasing.turns.given(turn)

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
        num_crowded = num_avoided = num_ungathered = 0
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
                if loss.kind == policies.CROWDED and num_crowded < 2:
                    num_crowded += 1
                    continue
                if loss.kind in (AVOIDED, policies.NOT_GATHERED):
                    num_avoided += loss.kind == AVOIDED
                    num_ungathered += loss.kind == policies.NOT_GATHERED
                    if num_ungathered >= policies.MAX_GATHERINGS:  # each is some 40 events of the run's history
                        raise RunFailed(
                            Problem(kind="worker_lost", message=f"{loss}, {num_ungathered} times")
                        ) from loss
                    await workflow.sleep(policies.pause_before_lease(num_avoided + 1))
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
        self._last_epoch = max(self.leasing.epoch, point.last_epoch)
        self.step = self._begun_step = self._found.step if self._found else plan.first_step
        return self.step > step_before

    async def _lease_and_run(self, plan: AnyPlan, shares: bool, joins: bool) -> JobResult:
        keep, grant = False, None
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
            raise self._noted(self.leasing.failure or loss, grant) from error
        except Lost as loss:  # its job has failed
            raise self._noted(loss, grant) from loss
        finally:
            if not keep:
                self.release()

    def _noted(self, loss: Lost, grant: LeaseGrant | None) -> Lost:
        """Make the run avoid the host of a worker that was lost before a step was done."""
        if grant is not None and self.step <= self._begun_step:
            self.leasing.lost_at_start(loss, grant)
        return loss

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
            avoid=self.leasing.avoid,
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
