"""The workflow of a session: a client's commands are done in the order of their numbers, on leased workers."""

import asyncio
from datetime import timedelta
from functools import partial

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.session import AppliedCommands, ApplyCommands, ApplyRequest
    from activities.records import (
        CommandRecordRequest,
        CommandRecords,
        DropCommandsRequest,
        FillGapRequest,
        FindCommandsRequest,
    )
    from longshore.commands import CommandResult
    from longshore.fields import Artifact
    from longshore.views import CheckpointRef, RunStatus
    from shared.errors import HostLeft
    from shared.jobs.job import ONLY_JOB, LeaseGrant, SessionPlan
    from shared.runs.start import CommandArrived, SessionStart, SessionState
    from workflows import control, policies
    from workflows.leases import on_leased_host
    from workflows.outcomes import RunCancelled, RunFailed, is_final, problem_of_error, was_cancelled
    from workflows.training import job_plan
    from workflows.training.run import ActiveRun, ClientDrivenHandlers, changed, version_shown

# For `apply_commands`: repeating it during the same job of the session does no command twice.
_APPLY_RETRY = RetryPolicy(
    maximum_interval=timedelta(seconds=5),
    maximum_attempts=5,
    non_retryable_error_types=(*policies.FINAL_ERRORS, HostLeft.__name__),
)
_LOSS_IS_KNOWN_S = 30.0
_IDLE_CALL_S = 5.0  # after this long without a command a session with a worker is idle, and yields it to others
_MOST_AT_ONCE = 2000  # commands of one call: the workflow may continue as a new execution only between calls


