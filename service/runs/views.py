"""Views of runs, and readers of their events, checkpoints and histories. Imports no Temporal and no web framework."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from longshore.fields import Frozen
from shared.jobs.events import (
    Applied,
    Evaluated,
    Evaluating,
    EvaluationSample,
    Event,
    Failed,
    Kept,
    Offloaded,
    Probed,
    Saved,
    Started,
    Step,
    Succeeded,
)
from shared.runs.events import EventCursor, RunEvent, read_run_events
from shared.runs.requests import FIRST_TENANT, Precision, Run, Source, Tenant
from shared.runs.status import CheckpointRef, Phase, RunStatus, StepStatus
from shared.settings import PriceSettings
from shared.storage.artifacts import find_artifact
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.store import ObjectStore

_CONCURRENT = 16
IN_QUEUE: tuple[Phase, ...] = ("queued", "waiting_for_worker")
"""Phases in which a running run has a place in the queue for workers."""
_MAIN_METRICS = ("reward_mean", "loss", "eval_loss", "preference_accuracy", "tokens_per_s")
_LOOKED_FOR = ("loss", "eval_loss", "preference_accuracy", "grad_norm", "learning_rate", "tokens_per_s")
SKIPPED = "skipped: no token of it is trained, and no weight changed"
_MOST_RUNS, _MOST_EVENTS = 64, 200_000
_AT_ONCE = 5000
_ALL_STEPS = 1_000_000


class Cost(Frozen):
    """What a run costs, by the price of a GPU hour.

    `estimated`: at its end, at the pace of its steps so far; None while nobody can say.
    """

    currency: str
    so_far: float
    estimated: float | None = None


class RunView(RunStatus):
    """A run in the API: its status, its request, when it was submitted, and its cost where GPU hours have a price."""

    created_at: float
    tenant: Tenant = FIRST_TENANT
    owner: str | None = None
    source: Source = Source()
    run: Run
    precision: Precision | None = None
    cost: Cost | None = None


def with_cost(view: RunView, prices: PriceSettings) -> RunView:
    """Return a view with the cost of the run so far, and at its end by its own estimate."""
    if prices.gpu_hour is None:
        return view
    so_far, estimated = view.gpu_seconds, None
    if view.state in ("succeeded", "failed", "cancelled"):
        estimated = so_far
    elif (left_s := seconds_left(view, time.time())) is not None:
        estimated = so_far + left_s * devices_of(view.run)
    price = prices.gpu_hour / 3600
    total = None if estimated is None else estimated * price
    return view.model_copy(update={"cost": Cost(currency=prices.currency, so_far=so_far * price, estimated=total)})


def devices_of(run: Run) -> int:
    """Return the devices that a run has while it works: a worker's ranks, and the samplers that it leases."""
    samplers = 0
    if run.kind == "rl" and run.rollouts is not None and run.rollouts.sampler_url is None:
        samplers = 0 if run.rollouts.colocate else run.rollouts.samplers
    return run.layout.world_size + samplers


def seconds_left(view: RunStatus, now: float) -> float | None:
    """Return the seconds to a run's last step, by its own estimate; None without an estimate, or after that time."""
    if view.state != "running" or view.estimated_end is None or view.estimated_end <= now:
        return None
    return view.estimated_end - now


class RunPage(Frozen):
    """Runs, newest first. `next` is the `after` of the following page.

    `num_hidden_sessions`: idle ones that no page has, as they were not asked for.
    """

    runs: tuple[RunView, ...]
    has_more: bool
    next: str | None = None
    num_hidden_sessions: int = 0


class EventPage(Frozen):
    """Events after a cursor. `next` is the cursor to ask with again: the last event's, or the one that was given."""

    events: tuple[RunEvent, ...]
    next: str | None


