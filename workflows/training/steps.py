"""The train steps of a run as its workflow knows them: those that wait, and the last ones that ended."""

from collections.abc import Iterable, Mapping

from shared.runs.status import StepStatus

MAX_WAITING = 64
"""Steps that may wait their turn; a client that is further ahead is told to come back."""
_REMEMBERED = 64  # steps whose answers stay here; the store remembers every one


class Steps:
    """In order of arrival. `next`: the number of the next one that comes."""

    def __init__(self, steps: Iterable[StepStatus] = (), next_step: int = 1) -> None:
        self._steps = {step.step: step for step in steps}
        self.next = next_step

    def take(self, key: str, groups: str, metrics: Mapping[str, float] | None = None) -> StepStatus:
        """A new step, which waits its turn."""
        step = StepStatus(step=self.next, key=key, groups=groups, metrics=dict(metrics or {}))
        self.next += 1
        self._steps[step.step] = step
        return step

    def keep(self, step: StepStatus) -> None:
        """Note how a step stands. Of those that ended, the last ones stay."""
        self._steps[step.step] = step
        ended = [number for number, one in self._steps.items() if one.is_final]
        for number in ended[:-_REMEMBERED]:
            del self._steps[number]

    def get(self, number: int) -> StepStatus | None:
        return self._steps.get(number)

    def of_key(self, key: str) -> StepStatus | None:
        return next((step for step in self._steps.values() if step.key == key), None)

    def first_waiting(self) -> StepStatus | None:
        return next((step for step in self._steps.values() if not step.is_final), None)

    @property
    def num_waiting(self) -> int:
        return sum(not step.is_final for step in self._steps.values())

    def all(self) -> tuple[StepStatus, ...]:
        """Those that wait, and the last ones that ended."""
        return tuple(self._steps.values())
