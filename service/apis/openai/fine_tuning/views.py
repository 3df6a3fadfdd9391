"""Runs as fine-tuning jobs, with their checkpoints and events: the objects that OpenAI's clients read."""

import asyncio
import csv
import io
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from longshore.training import SessionRun
from service.backend import Backend
from service.files import PublishedFiles
from service.runs.history import Metrics, RunHistory
from service.runs.views import SKIPPED, Cost, RunView, event_in_words, last_lines, seconds_left
from shared.errors import NotFound
from shared.jobs.events import Evaluated, Failed, Started, Step
from shared.runs.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from shared.runs.events import RunEvent
from shared.runs.requests import RUN_ID, RLRun, Run
from shared.runs.status import Phase, StepStatus

# --- The result files of a job ---
# Its metrics as CSV, and its published model as a tar. They are made on download.

FILE_ID = re.compile(r"file-[A-Za-z0-9-]{1,59}")
_METRICS, _MODEL = "file-metrics-", "file-model-"


@dataclass(frozen=True)
class ResultFile:
    """A file of a job, and how to read it."""

    file_id: str
    name: str
    size: int
    created_at: float
    content: Callable[[], Iterator[bytes]]
    purpose: str = "fine-tune-results"


def result_ids(run_id: str) -> list[str]:
    """The files of a job that succeeded: metrics, then the published model."""
    return [f"{_METRICS}{run_id}", f"{_MODEL}{run_id}"]


def is_result(file_id: str) -> bool:
    return file_id.startswith((_METRICS, _MODEL))


async def find_result_file(backend: Backend, tenant: str, file_id: str) -> ResultFile:
    """Find a result file by its id. Raises NotFound unless it is of a job of this tenant that succeeded."""
    run_id = file_id.removeprefix(_METRICS).removeprefix(_MODEL)
    if not re.fullmatch(RUN_ID, run_id):
        raise NotFound(f"there is no file {file_id[:64]}")
    view = await backend.runs.view(tenant, run_id)
    if view.state != "succeeded" or view.source.api != "openai":
        raise NotFound(f"there is no file {file_id}")
    created_at = view.ended_at or view.created_at
    if file_id.startswith(_METRICS):
        data = metrics_csv((await backend.histories.of(run_id)).metrics())
        return ResultFile(file_id, "step_metrics.csv", len(data), created_at, lambda: iter([data]))
    files = await asyncio.to_thread(PublishedFiles.of, view, backend.settings.s3)
    return ResultFile(file_id, f"{run_id}.tar", files.tar_bytes(run_id), created_at, lambda: files.tar(run_id))


def metrics_csv(metrics: Metrics) -> bytes:
    """Format metrics as CSV: a line for each optimizer step, 0 before the first; `train_loss`, `valid_loss`, ..."""
    rows: dict[int, dict[str, float]] = {}
    for step in metrics.steps:
        rows.setdefault(step.step, {}).update({f"train_{name}": value for name, value in step.metrics.items()})
    for evaluation in metrics.evaluations:
        named = {f"valid_{name}": value for name, value in evaluation.metrics.items()}
        rows.setdefault(evaluation.step, {}).update(named)
    for train_step in metrics.train_steps:
        named = {f"rollout_{name}": value for name, value in train_step.metrics.items()}
        rows.setdefault(train_step.optimizer_step or 0, {}).update(named)
    names = sorted({name for row in rows.values() for name in row}, key=lambda name: (not name.endswith("_loss"), name))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"step": step, **rows[step]} for step in sorted(rows))
    return text.getvalue().encode()


FineTuningStatus = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled", "paused"]
Level = Literal["info", "warn", "error"]

_VALIDATING: tuple[Phase, ...] = ("queued", "checking", "downloading", "tokenizing")
_WAITING: tuple[Phase, ...] = ("packing", "waiting_for_worker", "waiting_for_sampler")
_PHASES: dict[Phase, str] = {
    "checking": "Checking the model",
    "downloading": "Reading the files",
    "tokenizing": "Validating the examples",
    "waiting_for_worker": "Waiting for a worker",
}
_READING = ("downloading", "tokenizing", "packing")


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningProgress(BaseModel):
    """Our own fields: a job's progress. `step`: optimizer steps of `num_steps`; train steps of reinforcement jobs.

    `estimated_tokens`: tokens of the examples of all steps; None until they are validated, and for reinforcement jobs.
    `trained_tokens` is less if examples share prefixes, trained once. `cost`: None if GPU hours have no price.
    """

    phase: Phase
    step: int
    num_steps: int | None
    estimated_tokens: int | None
    gpu_seconds: float
    cost: Cost | None
    adapter: str | None


class JobObject(BaseModel):
    """A job as clients see it. OpenAI's API returns the status `paused`, though its documentation does not list it."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobError | None
    estimated_finish: int | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: dict[str, JsonValue]
    integrations: list[dict[str, JsonValue]] | None
    metadata: dict[str, str] | None
    method: dict[str, JsonValue]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: FineTuningStatus
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    user_provided_suffix: str | None
    longshore: FineTuningProgress


class JobCheckpoint(BaseModel):
    """A checkpoint as clients see it. `metrics`: those of its step, as far as they were measured."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
    step_number: int


