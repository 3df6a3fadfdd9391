"""A job's events in OpenAI's form, from what its run's workers and workflow left on record.

They stand in the order in which they happened, and never change places, so that a client can ask for those behind one.
What a worker said is read once: a job that is asked about again costs what has been added since.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, JsonValue

from service.runs.views import SKIPPED, RunReader, RunView, describe, last_lines
from shared.jobs.events import Evaluated, Failed, Saved, Started, Step
from shared.runs.events import BEGINNING, EventCursor, RunEvent, read_run_events
from shared.runs.status import Phase, StepStatus
from shared.storage.store import ObjectStore

Level = Literal["info", "warn", "error"]
_KEPT_RUNS = 64
_AT_ONCE = 5000
_ALL_STEPS = 1_000_000

_PHASES: dict[Phase, str] = {
    "checking": "Checking the model",
    "downloading": "Reading the files",
    "tokenizing": "Validating the examples",
    "waiting_for_worker": "Waiting for a worker",
}


class JobEvent(BaseModel):
    """Something that happened. `metrics` events have numbers in `data`, by OpenAI's names and by ours."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Level = "info"
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, JsonValue] = {}


@dataclass
class _Read:
    """What was read of one run: workers' events, and records of train steps by number."""

    cursor: EventCursor = BEGINNING
    events: list[RunEvent] = field(default_factory=list)
    steps: list[StepStatus] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class JobEvents:
    """Reads runs, and keeps what it read of the last ones."""

    def __init__(self, store: ObjectStore, reader: RunReader) -> None:
        self._store = store
        self._reader = reader
        self._kept: OrderedDict[str, _Read] = OrderedDict()

    async def of(self, view: RunView) -> list[JobEvent]:
        """All events of a job, newest first."""
        read = await self._read(view)
        return [*_ended(view), *reversed(_happened(view, read)), *reversed(_begun(view))]

    async def trained_tokens(self, view: RunView) -> int | None:
        """Tokens that steps were made of, each step once; None while the job goes on."""
        if view.state in ("running", "paused"):
            return None
        read = await self._read(view)
        tokens = {e.event.step: e.event.metrics.get("tokens", 0.0) for e in read.events if isinstance(e.event, Step)}
        return int(sum(tokens.values()))

    async def saved_at(self, view: RunView) -> dict[int, float]:
        """When a checkpoint of each step was saved, in seconds since 1970."""
        read = await self._read(view)
        return {e.event.step: e.event.time for e in read.events if isinstance(e.event, Saved)}

    async def _read(self, view: RunView) -> _Read:
        read = self._kept.setdefault(view.run_id, _Read())
        self._kept.move_to_end(view.run_id)
        while len(self._kept) > _KEPT_RUNS:
            self._kept.popitem(last=False)
        async with read.lock:
            while True:
                found, read.cursor = await asyncio.to_thread(
                    read_run_events, self._store, view.run_id, read.cursor, _AT_ONCE
                )
                read.events += found
                if len(found) < _AT_ONCE:
                    break
            if view.kind == "rl":
                last = read.steps[-1].step if read.steps else None
                read.steps += (await self._reader.steps(view.run_id, last, _ALL_STEPS)).steps
        return read


def _begun(view: RunView) -> list[JobEvent]:
    """How the job came to be, and what was done before the first step, oldest first."""
    events = [_event(view, "created", view.created_at, f"Created fine-tuning job: {view.run_id}")]
    told = set[Phase]()
    for span in view.timeline:
        if span.phase in _PHASES and span.phase not in told and span.lease <= 1:
            told.add(span.phase)
            events.append(_event(view, span.phase, span.began, _PHASES[span.phase]))
    return events if view.kind != "rl" else events[:1]


def _happened(view: RunView, read: _Read) -> list[JobEvent]:
    """What workers said, and behind each job of a reinforcement run what its train step came to; oldest first."""
    num_steps = next((e.event.num_steps for e in reversed(read.events) if isinstance(e.event, Started)), None)
    told: list[JobEvent] = []
    steps = list(reversed(read.steps))
    when = view.created_at
    for item in read.events:
        while steps and steps[-1].step < int(item.job_id):
            told.append(_train_step(view, steps.pop(), when))
        when = item.event.time
        told.append(_workers_own(view, item, num_steps))
    return told + [_train_step(view, step, when) for step in reversed(steps)]


def _workers_own(view: RunView, item: RunEvent, num_steps: int | None) -> JobEvent:
    event = item.event
    name = f"{item.job_id}-{item.fence.label}-{event.seq}"
    match event:
        case Step(step=step, metrics=metrics):
            of = f"/{num_steps}" if num_steps else ""
            text = f"Step {step}{of}: training loss={metrics.get('loss', float('nan')):.4f}"
            if "skipped" in metrics:
                text = f"Step {step}{of} {SKIPPED}"
            data: dict[str, JsonValue] = {"step": step, "total_steps": num_steps, **metrics}
            if "loss" in metrics:
                data["train_loss"] = metrics["loss"]
            return _event(view, name, event.time, text, level="warn" if "skipped" in metrics else "info", data=data)
        case Evaluated(step=step, metrics=metrics):
            text = f"Step {step}: validation loss={metrics.get('loss', float('nan')):.4f}"
            data = {"step": step, **{f"valid_{key}": value for key, value in metrics.items()}}
            if "loss" in metrics:
                data["full_valid_loss"] = metrics["loss"]
            return _event(view, name, event.time, text, data=data)
        case Failed():
            return _event(view, name, event.time, describe(event), level="error")
        case _:
            return _event(view, name, event.time, describe(event))


def _train_step(view: RunView, step: StepStatus, when: float) -> JobEvent:
    text = f"Train step {step.step} {step.state}"
    data: dict[str, JsonValue] = {"step": step.step, **step.metrics}
    for ours, theirs in (("reward_mean", "train_mean_reward"), ("eval_reward_mean", "valid_mean_reward")):
        if ours in step.metrics:
            data[theirs] = step.metrics[ours]
            text += f", {theirs}={step.metrics[ours]:.4f}"
    if step.problem is not None:
        return _event(view, f"step-{step.step}", when, f"{text}: {step.problem.message}", level="warn")
    return _event(view, f"step-{step.step}", when, text, data=data)


def _ended(view: RunView) -> list[JobEvent]:
    """How the job stands now, if it has ended, newest first."""
    when = view.ended_at or view.created_at
    match view.state:
        case "running":
            return []
        case "succeeded":
            notices = [
                _event(view, f"notice-{number}", when, notice, level="warn")
                for number, notice in enumerate(view.notices)
            ]
            model = f"New fine-tuned model created: {view.name}:v{view.version}"
            text = "The job has successfully completed"
            return [_event(view, "succeeded", when, text), _event(view, "model", when, model), *notices]
        case state:
            level: Level = "error" if state == "failed" else "info"
            return [_event(view, state, when, last_lines(view)[0].replace("the run", "The job"), level=level)]


def _event(
    view: RunView,
    name: str,
    when: float,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, JsonValue] | None = None,
) -> JobEvent:
    return JobEvent(
        id=f"ftevent-{view.run_id}-{name}",
        created_at=int(when),
        level=level,
        message=message,
        type="message" if data is None else "metrics",
        data={key: value for key, value in (data or {}).items() if value is not None},
    )
