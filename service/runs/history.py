"""The history of a run, read from the store: its events, train steps, metrics and checkpoints."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from longshore.fields import Frozen
from service.runs.views import EventPage, StepPage
from shared.jobs.events import Evaluated, EvaluationSample, Saved, Step
from shared.runs.events import EventCursor, RunEvent, read_run_events
from shared.runs.status import CheckpointRef, StepStatus
from shared.storage.artifacts import find_artifact, stored_checkpoints
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import ObjectStore

_CONCURRENT = 16
_MOST_RUNS, _MOST_EVENTS = 64, 200_000
_AT_ONCE = 5000
_ALL_STEPS = 1_000_000


class StepMetrics(Frozen):
    """Metrics of one optimizer step."""

    step: int
    metrics: dict[str, float]


class EvaluationMetrics(Frozen):
    """Held-out metrics and greedy completions after a step; step 0 is before training."""

    step: int
    metrics: dict[str, float]
    samples: tuple[EvaluationSample, ...] = ()


class TrainStepMetrics(Frozen):
    """Metrics of one train step of an RL run: rewards, training, seconds. `optimizer_step`: the run's, after it."""

    step: int
    optimizer_step: int | None
    metrics: dict[str, float]


class Metrics(Frozen):
    """Metrics of each optimizer step, in order; of a step that was done twice, those of the last time.

    `train_steps`: metrics of each train step of an RL run, except steps that repeat another one's key.
    """

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvaluationMetrics, ...]
    train_steps: tuple[TrainStepMetrics, ...] = ()


class RunReader:
    """Reads a run's events, steps and checkpoints in the store. Events are in copies of the workers' logs there."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def events(self, run_id: str, after: str | None, limit: int) -> EventPage:
        """Events after a cursor, at most `limit`. Raises InvalidInput if `after` is no cursor."""
        start = EventCursor.parse(after)
        found, cursor = await asyncio.to_thread(read_run_events, self._store, run_id, start, limit)
        return EventPage(events=tuple(found), next=str(cursor) if found else after)

    async def steps(self, run_id: str, after: int | None, limit: int) -> StepPage:
        """Train steps on record, at most `limit`: those after a number, or from the first."""
        keys = RunKeys(run_id)
        found = await asyncio.to_thread(lambda: [info.key for info in self._store.list(f"{keys.steps}/")])
        wanted = found if after is None else [key for key in found if key > keys.step(after)]
        steps: list[StepStatus] = []
        for start in range(0, min(limit, len(wanted)), _CONCURRENT):
            chunk = wanted[start : min(start + _CONCURRENT, limit)]
            steps += await asyncio.gather(*(asyncio.to_thread(self._step, key) for key in chunk))
        return StepPage(steps=tuple(steps), has_more=len(wanted) > limit, next=steps[-1].step if steps else after)

    def _step(self, key: str) -> StepStatus:
        return StepStatus.model_validate_json(self._store.get_bytes(key))

    def checkpoints(self, run_id: str) -> tuple[CheckpointRef, ...]:
        """Read the checkpoints in the store, in order of step; of a step that two workers saved, both. Blocking."""
        found = []
        for each in stored_checkpoints(self._store, run_id):
            artifact = find_artifact(self._store, each.key)
            if artifact is not None:  # else it was pruned since it was listed
                found.append(CheckpointRef(step=each.step, fence=Fence.from_label(each.fence_label), artifact=artifact))
        return tuple(found)


@dataclass
class RunHistory:
    """The events and train steps of a run. Each `read` adds those that are new.

    Events are in order of job, then of fence. A step that another worker has repeated occurs twice: the last counts.
    """

    events: list[RunEvent] = field(default_factory=list)
    steps: list[StepStatus] = field(default_factory=list)
    _cursor: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, reader: RunReader, run_id: str) -> None:
        """Read new entries."""
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
        """Count the trained tokens, of each step once."""
        return int(sum(metrics.get("tokens", 0.0) for metrics in self.step_metrics().values()))

    def saved_at(self) -> dict[int, float]:
        """Return the time at which the checkpoint of each step was saved, in seconds since 1970."""
        return {item.event.step: item.event.time for item in self.events if isinstance(item.event, Saved)}


class Histories:
    """Keeps the histories of the runs that were asked for last, up to a number of events."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._kept: OrderedDict[str, RunHistory] = OrderedDict()

    async def of(self, run_id: str) -> RunHistory:
        """Return a run's history up to now. The caller has checked who owns the run."""
        history = self._kept.setdefault(run_id, RunHistory())
        self._kept.move_to_end(run_id)
        await history.read(self._reader, run_id)
        num_events = sum(len(kept.events) for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > _MOST_RUNS or num_events > _MOST_EVENTS):
            num_events -= len(self._kept.popitem(last=False)[1].events)
        return history