class StepPage(Frozen):
    """Train steps of an RL run that are on record, in order.

    `next` is the number to ask after, also for steps that are still to come: the last step's, or what was given.
    """

    steps: tuple[StepStatus, ...]
    has_more: bool
    next: int | None = None


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
        """Events after a cursor, at most `limit`. Raises InvalidInput for what is no cursor."""
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
        keys = RunKeys(run_id)
        found = []
        for item in self._store.list(f"{keys.checkpoints}/"):
            if place := keys.checkpoint_of(item.key):
                fence, step = place
                artifact = find_artifact(self._store, item.key.removesuffix(f"/{MANIFEST}"))
                if artifact is not None:  # else it was pruned since it was listed
                    found.append(CheckpointRef(step=step, fence=fence, artifact=artifact))
        return tuple(sorted(found, key=lambda c: (c.step, c.fence.label)))


def log_line(item: RunEvent) -> str:
    """An event as a line of a log, with its time."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(item.event.time))} {event_in_words(item.event)}"


def last_lines(view: RunView) -> list[str]:
    """The last lines of a log: the run's end, if it has ended."""
    match view.state:
        case "running":
            return []
        case "cancelled" | "paused":
            return [f"the run was {view.state}" + (f": {view.paused_by}" if view.paused_by else "")]
        case _:
            return [f"the run {view.state}" + (f": {view.problem.message}" if view.problem else "")]


def event_in_words(event: Event) -> str:
    """An event in words, for people who read logs."""
    match event:
        case Started():
            where = f"{event.world_size} rank{'s' if event.world_size > 1 else ''} on {event.device}"
            return f"training starts at step {event.first_step} of {event.num_steps}, {where}"
        case Step() if "skipped" in event.metrics:
            return f"step {event.step} {SKIPPED}"
        case Step():
            return f"step {event.step}: {brief(event.metrics)}"
        case Saved():
            return f"checkpoint of step {event.step} saved"
        case Kept():
            return f"state of command {event.step} kept"
        case Evaluating():
            return f"evaluating after step {event.step}: {event.fraction:.0%} of the held-out rows"
        case Evaluated():
            samples = f", {len(event.samples)} samples" if event.samples else ""
            return f"evaluated after step {event.step}: {brief(event.metrics)}{samples}"
        case Probed():
            return f"probe of {len(event.logprobs) + 1} tokens after step {event.step}"
        case Applied():
            return f"command {event.command}: {event.kind}{' failed' if event.failed else ''}"
        case Offloaded():
            mib = (event.device_bytes_before - event.device_bytes_after) / 2**20
            return f"device memory released: {mib:.0f} MiB in {event.duration_s:.2f} s"
        case Succeeded():
            return f"training succeeded at step {event.step}"
        case Failed():
            return f"training failed after step {event.step}: {event.message}"
        case _:
            return f"training stopped after step {event.step}, as it was asked to"


def brief(metrics: dict[str, float]) -> str:
    """Format the most usual metrics; all, if there is none of those."""
    return ", ".join(metric_in_words(name, metrics[name]) for name in looked_for(metrics))


def main_metrics(metrics: dict[str, float]) -> list[str]:
    """Format a few metrics, the most important first."""
    return [metric_in_words(name, metrics[name]) for name in _MAIN_METRICS if name in metrics]


def dropped(metrics: dict[str, float]) -> str | None:
    """The number of a train step's dropped trajectories, and the rules that dropped them; None where none was."""
    if not (num_broken := metrics.get("broken_trajectories")):
        return None
    of = {name.removeprefix("dropped_for_"): n for name, n in metrics.items() if name.startswith("dropped_for_")}
    reasons = ", ".join(f"{rule} {n:.0f}" for rule, n in sorted(of.items(), key=lambda item: (-item[1], item[0])))
    return f"{num_broken:.0f} of {metrics['trajectories']:.0f} trajectories could not be trained: {reasons}"


def metric_in_words(name: str, value: float) -> str:
    """Format a metric with its name, in as many digits as people read."""
    if name == "tokens_per_s":
        return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:.3g} tokens/s"
    return f"{'reward' if name == 'reward_mean' else name} {value:.4g}"


def looked_for(names: Iterable[str]) -> list[str]:
    """Return the usual metrics among these names; all, if there is none of those."""
    found = sorted(names)
    return [name for name in _LOOKED_FOR if name in found] or found


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
