"""Rows of W&B from a run's events and train steps: rows of numbers, each step once."""

from collections.abc import Iterable, Iterator

from shared.contract import Frozen
from shared.jobs.events import Evaluated, Event, Offloaded, Sample, Step
from shared.runs.status import StepStatus

STEP = "train/step"
EVALUATION = "eval/step"
TRAIN_STEP = "rollout/step"
_SYSTEM_SUFFIXES = ("_bytes", "_s", "_per_s")


class TrainStep(Frozen):
    """A train step of an RL run that has ended, as it stands on record."""

    record: StepStatus


Line = Event | TrainStep


class Done(Frozen):
    """Progress that W&B has: the last optimizer step, evaluation and train step. -1: none; no step is step 0."""

    step: int = 0
    evaluation: int = -1
    train_step: int = -1


class Row(Frozen):
    """One event's addition to the history: numbers by W&B name, and the samples of an evaluation."""

    values: dict[str, float]
    samples: tuple[Sample, ...] = ()


class History:
    """Makes rows of a run's lines, which are given in order, over as many calls as it takes.

    A worker that goes on from a checkpoint repeats the steps after it, and gives the same numbers: they count once.
    What is done stands in W&B already. A train step stands at the last optimizer step that it made, where the worker's
    own numbers are already, and adds the others.
    """

    def __init__(self, done: Done) -> None:
        self._done_step = self._step = done.step
        self._evaluation, self._train_step = done.evaluation, done.train_step
        self._workers_own: set[str] = set()

    def rows(self, lines: Iterable[Line]) -> Iterator[Row]:
        """The rows that these lines add."""
        for line in lines:
            match line:
                case Step():
                    self._workers_own |= line.metrics.keys()
                    if line.step > self._step:
                        self._step = line.step
                        yield Row(values={STEP: line.step, **_named("train", line.metrics)})
                case Evaluated() if line.step > self._evaluation:
                    self._evaluation = line.step
                    numbers = {EVALUATION: float(line.step), **_named("eval", line.metrics)}
                    yield Row(values={STEP: line.step, **numbers}, samples=line.samples)
                case Offloaded() if self._step > self._done_step:
                    numbers = line.model_dump(exclude={"seq", "time", "event"})
                    yield Row(values={STEP: self._step, **{f"system/offload_{k}": v for k, v in numbers.items()}})
                case TrainStep(record=record) if record.step > self._train_step:
                    self._train_step = record.step
                    if (own := self._own(record)) and record.same_as is None:
                        yield Row(values={STEP: record.optimizer_step or 0, TRAIN_STEP: record.step, **own})

    def _own(self, record: StepStatus) -> dict[str, float]:
        """A train step's numbers that no worker said before."""
        return _named("rollout", {k: v for k, v in record.metrics.items() if k not in self._workers_own})


def _named(group: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under W&B names: sizes, times and speeds are `system/`, everything else is the group's."""
    return {f"{'system' if name.endswith(_SYSTEM_SUFFIXES) else group}/{name}": v for name, v in metrics.items()}
