"""Serve users' questions to one model: lease a sampler when a question comes, give it back after an idle time."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from shared.errors import AVOIDED
    from shared.jobs.leases import LeaseGrant
    from shared.runs.status import Problem
    from shared.serving import ServeRequest, ServingStart
    from workflows import policies
    from workflows.leases.leasing import Leasing, Lost, lost
    from workflows.outcomes import RunFailed

# Temporal allows 2,000 updates per execution. After half of them this one ends, and the next question starts another.
_MAX_ASKED = 1000
_ROOM_S = 15.0  # longer than a service uses a lease without asking this workflow again
_MAX_LOSSES = 3  # samplers that may fail before a waiting question is refused


@workflow.defn(versioning_behavior=policies.MOVES)
class ServingWorkflow:
    """Leases a sampler of one model while questions come, one lease at a time.

    When a sampler is lost, the questions that it was answering fail, and the service asks them again.
    """

    @workflow.init
    def __init__(self, start: ServingStart) -> None:
        self._start = start
        self._leasing = Leasing(policies.sampler_queue(start.shape), start.timing)
        self._num_asked = 0
        self._num_waiting = 0
        self._num_lost = 0
        self._num_lost_in_a_row = 0
        self._problem: Problem | None = None  # why the last sampler failed
        self._is_hopeless = False  # another sampler would fail in the same way
        self._is_over = False
        self._idle_s = start.idle_s
        self._leased_at = 0.0
        self._due_at: float | None = None  # when this sampler is given back, even if there are questions

    @workflow.run
    async def run(self, start: ServingStart) -> None:
        while await self._is_wanted():
            try:
                await self._lease_once()
            except RunFailed as failure:
                self._note(failure.problem, is_hopeless=True)
            except Lost as loss:
                self._note(Problem(kind="worker_lost", message=str(loss)), is_loss=loss.kind != AVOIDED)
            finally:
                self._leasing.release()
                self._due_at = None  # it was for the sampler that has been given back
        await workflow.wait_condition(workflow.all_handlers_finished)

    @workflow.update
    async def serve(self, request: ServeRequest) -> LeaseGrant:
        """Return the sampler's grant as soon as one is up; fail with the type of the problem otherwise."""
        self._num_asked += 1
        self._num_waiting += 1
        try:
            return await asyncio.wait_for(self._grant(self._num_lost), request.patience_s)
        except TimeoutError:
            why = f"; the last one: {self._problem.message}" if self._problem else ""
            text = f"no sampler host of shape {self._start.shape} had one up within {request.patience_s:g} s{why}"
            raise ApplicationError(text, type="sampler_unavailable") from None
        finally:
            self._num_waiting -= 1

    @workflow.signal
    def make_room(self) -> None:
        """Give the sampler back soon: a run or another model waits for one.

        If no question waits, that is after a shortened idle time; else when this model's share of the time is over.
        Later questions wait for the next sampler.
        """
        self._idle_s = min(_ROOM_S, self._start.idle_s / 6)
        if self._leasing.is_warm and self._due_at is None:
            self._due_at = max(workflow.time(), self._leased_at + self._start.share_s)

    @workflow.query
    def samplers(self) -> list[LeaseGrant]:
        """Return the sampler, if one is up."""
        grant = self._leasing.grant
        return [grant] if self._leasing.is_warm and grant is not None else []

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that the sampler is up."""
        self._leasing.granted(grant)

    async def _grant(self, lost_before: int) -> LeaseGrant:
        while True:
            await workflow.wait_condition(lambda: self._leasing.is_warm or self._is_given_up(lost_before))
            if self._leasing.is_warm and self._leasing.grant is not None:  # it may have been given back since
                return self._leasing.grant
            if self._is_given_up(lost_before) and self._problem is not None:
                raise ApplicationError(self._problem.message, type=self._problem.kind)

    async def _is_wanted(self) -> bool:
        """Wait until a question needs a sampler. Returns False if none comes within the idle time."""
        if pause := policies.pause_before_lease(self._num_lost_in_a_row):
            await workflow.sleep(pause)
        if self._is_over and not self._num_waiting:
            return False
        return await self._until(lambda: self._num_waiting > 0)

    async def _lease_once(self) -> None:
        """Hold a lease of one sampler until no more questions come, or this execution's history has become long.

        Raises Lost: it did not start, or was lost. RunFailed: another sampler would fail in the same way.
        """
        self._leasing.take_sampler(self._start.serving_id, self._start.key, self._leasing.epoch + 1)
        up = asyncio.create_task(self._leasing.wait())
        try:
            if not await self._until(up.done):
                up.cancel()
                self._is_over = True
                return
            await up
        except ActivityError as error:
            raise lost(error) from error
        self._num_lost_in_a_row = 0
        self._leased_at = workflow.time()
        await self._until(lambda: not self._leasing.is_warm or self._is_long or self._is_due)
        if not self._leasing.is_warm:
            raise Lost("the sampler was lost")
        self._is_over = True

    @property
    def _is_due(self) -> bool:
        return self._due_at is not None and workflow.time() >= self._due_at

    @property
    def _is_long(self) -> bool:
        return self._num_asked >= _MAX_ASKED and not self._num_waiting

    async def _until(self, happens: Callable[[], bool]) -> bool:
        """Wait until `happens()` is true. Returns False if no question waited for the whole idle time before that."""
        while not happens():
            before = self._num_asked, self._idle_s, self._due_at
            due_s = self._due_at - workflow.time() if self._due_at is not None else 0.0
            # A wait with a timeout of 0 would not yield. `happens` also checks whether the share is over, so no timer.
            left_s = min(self._idle_s, due_s) if due_s > 0 else self._idle_s
            try:
                await workflow.wait_condition(
                    lambda before=before: (  # type: ignore[misc]
                        happens() or (self._num_asked, self._idle_s, self._due_at) != before
                    ),
                    timeout=timedelta(seconds=left_s),
                )
            except TimeoutError:
                if self._num_asked == before[0] and not self._num_waiting:
                    return False
        return True

    def _note(self, problem: Problem, is_hopeless: bool = False, is_loss: bool = True) -> None:
        workflow.logger.warning("sampler lease %d came to nothing: %s", self._leasing.epoch, problem.message)
        self._num_lost_in_a_row += 1
        if is_loss:
            self._problem, self._is_hopeless = problem, is_hopeless
            self._num_lost += 1

    def _is_given_up(self, lost_before: int) -> bool:
        num_lost = self._num_lost - lost_before
        return num_lost >= _MAX_LOSSES or (num_lost > 0 and self._is_hopeless)
