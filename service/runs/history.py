"""The history of a run: its workers' events and its train steps, read once and then as far as they have grown.

Every API shows runs from it. Events keep their order, so that a client can ask for those behind one.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from service.runs.views import EvaluationMetrics, Metrics, RunReader, StepMetrics, TrainStepMetrics
from shared.jobs.events import Evaluated, Saved, Step
from shared.runs.events import RunEvent
from shared.runs.status import StepStatus

_MOST_RUNS, _MOST_EVENTS = 64, 200_000
_AT_ONCE = 5000
_ALL_STEPS = 1_000_000


@dataclass
class RunHistory:
    """Events in order of job, then of fence. A step that another worker did again stands twice: the last one counts."""

    events: list[RunEvent] = field(default_factory=list)
    steps: list[StepStatus] = field(default_factory=list)
    _cursor: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, reader: RunReader, run_id: str) -> None:
        """Read what has been added since."""
        async with self._lock:
            while (page := await reader.events(run_id, self._cursor, _AT_ONCE)).events:
                self.events += page.events
                self._cursor = page.next
            last = self.steps[-1].step if self.steps else None
            self.steps += (await reader.steps(run_id, last, _ALL_STEPS)).steps

    def step_metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of each optimizer step, in order of step."""
        found = (item.event for item in self.events)
        return dict(sorted({event.step: event.metrics for event in found if isinstance(event, Step)}.items()))

    def metrics(self) -> Metrics:
        """Every step's metrics and every evaluation."""
        found = (item.event for item in self.events)
        evaluated = {event.step: event for event in found if isinstance(event, Evaluated)}
        return Metrics(
            steps=tuple(StepMetrics(step=step, metrics=metrics) for step, metrics in self.step_metrics().items()),
            evaluations=tuple(
                EvaluationMetrics(step=step, metrics=event.metrics, samples=event.samples)
                for step, event in sorted(evaluated.items())
            ),
            train_steps=tuple(
                TrainStepMetrics(step=step.step, optimizer_step=step.optimizer_step, metrics=step.metrics)
                for step in self.steps
                if step.same_as is None
            ),
        )

    def trained_tokens(self) -> int:
        """Tokens that steps were made of, each step once."""
        return int(sum(metrics.get("tokens", 0.0) for metrics in self.step_metrics().values()))

    def saved_at(self) -> dict[int, float]:
        """When the checkpoint of each step was saved, in seconds since 1970."""
        return {item.event.step: item.event.time for item in self.events if isinstance(item.event, Saved)}


class Histories:
    """Keeps the histories of the runs that were asked for last, up to a number of events."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._kept: OrderedDict[str, RunHistory] = OrderedDict()

    async def of(self, run_id: str) -> RunHistory:
        """A run's history up to now. The caller has checked who owns the run."""
        history = self._kept.setdefault(run_id, RunHistory())
        self._kept.move_to_end(run_id)
        await history.read(self._reader, run_id)
        num_events = sum(len(kept.events) for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > _MOST_RUNS or num_events > _MOST_EVENTS):
            num_events -= len(self._kept.popitem(last=False)[1].events)
        return history
