"""A job's checkpoints: those that the store has, each a model that completions can be drawn from."""

from typing import Literal

from pydantic import BaseModel

from service.apis.openai.fine_tuning.events import JobEvents
from service.backend import Backend
from service.runs.views import RunView


class JobCheckpoint(BaseModel):
    """A checkpoint as clients see it. `metrics`: those of its step, as far as they were measured."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
    step_number: int


async def checkpoints_of(backend: Backend, events: JobEvents, view: RunView) -> list[JobCheckpoint]:
    """Newest first."""
    saved_at = await events.saved_at(view)
    metrics = await backend.reader.metrics(view.run_id)
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
    """The last one of a job that succeeded is what it published; the others go by their job and step."""
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