def status_of(view: RunView) -> FineTuningStatus:
    """Return a run's state and phase in OpenAI's words."""
    if view.state != "running":
        return view.state
    if view.phase in _VALIDATING:
        return "validating_files"
    if view.phase in _WAITING and not view.step:
        return "queued"
    return "running"


def job_of(view: RunView, trained_tokens: int | None) -> JobObject:
    """Return a run as a job. `trained_tokens`: the number of trained tokens, if the job has ended."""
    sent: dict[str, Any] = view.source.request or {}
    wandb, now = view.source.wandb, time.time()
    left_s = seconds_left(view, now)
    hyperparameters = sent.get("hyperparameters") or {}
    is_done = view.state == "succeeded"
    has_ended = view.state not in ("running", "paused")
    problem = view.problem if view.state == "failed" else None
    return JobObject(
        id=view.run_id,
        created_at=int(view.created_at),
        error=JobError(code=problem.kind, message=problem.message, param=_file_at_fault(view)) if problem else None,
        estimated_finish=int(now + left_s) if left_s is not None else None,
        fine_tuned_model=f"{view.name}:v{view.version}" if is_done and view.version is not None else None,
        finished_at=int(view.ended_at) if has_ended and view.ended_at is not None else None,
        hyperparameters=hyperparameters if isinstance(view.run, SFTRun) else {},
        integrations=[{"type": "wandb", "wandb": wandb.model_dump(mode="json", exclude_none=True)}] if wandb else None,
        metadata=view.source.metadata or None,
        method=_method(view.run, hyperparameters),
        model=sent.get("model") or view.run.model,
        organization_id=view.tenant,
        result_files=result_ids(view.run_id) if is_done else [],
        seed=view.run.seed,
        status=status_of(view),
        trained_tokens=trained_tokens,
        training_file=sent.get("training_file") or "",
        validation_file=sent.get("validation_file"),
        user_provided_suffix=sent.get("suffix"),
        longshore=FineTuningProgress(
            phase=view.phase,
            step=view.step,
            num_steps=view.num_steps,
            estimated_tokens=view.planned_tokens,
            cost=view.cost,
            gpu_seconds=view.gpu_seconds,
            adapter=view.adapter,
        ),
    )


def _method(run: Run, hyperparameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    match run:
        case SFTRun() | DistillRun() | RewardRun():  # OpenAI has no method of the latter names
            return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        case DPORun():
            return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
        case RLRun():
            grader = run.rollouts.grader.model_dump(mode="json") if run.rollouts else None
            settings: dict[str, JsonValue] = {"grader": grader, "hyperparameters": hyperparameters}
            return {"type": "reinforcement", "reinforcement": settings}
        case SessionRun():
            raise NotFound("a session is no fine-tuning job")


async def checkpoints_of(backend: Backend, view: RunView) -> list[JobCheckpoint]:
    """List a job's checkpoints, newest first."""
    history = await backend.histories.of(view.run_id)
    saved_at, metrics = history.saved_at(), history.metrics()
    train = {row.step: row.metrics for row in metrics.steps}
    valid = {row.step: row.metrics for row in metrics.evaluations}
    steps = {found.step for found in await asyncio.to_thread(backend.reader.checkpoints, view.run_id)}
    return [
        JobCheckpoint(
            id=f"ftckpt-{view.run_id}-{step}",
            created_at=int(saved_at.get(step, view.created_at)),
            fine_tuned_model_checkpoint=checkpoint_model_name(view, step),
            fine_tuning_job_id=view.run_id,
            metrics=_metrics(step, train.get(step, {}), valid.get(step, {})),
            step_number=step,
        )
        for step in sorted(steps, reverse=True)
    ]


def checkpoint_model_name(view: RunView, step: int) -> str:
    """The model name of a checkpoint: the published one for the last of a job that succeeded, else `<job>:step-<n>`."""
    if view.state == "succeeded" and view.version is not None and step == view.step:
        return f"{view.name}:v{view.version}"
    return f"{view.run_id}:step-{step}"


def _metrics(step: int, train: dict[str, float], valid: dict[str, float]) -> dict[str, float]:
    found = {"step": float(step)}
    if "loss" in train:
        found["train_loss"] = train["loss"]
    if "loss" in valid:
        found["valid_loss"] = found["full_valid_loss"] = valid["loss"]
    return found


def _file_at_fault(view: RunView) -> str | None:
    """Return the field of the file that could not be read or learned from; None if it was none, or nobody can say."""
    if view.problem is None or view.problem.kind != "invalid_input" or view.phase not in _READING:
        return None
    if view.kind == "rl" and (view.source.request or {}).get("validation_file"):
        return None
    return "validation_file" if [span.phase for span in view.timeline].count("downloading") > 1 else "training_file"


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
    """Return all events of a job, newest first."""
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
            return _event(view, name, event.time, event_in_words(event), level="error")
        case _:
            return _event(view, name, event.time, event_in_words(event))


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
