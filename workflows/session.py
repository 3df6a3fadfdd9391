"""A session: the commands of a client, in the order of their numbers, on workers that are leased while some come."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import NoReturn

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.session import Applied, ApplyCommands, ApplyRequest
    from activities.records.commands import CommandRecordRequest, CommandRecords, RecoverCommandsRequest
    from shared.contract import Artifact
    from shared.jobs.commands import CommandResult
    from shared.jobs.job import SessionPlan
    from shared.jobs.leases import LeaseGrant
    from shared.runs.sessions import CommandRef, CommandStatus, SessionState
    from shared.runs.start import SessionStart
    from shared.runs.status import RunStatus
    from workflows import control, policies
    from workflows.outcomes import RunCancelled, RunFailed, is_final, problem_of, was_cancelled
    from workflows.training import models
    from workflows.training.commands import Commands
    from workflows.training.job_plan import ONLY_JOB
    from workflows.training.run import ActiveRun, RunHandlers, changed

# A call of which nobody hears whether it came to anything, while its session's job goes on.
_APPLY_RETRY = RetryPolicy(
    maximum_interval=timedelta(seconds=5), maximum_attempts=5, non_retryable_error_types=policies.FINAL_ERRORS
)
_LOSS_IS_KNOWN_S = 30.0
_GRACE_S = 1.0


@workflow.defn
class SessionWorkflow(RunHandlers):
    """One session. Its state is what the last command left; every command is in the store before it is known here."""

    @workflow.init
    def __init__(self, start: SessionStart) -> None:
        before = start.state
        self._start = start
        self._state = before
        self._commands = Commands(before)
        self._run = ActiveRun(start, self._current, before.status if before else None)
        self._training = self._run.training
        self._training.leasing.epoch = before.epoch if before else 0
        self._training.is_tracked = self._training.leasing.epoch > 0
        self._training.is_ending = lambda: self._run.is_ending or self._is_giving_back
        self._is_giving_back = False
        self._wanted_epoch: int | None = None
        self._fed_epoch = 0  # the lease whose worker has, or has done, every command so far

    @workflow.run
    async def run(self, start: SessionStart) -> RunStatus:
        return await self._run.to_its_end(self._serve_and_finish)

    async def _serve_and_finish(self) -> None:
        if not await self._run.interruptible(self._serve()):
            await self._move_on()
        self._run.show(state="succeeded", phase="done")

    async def _serve(self) -> bool:
        """Do commands until the session is closed. False when this execution's history is long enough."""
        if self._state is None:
            self._state = await self._prepare()
        while not self._is_long():
            if self._commands.is_ready:
                await self._hold_worker(self._state)
            elif self._commands.is_closing:
                return True
            else:
                self._run.show(phase="waiting_for_commands")
                await self._wait_for_command(None)
        return False

    async def _prepare(self) -> SessionState:
        """Check model and adapter; a resumed session finds its commands in the store."""
        self._run.show(phase="checking")
        resolved = await models.resolve_model(self._start)
        adapter = await models.resolve_initial_adapter(self._start, resolved.shape)
        state = SessionState(model=resolved.model, shape=resolved.shape, adapter=adapter, status=self._run.status)
        if self._start.resumed:
            request = RecoverCommandsRequest(run_id=self._start.run_id)
            found = await control.do(CommandRecords.recover_commands, request)
            update = {"next": found.next, "commands": found.commands, "saved": found.saved}
            self._commands = Commands(state.model_copy(update=update))
        return state

    async def _wait_for_command(self, idle_s: float | None) -> bool:
        """Wait until the next command is there, or the session is closed. False when it is time to give back."""
        since, is_holding = workflow.time(), idle_s is not None
        while not (self._commands.is_ready or self._commands.is_closing):
            now, gap_s = workflow.time(), self._start.run.gap_s
            gap_left_s = self._commands.gap_left_s(now, gap_s)
            idle_left_s = None if idle_s is None else max(0.0, since + idle_s - now)
            has_news = partial(self._has_news, gap_left_s is not None, is_holding)
            wait_s = min((left for left in (gap_left_s, idle_left_s) if left is not None), default=None)
            try:
                await workflow.wait_condition(has_news, timeout=None if wait_s is None else timedelta(seconds=wait_s))
            except TimeoutError:
                if gap_left_s is None or gap_left_s != wait_s:
                    return False
                self._commands.give_up_gap(gap_s)
            if idle_s is not None and self._is_wanted():
                idle_s, self._wanted_epoch = min(idle_s, workflow.time() - since + _GRACE_S), None
        return True

    def _has_news(self, had_gap: bool, is_holding: bool) -> bool:
        commands = self._commands
        has_gap = commands.gap_left_s(0.0, 0.0) is not None
        return commands.is_ready or commands.is_closing or has_gap != had_gap or (is_holding and self._is_wanted())

    # On a worker.

    async def _hold_worker(self, state: SessionState) -> None:
        """Lease a worker and do commands on it, until there are none for a while; then have the state saved.

        Raises:
            RunFailed: the session cannot go on.
        """
        self._run.show(phase="waiting_for_worker")
        self._is_giving_back = False
        job = asyncio.create_task(self._training.do(self._plan(state)))
        feeding = asyncio.create_task(self._feed())
        cancelled: asyncio.CancelledError | None = None
        try:
            await workflow.wait([job, feeding], return_when=asyncio.FIRST_COMPLETED)
            self._is_giving_back = feeding.done()
        except (
            asyncio.CancelledError
        ) as raised:  # not `finally`: an execution that leaves a host's memory must not wait
            cancelled = raised
        feeding.cancel()
        job.cancel()
        await workflow.wait([job, feeding])
        self._commands.saved_at(self._training.checkpoint)
        if cancelled is not None:
            raise cancelled
        errors = [None if task.cancelled() else task.exception() for task in (feeding, job)]
        for error in errors:
            if error is not None and not (self._is_giving_back and isinstance(error, RunCancelled)):
                raise error

    def _plan(self, state: SessionState) -> SessionPlan:
        run = self._start.run
        return SessionPlan(
            run_id=self._start.run_id,
            job_id=ONLY_JOB,
            model=state.model,
            engine=run.engine,
            layout=run.layout,
            dtype=run.dtype,
            threads_per_rank=self._start.threads_per_rank,
            trainable=run.trainable,
            initial_adapter=state.adapter,
            seed=run.seed,
            max_tokens=run.max_tokens,
            save_after_s=run.save_after_s,
        )

    async def _feed(self) -> None:
        """Give the worker commands as they come, and another one the same after a loss. Ends when none come.

        Raises:
            RunFailed: a command cannot be had.
        """
        lost_epoch = 0
        while not self._is_long():
            if not await self._wait_for_command(self._start.run.idle_s) or not self._commands.is_ready:
                return
            await workflow.wait_condition(partial(self._grant_after, lost_epoch))  # type: ignore[arg-type]
            grant = self._grant_after(lost_epoch)
            assert grant is not None
            try:
                await self._apply(grant)
            except ActivityError as error:
                if was_cancelled(error):
                    raise
                if is_final(error):
                    raise RunFailed(problem_of(error)) from error
                lost_epoch = grant.fence.epoch
                try:  # the session's job finds out as well
                    is_known = partial(self._is_leased_after, lost_epoch)
                    await workflow.wait_condition(is_known, timeout=timedelta(seconds=_LOSS_IS_KNOWN_S))
                except TimeoutError:
                    return

    def _is_leased_after(self, epoch: int) -> bool:
        return self._training.leasing.epoch > epoch

    def _grant_after(self, epoch: int) -> LeaseGrant | None:
        grant = self._training.leasing.grant
        return grant if grant is not None and grant.fence.epoch > epoch else None

    async def _apply(self, grant: LeaseGrant) -> None:
        """Have a batch of commands done; publish what the last one asks for. Raises ActivityError."""
        self._commands.saved_at(self._training.checkpoint)
        ready, is_first = self._commands.ready(), grant.fence.epoch != self._fed_epoch
        request = ApplyRequest(
            run_id=self._start.run_id,
            job_id=ONLY_JOB,
            fence=grant.fence,
            worker_id=grant.worker_id,
            commands=(*self._commands.done_before(), *ready) if is_first else ready,
            first=self._commands.next,
        )
        timing = self._start.timing
        applied = await workflow.execute_activity_method(
            ApplyCommands.apply_commands,
            request,
            task_queue=grant.host_queue,
            schedule_to_start_timeout=policies.pickup_timeout(timing),
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(timing),
            retry_policy=_APPLY_RETRY,
        )
        self._fed_epoch, last = grant.fence.epoch, ready[-1]
        if last.publish:
            await self._publish(last, applied)
        self._commands.done(last.number, applied.failed, workflow.time())
        self._commands.saved_at(applied.checkpoint)

    async def _publish(self, command: CommandRef, applied: Applied) -> None:
        """Publish the state that a command saved, and put its result on record."""
        if applied.checkpoint is None:  # it failed, and its result stands
            return
        assert self._state is not None
        published = await models.publish(
            self._start, self._state.model, applied.checkpoint, None, self._training.metrics, command.number
        )
        self._run.show(
            adapter=published.uri, adapter_sha256=published.sha256, name=published.name, version=published.version
        )
        result = CommandResult(
            number=command.number,
            kind=command.kind,
            step=applied.checkpoint.step,
            adapter=Artifact(uri=published.uri, sha256=published.sha256),
            version=published.version,
        )
        request = CommandRecordRequest(run_id=self._start.run_id, command=command, result=result)
        await control.record(CommandRecords.record_command, request)

    def _is_long(self) -> bool:
        return workflow.info().is_continue_as_new_suggested()

    async def _move_on(self) -> NoReturn:
        """Continue as a new execution with an empty history."""
        await workflow.wait_condition(workflow.all_handlers_finished)
        self._run.check()
        assert self._state is not None
        state = self._state.model_copy(
            update={
                "next": self._commands.next,
                "commands": self._commands.known(),
                "saved": self._commands.saved,
                "closing": self._commands.is_closing,
                "epoch": self._training.leasing.epoch,
                "status": self._current(),
            }
        )
        workflow.continue_as_new(self._start.model_copy(update={"state": state, "resumed": False}))

    # What others say and ask.

    @workflow.update
    async def command(self, ref: CommandRef) -> CommandStatus:
        """Take a command in, which is in the store. The same one twice is the same command."""
        await workflow.wait_condition(lambda: self._state is not None or self._has_ended())
        self._check_command(ref)
        return self._commands.take(ref, workflow.time())

    @command.validator
    def _check_command(self, ref: CommandRef) -> None:
        self._commands.check(ref, self._run.status.state != "running" or self._has_ended())

    @workflow.update
    async def finish(self) -> RunStatus:
        """Take no more commands, and end well after those that wait."""
        self._commands.is_closing = True
        return self._current()

    @workflow.query
    def command_status(self, number: int) -> CommandStatus:
        """Say where a command is."""
        return self._commands.status(number)

    @workflow.signal
    def make_room(self) -> None:
        """Give the worker back as soon as no command waits: another run waits for it."""
        self._wanted_epoch = self._training.leasing.epoch

    def _is_wanted(self) -> bool:
        return self._wanted_epoch == self._training.leasing.epoch

    def _has_ended(self) -> bool:
        return self._run.status.ended_at is not None

    def _current(self) -> RunStatus:
        status, known, training = self._run.with_jobs(), self._run.status, self._training
        return changed(
            status,
            step=max(known.step, self._commands.next - 1),
            metrics=known.metrics | training.metrics,
            checkpoint=training.checkpoint or status.checkpoint,
        )