@workflow.defn(versioning_behavior=policies.MOVES)
class SessionWorkflow(ClientDrivenHandlers):
    """One session. The service puts commands into the store, and the host of the session's worker reads them there.

    This workflow leases a worker while commands come, and drops commands that wait for one that never arrives.
    """

    @workflow.init
    def __init__(self, start: SessionStart) -> None:
        before = start.state
        self._start = start
        self._state = before
        self._next = before.next if before else 1
        self._waiting = set(before.waiting if before else ())
        self._is_closing = before is not None and before.closing
        self._gap_since: float | None = None
        self._run = ActiveRun(start, self._current, before)
        self._training = self._run.training
        self._training.is_ending = lambda: self._run.is_ending or self._is_giving_back
        self._is_giving_back = False
        self._is_idle = False

    @workflow.run
    async def run(self, start: SessionStart) -> RunStatus:
        return await self._run.to_its_end(self._serve_and_finish, self._drop_what_waits)

    async def _serve_and_finish(self) -> None:
        if not await self._run.interruptible(self._serve()):
            await self._run.move_on(self._state, self._moved)
        self._run.show(state="succeeded", phase="done")

    async def _drop_what_waits(self) -> None:
        problem = self._run.status.problem
        request = DropCommandsRequest(run_id=self._start.run_id, reason=problem and problem.message)
        await control.record(CommandRecords.drop_commands, request)

    async def _serve(self) -> bool:
        """Execute commands until the session is closed. Returns False if this execution's history is long enough."""
        if self._state is None:
            self._state = await self._prepare()
        while not self._is_long():
            if self._is_ready():
                await self._hold_worker(self._state)
            elif self._is_closing:
                return True
            else:
                self._run.show(phase="waiting_for_commands")
                await self._wait_for_command()
        return False

    async def _prepare(self) -> SessionState:
        """Check model and adapter; a resumed session finds its commands in the store."""
        self._run.show(phase="checking")
        resolved = await job_plan.resolve_model(self._start)
        adapter = await job_plan.resolve_initial_adapter(self._start, resolved)
        if self._start.resumed:
            found = await control.do(CommandRecords.find_commands, FindCommandsRequest(run_id=self._start.run_id))
            self._next, self._is_closing = found.next, found.closing
            self._waiting.update(found.waiting)
        return SessionState(model=resolved.model, shape=resolved.shape, adapter=adapter, status=self._run.status)

    async def _wait_for_command(self) -> None:
        """Wait until the next command has arrived or the session is closed.

        If later commands have arrived already, the wait is at most `gap_s` seconds; then they are dropped.
        """
        gap_left_s = self._gap_left_s()
        timeout = None if gap_left_s is None else timedelta(seconds=gap_left_s)
        had_gap = gap_left_s is not None
        try:
            await workflow.wait_condition(
                lambda: self._is_ready() or self._is_closing or had_gap != bool(self._waiting), timeout=timeout
            )
        except TimeoutError:
            await self._fill_gap()

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._is_closing

    def _is_ready(self) -> bool:
        return self._next in self._waiting

    def _gap_left_s(self) -> float | None:
        """Return for how many seconds later commands still wait for a missing one; None if none is missing."""
        if self._is_ready() or not self._waiting:
            self._gap_since = None
            return None
        now = workflow.time()
        self._gap_since = self._gap_since or now
        return max(0.0, self._gap_since + self._start.run.gap_s - now)

    async def _fill_gap(self) -> None:
        """Drop the commands that wait for one that never came."""
        number, through = self._next, max(self._waiting)
        request = FillGapRequest(
            run_id=self._start.run_id, number=number, through=through, patience_s=self._start.run.gap_s
        )
        if await control.do(CommandRecords.fill_gap, request, policies.RECORD_RETRY, policies.RECORD_TIMEOUT):
            self._go_to(through + 1)
        else:
            self._waiting.add(number)

    # On a worker.

    async def _hold_worker(self, state: SessionState) -> None:
        """Lease a worker and execute commands on it until none come for a while; then save the state.

        Raises RunFailed: the session cannot continue.
        """
        self._run.show(phase="waiting_for_worker")
        self._is_giving_back = False
        job = asyncio.create_task(self._training.do(self._plan(state)))
        feeding = asyncio.create_task(self._feed())
        cancelled: asyncio.CancelledError | None = None
        try:
            await workflow.wait([job, feeding], return_when=asyncio.FIRST_COMPLETED)
            self._is_giving_back = feeding.done()
        # Not `finally`: an execution that leaves a host's memory must not wait.
        except asyncio.CancelledError as raised:
            cancelled = raised
        feeding.cancel()
        job.cancel()
        await workflow.wait([job, feeding])
        if cancelled is not None:
            raise cancelled
        errors = [None if task.cancelled() else task.exception() for task in (feeding, job)]
        for error in errors:
            if error is not None and not (self._is_giving_back and isinstance(error, RunCancelled)):
                raise error

    def _plan(self, state: SessionState) -> SessionPlan:
        run = self._start.run
        return SessionPlan(
            **job_plan.worker_plan(self._start, state.model),
            job_id=ONLY_JOB,
            initial_adapter=state.adapter,
            max_tokens=run.max_tokens,
            save_after_s=run.save_after_s,
            keep_states=run.keep_states,
        )

    async def _feed(self) -> None:
        """Execute commands as they come on the worker, or after a loss on the next one. Returns when no more come.

        Raises RunFailed: a command cannot be read.
        """
        lost_epoch, run, idle_since, self._is_idle = 0, self._start.run, workflow.time(), False
        while not self._is_long():
            await workflow.wait_condition(partial(self._grant_after, lost_epoch))  # type: ignore[arg-type]
            grant = self._grant_after(lost_epoch)
            assert grant is not None
            try:
                applied = await self._apply(grant)
            except ActivityError as error:
                if was_cancelled(error):
                    raise
                if is_final(error):
                    raise RunFailed(problem_of_error(error)) from error
                lost_epoch = grant.fence.epoch
                try:  # wait for the session's job to notice the loss, and take a new lease
                    await workflow.wait_condition(
                        lambda lost_epoch=lost_epoch: self._training.leasing.epoch > lost_epoch,  # type: ignore[misc]
                        timeout=timedelta(seconds=_LOSS_IS_KNOWN_S),
                    )
                except TimeoutError:
                    return
                continue
            if applied.next > self._next:
                idle_since = workflow.time()
            self._go_to(applied.next)
            if applied.checkpoint is not None:
                await self._publish(applied.next - 1, applied.checkpoint)
            elif self._is_ready():
                continue
            elif self._gap_left_s() == 0:
                await self._fill_gap()
            elif self._is_closing or (
                applied.idle and (self._is_wanted() or workflow.time() >= idle_since + run.idle_s)
            ):
                return
            if applied.idle != self._is_idle:
                self._is_idle = applied.idle
                self._run.show(phase="waiting_for_commands" if applied.idle else "waiting_for_worker")

    def _grant_after(self, epoch: int) -> LeaseGrant | None:
        grant = self._training.leasing.grant
        return grant if grant is not None and grant.fence.epoch > epoch else None

    def _go_to(self, number: int) -> None:
        self._next = max(self._next, number)
        self._waiting = {each for each in self._waiting if each >= self._next}

    async def _apply(self, grant: LeaseGrant) -> AppliedCommands:
        """Execute commands until none come, or one asks to publish its state. Raises ActivityError."""
        request = ApplyRequest(
            run_id=self._start.run_id,
            job_id=ONLY_JOB,
            fence=grant.fence,
            worker_id=grant.worker_id,
            next=self._next,
            most=1 if self._is_idle else _MOST_AT_ONCE,  # return after one, to show that it is no longer idle
            idle_s=min(self._start.run.idle_s, self._start.run.gap_s, _IDLE_CALL_S),
            tenant=self._start.tenant,
        )
        return await on_leased_host(ApplyCommands.apply_commands, request, grant, self._start.timing, _APPLY_RETRY)

    async def _publish(self, number: int, checkpoint: CheckpointRef) -> None:
        """Publish the state that a command saved, and record the command's result."""
        assert self._state is not None
        about = self._state.model, checkpoint, None, self._training.metrics, number
        published = await job_plan.publish_weights(job_plan.publish_request(self._start, *about))
        self._run.show(**version_shown(published))
        result = CommandResult(
            number=number,
            kind="save_state",
            step=checkpoint.step,
            adapter=Artifact(uri=published.uri, sha256=published.sha256),
            version=published.version,
        )
        request = CommandRecordRequest(run_id=self._start.run_id, result=result)
        await control.record(CommandRecords.record_command, request)

    def _is_long(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    def _moved(self) -> dict[str, object]:
        return {"next": self._next, "waiting": tuple(sorted(self._waiting)), "closing": self._is_closing}

    # Updates and signals.

    @workflow.update
    async def command(self, sent: CommandArrived) -> None:
        """Note that commands have been put into the store. Repeating this has no effect."""
        await workflow.wait_condition(lambda: self._state is not None or self._has_ended())
        self._check_command(sent)
        self._waiting.update(number for number in (sent.number, *sent.also) if number >= self._next)

    @command.validator
    def _check_command(self, sent: CommandArrived) -> None:
        if all(number in self._waiting or number < self._next for number in (sent.number, *sent.also)):
            return
        # Also refused while the run is being paused, since its end would drop the command.
        is_over = self._is_closing or self._has_ended() or self._run.is_pausing
        if is_over or self._run.status.state != "running":
            raise ApplicationError("the session takes no more commands: it was closed, or has ended", type="Conflict")

    @workflow.update
    async def finish(self) -> RunStatus:
        """Accept no more commands; the session succeeds after those that wait."""
        self._is_closing = True
        return self._current()

    def _current(self) -> RunStatus:
        status, known, training = self._run.with_jobs(), self._run.status, self._training
        return changed(
            status,
            step=max(known.step, training.step, self._next - 1),
            metrics=known.metrics | training.metrics,
            checkpoint=training.checkpoint or status.checkpoint,
        )
