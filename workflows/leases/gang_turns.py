"""A lock for leases of several hosts. Without it two runs could each hold half of the hosts and wait for ever."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from longshore.fields import Frozen
    from workflows import policies

_SLACK_S = 60.0  # beyond a turn's time, in case its run was terminated
# A waiting run asks again at this interval, because its place is lost if somebody terminates the workflow below.
_ASK_AGAIN_S = 600.0


class Turn(Frozen):
    """A run's request for the lock, with its own id. `patience_s`: the turn ends after that."""

    workflow_id: str
    turn_id: str
    patience_s: float


@workflow.defn(versioning_behavior=policies.MOVES)
class GangTurnsWorkflow:
    """Gives runs their turns in order of arrival, and ends when no run waits. One per lease queue."""

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
        """Add a turn to the end of the queue."""
        if turn not in self._waiting and turn != self._current:
            self._waiting.append(turn)

    @workflow.signal
    def leave(self, turn: Turn) -> None:
        """End a turn, or remove it from the queue."""
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
        """Handle the signal that a turn has come. A turn that the run no longer waits for is ended at once."""
        if turn == self._wanted:
            self._has_turn = True
        else:
            await self._leave(turn)

    @asynccontextmanager
    async def turn(self, patience_s: float) -> AsyncIterator[None]:
        """Wait for this run's turn, and keep it for the `with` block."""
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
        with suppress(ApplicationError):  # nobody waits, and nobody has a turn
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
