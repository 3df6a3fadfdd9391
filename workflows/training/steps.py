"""The train steps of an RL run as its workflow knows them: those that wait, and the last ones that ended."""

from collections.abc import Callable, Mapping
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from shared.runs.start import RLStart
    from shared.runs.status import Problem, RLState, StepRequest, StepStatus
    from workflows.training.run import ActiveRun

_GRACE_S = 1.0  # for the next step, if another run waits for the worker
_MAX_WAITING = 64  # further steps are refused, for the client to send again later
_REMEMBERED = 64  # ended steps that are kept here; the store has a record of every one
_ENDED_BEFORE = "the run ended before this step: send it again when {} resumed"


class StepQueue:
    """Steps in order of arrival.

    Attributes:
        next: the number of the next step that comes.
        is_finishing: no more steps are taken; the run succeeds after those that wait.
        is_moving_on: the run continues as a new execution: waiting clients ask again there.
    """

    def __init__(self, before: RLState | None) -> None:
        self._steps = {step.step: step for step in before.steps} if before else {}
        self.next = before.next_step if before else 1
        self.is_finishing = before is not None and before.finishing
        self.is_moving_on = False

    def take(self, key: str, groups: str, metrics: Mapping[str, float] | None = None) -> StepStatus:
        """Add a new step, which waits for those before it."""
        step = StepStatus(step=self.next, key=key, groups=groups, metrics=dict(metrics or {}))
        self.next += 1
        self._steps[step.step] = step
        return step

    def keep(self, step: StepStatus) -> None:
        """Replace a step's status, and drop the oldest ended steps."""
        self._steps[step.step] = step
        ended = [number for number, one in self._steps.items() if one.is_final]
        for number in ended[:-_REMEMBERED]:
            del self._steps[number]

    def first_waiting(self) -> StepStatus | None:
        return next((step for step in self._steps.values() if not step.is_final), None)

    def all(self) -> tuple[StepStatus, ...]:
        """Return the steps that wait, and the last ones that ended."""
        return tuple(self._steps.values())

    def get(self, number: int, has_ended: bool) -> StepStatus | None:
        """Return a step; None if it is not kept here. A step that was not done when the run ended has failed."""
        step = self._steps.get(number)
        if step is None or step.is_final or not has_ended:
            return step
        problem = Problem(kind="run_ended", message=_ENDED_BEFORE.format("the run was"))
        return step.model_copy(update={"state": "failed", "problem": problem})

    def check(self, request: StepRequest, makes_own: bool, is_running: bool) -> None:
        """Refuse a request for a step that cannot be taken. A request with a known step's key asks for that step.

        Raises:
            ApplicationError: the key was used for other groups, or no more steps are taken (at the moment).
        """
        known = self._of_key(request.key)
        if known is not None:
            if known.groups != request.groups:
                rule = f"this key was used for {known.groups}, which made step {known.step}"
                raise ApplicationError(rule, type="InvalidInput")
        elif makes_own:
            raise ApplicationError("the run makes its own groups: it takes none", type="Conflict")
        elif self.is_finishing or not is_running:
            raise ApplicationError("the run takes no more steps: it was finished, or has ended", type="Conflict")
        elif sum(not step.is_final for step in self._steps.values()) >= _MAX_WAITING:
            raise ApplicationError(f"{_MAX_WAITING} steps wait already: send the next one later", type="Conflict")

    async def answer(self, request: StepRequest, has_ended: Callable[[], bool]) -> StepStatus:
        """Take a step in, and return its status: at once, or when it has ended if `request.wait`.

        Raises:
            ApplicationError: the run ended first.
        """
        if self._of_key(request.key) is None:
            self.take(request.key, request.groups)

        def is_settled() -> bool:
            step = self._of_key(request.key)
            return self.is_moving_on or has_ended() or step is None or step.is_final

        if request.wait:
            await workflow.wait_condition(is_settled)
        found = self._of_key(request.key)
        if found is None or (request.wait and not found.is_final and not self.is_moving_on):
            raise ApplicationError(_ENDED_BEFORE.format("it was"), type="Conflict")
        return found

    async def wait(self, run: ActiveRun, is_wanted: Callable[[], bool]) -> None:
        """Wait for a step, or for `is_finishing`. A worker without a step is given back after `run.idle_s` seconds.

        Args:
            is_wanted: another run waits for the worker: it is given back soon.
        """

        def has_come() -> bool:
            return self.is_finishing or self.first_waiting() is not None

        if has_come():
            return
        run.show(phase="waiting_for_groups")
        assert isinstance(run.start, RLStart)
        idle_s = run.start.run.idle_s
        try:
            await workflow.wait_condition(lambda: has_come() or is_wanted(), timeout=timedelta(seconds=idle_s))
            if not has_come():
                await workflow.wait_condition(has_come, timeout=timedelta(seconds=min(_GRACE_S, idle_s)))
        except TimeoutError:
            run.training.release()
            await workflow.wait_condition(has_come)

    def _of_key(self, key: str) -> StepStatus | None:
        return next((step for step in self._steps.values() if step.key == key), None)
