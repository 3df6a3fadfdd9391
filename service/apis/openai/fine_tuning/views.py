"""Runs as fine-tuning jobs, and their checkpoints: the objects that OpenAI's clients read."""

import time
from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from service.apis.openai.fine_tuning.results import result_ids
from service.backend import Backend
from service.runs.views import RunView, seconds_left
from shared.runs.requests import DPORun, RLRun, SFTRun
from shared.runs.status import Phase

Status = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled", "paused"]

_VALIDATING: tuple[Phase, ...] = ("queued", "checking", "downloading", "tokenizing")
_WAITING: tuple[Phase, ...] = ("packing", "waiting_for_worker", "waiting_for_sampler")


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None = None


class Progress(BaseModel):
    """Our own fields: a job's progress. `step`: optimizer steps of `num_steps`; train steps of reinforcement jobs."""

    phase: Phase
    step: int
    num_steps: int | None
    gpu_seconds: float
    adapter: str | None


class JobObject(BaseModel):
    """A job as clients see it. `paused` is no status of OpenAI's list, and is what its API says."""

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
    status: Status
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    user_provided_suffix: str | None
    longshore: Progress


class JobCheckpoint(BaseModel):
    """A checkpoint as clients see it. `metrics`: those of its step, as far as they were measured."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
    step_number: int


def status_of(view: RunView) -> Status:
    """A run's state and phase in OpenAI's words."""
    if view.state != "running":
        return view.state
    if view.phase in _VALIDATING:
        return "validating_files"
    if view.phase in _WAITING and not view.step:
        return "queued"
    return "running"


def job_of(view: RunView, trained_tokens: int | None) -> JobObject:
    """
    Args:
        trained_tokens: of a job that has ended.
    """
    sent: dict[str, Any] = view.source.request or {}
    hyperparameters = sent.get("hyperparameters") or {}
    is_done = view.state == "succeeded"
    has_ended = view.state not in ("running", "paused")
    problem = view.problem if view.state == "failed" else None
    return JobObject(
        id=view.run_id,
        created_at=int(view.created_at),
        error=JobError(code=problem.kind, message=problem.message) if problem else None,
        estimated_finish=_estimated_finish(view),
        fine_tuned_model=f"{view.name}:v{view.version}" if is_done and view.version is not None else None,
        finished_at=int(view.ended_at) if has_ended and view.ended_at is not None else None,
        hyperparameters=hyperparameters if isinstance(view.run, SFTRun) else {},
        integrations=_integrations(view),
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
        longshore=Progress(
            phase=view.phase,
            step=view.step,
            num_steps=view.num_steps,
            gpu_seconds=view.gpu_seconds,
            adapter=view.adapter,
        ),
    )


def _method(run: SFTRun | DPORun | RLRun, hyperparameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    match run:
        case SFTRun():
            return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        case DPORun():
            return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
        case RLRun():
            grader = run.rollouts.grader.model_dump(mode="json") if run.rollouts else None
            settings: dict[str, JsonValue] = {"grader": grader, "hyperparameters": hyperparameters}
            return {"type": "reinforcement", "reinforcement": settings}


def _integrations(view: RunView) -> list[dict[str, JsonValue]] | None:
    if view.source.wandb is None:
        return None
    return [{"type": "wandb", "wandb": view.source.wandb.model_dump(mode="json", exclude_none=True)}]


def _estimated_finish(view: RunView) -> int | None:
    now = time.time()
    left_s = seconds_left(view, now)
    return None if left_s is None else int(now + left_s)


async def checkpoints_of(backend: Backend, view: RunView) -> list[JobCheckpoint]:
    """Newest first."""
    history = await backend.histories.of(view.run_id)
    saved_at, metrics = history.saved_at(), history.metrics()
    train = {row.step: row.metrics for row in metrics.steps}
    valid = {row.step: row.metrics for row in metrics.evaluations}
    steps = {found.step for found in await backend.reader.checkpoints(view.run_id)}
    return [
        JobCheckpoint(
            id=f"ftckpt-{view.run_id}-{step}",
            created_at=int(saved_at.get(step, view.created_at)),
            fine_tuned_model_checkpoint=checkpoint_name(view, step),
            fine_tuning_job_id=view.run_id,
            metrics=_metrics(step, train.get(step, {}), valid.get(step, {})),
            step_number=step,
        )
        for step in sorted(steps, reverse=True)
    ]


def checkpoint_name(view: RunView, step: int) -> str:
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
