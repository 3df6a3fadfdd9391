"""A job's events in the form of ART's client: its beginning, a `gradient_step` for every optimizer step, its end.

The client converts every value of a gradient step to a number, and fails if one comes before the beginning's event.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, JsonValue

from service.apis.lists import ListAnswer, page_after, page_of
from service.backend import Backend
from service.inference.art_models import finite_metrics
from service.runs.views.run_view import RunView
from service.runs.views.words import dropped, last_lines
from shared.errors import InvalidInput, NotFound
from shared.jobs.events import Step
from shared.runs.status import StepStatus

EventType = Literal["training_started", "gradient_step", "training_ended", "training_failed"]
JobStatus = Literal["queued", "running", "succeeded", "failed"]
_STARTED, _ENDED = "training_started", "training_ended"
_ALL_BROKEN = (
    "no trajectory can be trained: each is broken (docs/trajectories.md): an answer that nobody remembers and that has "
    "no logprobs, one that the model's tokenizer and template do not give again, or more than max_tokens"
)
# ART's trainer's names of our metrics; the client renames these again.
_ART_NAMES = {
    "reward_mean": "reward",
    "reward_spread_mean": "reward_std_dev",
    "loss": "policy_loss",
    "kl_old_new": "kl_div",
    "kl_reference": "kl_policy_ref",
    "groups": "num_groups_submitted",
    "trajectories": "num_trajectories",
    "target_tokens": "num_trainable_tokens",
}


class TrainingEvent(BaseModel):
    """Something that happened. `data`: numbers; of the beginning `num_sequences`, of a failure `error_message`."""

    id: str
    object: Literal["training_job.event"] = "training_job.event"
    type: EventType
    data: dict[str, JsonValue] = {}


@dataclass(frozen=True)
class JobStep:
    """A train step of a model's run, as a job. `problem`: why it will not be done, if its run has ended before."""

    job_id: str
    step: StepStatus | None
    problem: str | None = None

    @property
    def status(self) -> JobStatus:
        match self.step.state if self.step is not None and self.error is None else "failed":
            case "done" | "skipped":
                return "succeeded"
            case state:
                return state

    @property
    def error(self) -> str | None:
        """Why the job failed. A skipped step without a single whole trajectory is an error; others are not."""
        if self.problem is not None or self.step is None:
            return self.problem
        metrics = self.step.metrics
        is_broken = not metrics or metrics.get("broken_trajectories", 0) == metrics.get("trajectories")
        if self.step.state == "skipped" and is_broken:
            return ": ".join(filter(None, (_ALL_BROKEN, dropped(metrics))))
        return self.step.problem.message if self.step.problem is not None else None

    def events(self) -> list[TrainingEvent]:
        """List the events, oldest first. A step that had nothing to learn from has no gradient step."""
        if self.status == "queued":
            return []
        events = [_event(self.job_id, "training_started", {"num_sequences": 1})]
        if self.step is not None and self.step.state == "done":
            events.append(_event(self.job_id, "gradient_step", _numbers(self.step.metrics)))
        match self.status:
            case "succeeded":
                events.append(_event(self.job_id, "training_ended"))
            case "failed":
                events.append(_event(self.job_id, "training_failed", {"error_message": self.error}))
        return events

    def page(self, after: str | None, limit: int) -> ListAnswer[TrainingEvent]:
        return page_after(self.events(), after, limit)


async def read_step(backend: Backend, view: RunView, number: int) -> JobStep:
    """Return a train step as a job. Raises NotFound for one that does not exist."""
    job_id = f"{view.run_id}.{number}"
    try:
        step = await backend.steps.show(view.tenant, view.run_id, number)
    except NotFound:
        if view.state == "running":
            raise NotFound(f"there is no training job {job_id}") from None
        return JobStep(job_id, None, last_lines(view)[0])
    if step.is_final:
        return JobStep(job_id, step)
    view = await backend.runs.view(view.tenant, view.run_id)
    if view.state == "running":
        return JobStep(job_id, step)
    step = await backend.steps.show(view.tenant, view.run_id, number)  # the step may have ended just before the run
    return JobStep(job_id, step, None if step.is_final else last_lines(view)[0])


def sft_status(view: RunView) -> JobStatus:
    """The status of a supervised job. ART knows no cancelled or paused jobs: they are failed."""
    match view.state:
        case "running":
            return "queued" if view.num_steps is None else "running"
        case "succeeded":
            return "succeeded"
        case _:
            return "failed"


async def sft_events(backend: Backend, view: RunView, after: str | None, limit: int) -> ListAnswer[TrainingEvent]:
    """Return a page of a supervised job's events behind the event `after`.

    Steps that were done again, after a worker was lost, come again.

    Raises InvalidInput: `after` is no id of its events.
    """
    place = _place(view.run_id, after)
    if place == _ENDED or (view.num_steps is None and view.state == "running"):
        return page_of(list[TrainingEvent](), has_more=False)
    history = await backend.histories.of(view.run_id)
    steps = [(item.cursor, item.event) for item in history.events if isinstance(item.event, Step)]
    if place not in (None, _STARTED):
        cursors = [cursor for cursor, _ in steps]
        if place not in cursors:
            raise InvalidInput("there is no item of this id", "after")
        steps = steps[cursors.index(place) + 1 :]
    events: list[TrainingEvent] = []
    if place is None and view.num_steps is not None:
        events.append(_event(view.run_id, "training_started", {"num_sequences": view.num_steps}))
    events += [
        TrainingEvent(id=f"{view.run_id}:{cursor}", type="gradient_step", data=_numbers(step.metrics))
        for cursor, step in steps[:limit]
    ]
    if len(steps) <= limit and view.state != "running":
        events.append(_end(view))
    return page_of(events[:limit], len(steps) > limit or len(events) > limit)


def _place(job_id: str, after: str | None) -> str | None:
    """Return the part of an event's id after the job's id: the event's type, or a cursor."""
    if after is None:
        return None
    if not after.startswith(f"{job_id}:"):
        raise InvalidInput("there is no item of this id", "after")
    return after.removeprefix(f"{job_id}:")


def _end(view: RunView) -> TrainingEvent:
    """Return the last event of a run. Its id ends with `training_ended`, whatever its type."""
    if view.state == "succeeded":
        return _event(view.run_id, "training_ended")
    failed = _event(view.run_id, "training_failed", {"error_message": failure_message(view)})
    return failed.model_copy(update={"id": f"{view.run_id}:training_ended"})


def failure_message(view: RunView) -> str | None:
    """Return the reason why a run ended without success."""
    if view.state in ("running", "succeeded"):
        return None
    return view.problem.message if view.problem is not None else last_lines(view)[0]


def _numbers(metrics: dict[str, float]) -> dict[str, JsonValue]:
    """Return metrics under our names and under ART's."""
    found = finite_metrics(metrics)
    return {**found, **{theirs: found[ours] for ours, theirs in _ART_NAMES.items() if ours in found}}


def _event(job_id: str, kind: EventType, data: dict[str, JsonValue] | None = None) -> TrainingEvent:
    return TrainingEvent(id=f"{job_id}:{kind}", type=kind, data=data or {})
