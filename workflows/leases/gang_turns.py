"""A lock for leases of several hosts: one run at a time gathers its hosts, so that no two runs deadlock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from longshore.fields import Frozen
    from workflows import policies

_SLACK_S = 60.0  # beyond a turn's time, for a run that was terminated in it
# A waiting run asks again at this interval: if somebody terminates the workflow below, its queue of runs is lost.
_ASK_AGAIN_S = 600.0


class Turn(Frozen):
    """A run's request for the lock. `turn_id` is unique. `patience_s`: the most seconds that it holds the lock."""

    workflow_id: str
    turn_id: str
    patience_s: float


@workflow.defn(versioning_behavior=policies.MOVES)
class GangTurnsWorkflow:
    """Gives runs the lock, first come first served, and ends when none waits. There is one for each queue of hosts."""

    @workflow.init
    def __init__(self, waiting: tuple[Turn, ...]) -> None:
        self._waiting = list(waiting)
        self._current: Turn | None = None

    @workflow.run
    async def run(self, waiting: tuple[Turn, ...]) -> None:
        while self._waiting:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(tuple(self._waiting))
            turn = self._current = self._waiting.pop(0)
            with suppress(ApplicationError):  # the run has ended
                await workflow.get_external_workflow_handle(turn.workflow_id).signal("gang_turn", turn)
                with suppress(TimeoutError):
                    await workflow.wait_condition(
                        lambda: self._current is None, timeout=timedelta(seconds=turn.patience_s + _SLACK_S)
                    )
            self._current = None

    @workflow.signal
    def ask(self, turn: Turn) -> None:
        """Ask for the lock."""
        if turn not in self._waiting and turn != self._current:
            self._waiting.append(turn)

    @workflow.signal
    def leave(self, turn: Turn) -> None:
        """Release the lock, or withdraw the request for it."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn == self._current:
            self._current = None


class Turns:
    """One run's turns for a queue of hosts."""

    def __init__(self, queue: str) -> None:
        self._id = f"gangs-{queue}"
        self._wanted: Turn | None = None
        self._has_turn = False

    async def given(self, turn: Turn) -> None:
        """Take the signal that this run has the lock. If it no longer waits for it, release the lock at once."""
        if turn == self._wanted:
            self._has_turn = True
        else:
            await self._leave(turn)

    @asynccontextmanager
    async def turn(self, patience_s: float) -> AsyncIterator[None]:
        """Hold the lock within a `with` block, after waiting for it."""
        turn_id = str(workflow.uuid4())
        turn = Turn(workflow_id=workflow.info().workflow_id, turn_id=turn_id, patience_s=patience_s)
        self._wanted, self._has_turn = turn, False
        try:
            while not self._has_turn:
                await self._ask(turn)
                with suppress(TimeoutError):
                    await workflow.wait_condition(lambda: self._has_turn, timeout=timedelta(seconds=_ASK_AGAIN_S))
            yield
        finally:
            self._wanted = None
            if workflow.in_workflow():  # else it was evicted from the host's memory
                await self._leave(turn)

    async def _leave(self, turn: Turn) -> None:
        with suppress(ApplicationError):  # the workflow has ended: no run waits for the lock or has it
            await workflow.get_external_workflow_handle(self._id).signal(GangTurnsWorkflow.leave, turn)

    async def _ask(self, turn: Turn) -> None:
        while True:
            try:
                await workflow.start_child_workflow(
                    GangTurnsWorkflow.run,
                    (turn,),
                    id=self._id,
                    # All runs share it: neither this run's end nor its cancellation may end it.
                    cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                    parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                )
                return
            except WorkflowAlreadyStartedError:
                with suppress(ApplicationError):  # it has just ended
                    await workflow.get_external_workflow_handle(self._id).signal(GangTurnsWorkflow.ask, turn)
                    return
