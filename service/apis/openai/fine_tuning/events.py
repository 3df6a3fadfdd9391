"""A job's events in OpenAI's form, from the history of its run. Their order is that in which they happened."""

from typing import Literal

from pydantic import BaseModel, JsonValue

from service.runs.history import RunHistory
from service.runs.views import SKIPPED, RunView, describe, last_lines
from shared.jobs.events import Evaluated, Failed, Started, Step
from shared.runs.events import RunEvent
from shared.runs.status import Phase, StepStatus

Level = Literal["info", "warn", "error"]

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


def job_events(view: RunView, history: RunHistory) -> list[JobEvent]:
    """All events of a job, newest first."""
    return [*_ended(view), *reversed(_happened(view, history)), *reversed(_begun(view))]


def _begun(view: RunView) -> list[JobEvent]:
    """Events before the first step, oldest first."""
    events = [_event(view, "created", view.created_at, f"Created fine-tuning job: {view.run_id}")]
    seen = set[Phase]()
    for span in view.timeline:
        if span.phase in _PHASES and span.phase not in seen and span.lease <= 1:
            seen.add(span.phase)
            events.append(_event(view, span.phase, span.began, _PHASES[span.phase]))
    return events if view.kind != "rl" else events[:1]


def _happened(view: RunView, history: RunHistory) -> list[JobEvent]:
    """Workers' events, and the train step behind each job of a reinforcement run; oldest first."""
    num_steps = next((e.event.num_steps for e in reversed(history.events) if isinstance(e.event, Started)), None)
    found: list[JobEvent] = []
    steps = list(reversed(history.steps))
    when = view.created_at
    for item in history.events:
        while steps and steps[-1].step < int(item.job_id):
            found.append(_train_step(view, steps.pop(), when))
        when = item.event.time
        found.append(_worker_event(view, item, num_steps))
    return found + [_train_step(view, step, when) for step in reversed(steps)]


def _worker_event(view: RunView, item: RunEvent, num_steps: int | None) -> JobEvent:
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
    """Events of the job's end, if it has ended, newest first."""
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
