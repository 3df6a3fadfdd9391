"""A run's jobs on leased workers. A worker that is lost is replaced, and the job goes on from its newest checkpoint."""

from dataclasses import dataclass, field

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.checkpoints import own
    from activities.find_checkpoint import FindCheckpointRequest, ResumePoint
    from activities.lease import LeaseGrant, LeaseRequest
    from activities.progress import ProgressReport
    from activities.run_job import JobRequest, JobResult
    from shared.jobs import JobPlan
    from shared.leases import WorkerKey
    from shared.runs import CheckpointRef, Problem, Start
    from workflows import policies
    from workflows.outcomes import RunCancelled, RunFailed, is_final, problem_of, was_cancelled


class _Lost(Exception):
    """This lease came to nothing; another may do better."""


@dataclass
class Training:
    """What a workflow knows of its leases. Signals of a fence that is not the current one change nothing.

    `holds`: a worker that did its job well is kept for the next one, until `release`.
    """

    start: Start
    holds: bool = False
    epoch: int = 0
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    _found: CheckpointRef | None = None
    _last_epoch: int = 0
    _grant: LeaseGrant | None = None
    _lease: workflow.ActivityHandle[None] | None = None

    @property
    def is_leased(self) -> bool:
        return self._grant is not None

    def leased(self, grant: LeaseGrant) -> None:
        if grant.fence.epoch == self.epoch:
            self._grant = grant

    def progress(self, report: ProgressReport) -> None:
        if self._grant is not None and report.fence == self._grant.fence and report.step >= self.step:
            self._note(report)

    def _note(self, news: ProgressReport | JobResult) -> None:
        self.step = news.step
        self.metrics = self.metrics | news.metrics
        self.checkpoint = news.checkpoint or self.checkpoint

    async def do(self, plan: JobPlan) -> JobResult:
        """Do a job to its end, over as many leases as it takes while it gets ahead.

        Raises:
            RunFailed: the job cannot be done, or too many workers in a row were lost without a new checkpoint.
            RunCancelled: the worker ended the job because it was asked to, or was lost after that.
        """
        losses: list[str] = []
        self._found = None
        while True:
            if not self._is_warm and await self._find_checkpoint(plan):
                losses.clear()
            if len(losses) >= self.start.timing.max_losses:
                raise RunFailed(Problem(kind="worker_lost", message=_gave_up(losses)))
            if pause := policies.pause_before_lease(len(losses)):
                await workflow.sleep(pause)
            try:
                return await self._lease_and_run(plan)
            except _Lost as loss:
                if workflow.cancellation_reason() is not None:
                    raise RunCancelled from loss  # the worker that was to end in good order went down instead
                losses.append(str(loss))
                workflow.logger.warning("lease %d came to nothing: %s", self.epoch, loss)

    def release(self) -> None:
        """Give the worker back, if there is one. Its host hears of it with its next beat; nothing waits for that."""
        if self._lease is not None:
            _release(self._lease)
        self._grant = self._lease = None

    @property
    def _is_warm(self) -> bool:
        """Whether a worker stands by for the next job."""
        return self._grant is not None and self._lease is not None and not self._lease.done()

    async def _find_checkpoint(self, plan: JobPlan) -> bool:
        """Look where to go on from, and above which epoch. True when the run got ahead since the last look."""
        point: ResumePoint = await workflow.execute_activity(
            "find_checkpoint",
            FindCheckpointRequest(run_id=self.start.run_id),
            result_type=ResumePoint,
            start_to_close_timeout=policies.RECORD_TIMEOUT,
            retry_policy=policies.PATIENT,
        )
        step_before = self._found.step if self._found else plan.first_step
        self._found = self.checkpoint = own(plan, point.checkpoint)
        self._last_epoch = max(self.epoch, point.last_epoch)
        self.step = self._found.step if self._found else plan.first_step
        return self.step > step_before

    async def _lease_and_run(self, plan: JobPlan) -> JobResult:
        keep = False
        try:
            lease = self._lease if self._is_warm and self._lease is not None else self._take_lease(plan)
            grant = await self._granted(lease)
            result = await self._run_job(plan, grant)
            self._note(result)
            accepted = _accepted(result)
            keep = self.holds
            return accepted
        except ActivityError as error:
            if was_cancelled(error):
                raise
            if is_final(error):
                raise RunFailed(problem_of(error)) from error
            raise _Lost(problem_of(error).message) from error
        finally:
            if not keep:
                self.release()

    def _take_lease(self, plan: JobPlan) -> workflow.ActivityHandle[None]:
        self.release()
        self.epoch = self._last_epoch + 1
        self._lease = workflow.start_activity(
            "lease",
            LeaseRequest(
                run_id=self.start.run_id,
                epoch=self.epoch,
                key=WorkerKey.of(plan),
                ready_timeout_s=policies.WORKER_READY_TIMEOUT_S,
            ),
            task_queue=policies.lease_queue(self.start.shape),
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(self.start.timing),
            retry_policy=policies.ONCE,
        )
        return self._lease

    async def _granted(self, lease: workflow.ActivityHandle[None]) -> LeaseGrant:
        await workflow.wait_condition(lambda: self._grant is not None or lease.done())
        if self._grant is None:
            await lease
            raise _Lost("the lease ended before a worker was up")
        return self._grant

    async def _run_job(self, plan: JobPlan, grant: LeaseGrant) -> JobResult:
        timing = self.start.timing
        return await workflow.execute_activity(
            "run_job",
            JobRequest(
                plan=plan,
                fence=grant.fence,
                worker_id=grant.worker_id,
                cancel_grace_s=timing.cancel_grace_s,
            ),
            result_type=JobResult,
            task_queue=grant.host_queue,
            schedule_to_start_timeout=policies.pickup_timeout(timing),
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(timing),
            retry_policy=policies.ONCE,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )


def _accepted(result: JobResult) -> JobResult:
    match result.outcome:
        case "succeeded":
            return result
        case "cancelled":
            raise RunCancelled
        case "failed":
            problem = result.problem
            assert problem is not None
            if problem.kind in policies.FINAL_KINDS:
                raise RunFailed(problem)
            raise _Lost(problem.message)


def _release(lease: workflow.ActivityHandle[None]) -> None:
    if not lease.done():
        lease.cancel()
    elif not lease.cancelled():
        lease.exception()  # taken note of, or asyncio complains that nobody did


def _gave_up(losses: list[str]) -> str:
    times = "once" if len(losses) == 1 else f"{len(losses)} times in a row"
    return f"the worker was lost {times} without a new checkpoint; the last time: {losses[-1]}"
