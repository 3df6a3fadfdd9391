"""`/v1/preview/models`: models to be trained, and their checkpoints."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field, StrictBool

from longshore.fields import Frozen
from service.accounts.principals import Asking, reads_or_writes
from service.apis.art.job_config import ExperimentalConfig, SentModel
from service.apis.art.job_request import rl_run
from service.apis.art.training_jobs import cancel_open_run
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.lists import ListAnswer, RecordView, Seconds, page_after, page_of
from service.backend import Backed
from service.inference.art_models import ArtModel, ArtSettings, ArtWord, new_model
from shared.errors import InvalidInput
from shared.runs.acceptance import precision_of

router = APIRouter(
    route_class=JsonRoute, prefix="/v1/preview/models", tags=["art"], dependencies=[Depends(reads_or_writes)]
)

_PROJECT = "uncategorized"  # W&B's default project
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query(max_length=256, description="the id of the last item of the page before")]


class NewModel(SentModel):
    """A model to be registered. `entity`: the tenant, if absent."""

    entity: ArtWord | None = None
    project: ArtWord | None = None
    name: ArtWord | None = None
    base_model: str = Field(min_length=1, max_length=2048, description="a folder, file:// or s3:// URI, or a hub id")
    return_existing: StrictBool = Field(default=False, description="false: refuse a name that is taken")
    longshore: ArtSettings = Field(
        default=ArtSettings(), description="Longshore's settings for all of the model's jobs"
    )


class ModelObject(RecordView):
    """A model as clients see it. `published_as`: the name of its adapters among all that is published."""

    id: str = Field(validation_alias="model_id")
    object: Literal["model"] = "model"
    entity: str
    project: str
    name: str
    base_model: str
    run_id: None = Field(default=None, description="of W&B: there is none")
    created_at: Seconds
    published_as: str
    longshore: ArtSettings = Field(validation_alias="settings")


class CheckpointObject(BaseModel):
    """A model after a job that changed it. `model`: its name in requests for completions."""

    id: str
    object: Literal["checkpoint"] = "checkpoint"
    step: int
    metrics: dict[str, float]
    model: str


class Steps(Frozen):
    """Checkpoints to be deleted."""

    steps: tuple[Annotated[int, Field(ge=0, le=10**6)], ...] = Field(max_length=10_000)


class DeletedCheckpoints(BaseModel):
    deleted_count: int
    not_found_steps: list[int]


@router.post("")
async def register(body: JsonBody[NewModel], asking: Asking, backend: Backed) -> ModelObject:
    """Register a model, or find the one of this name. 409 when the name is another model's."""
    entity, project = body.entity or asking.tenant, body.project or _PROJECT
    precision = await asyncio.to_thread(precision_of, "auto", backend.settings, backend.store)
    model = new_model(asking.tenant, entity, project, body.name, body.base_model, body.longshore, precision.dtype)
    run = rl_run(model, ExperimentalConfig(), None)  # its settings apply to every job: a wrong one is refused here
    try:
        await backend.runs.check_run(asking.tenant, run, "longshore.")
    except InvalidInput as error:
        raise InvalidInput(error.message, "base_model" if error.place == "model" else error.place) from error
    return ModelObject.of(await backend.art_models.register(model, return_existing=body.return_existing))


@router.get("")
async def list_models(
    asking: Asking, backend: Backed, after: After = None, limit: Limit = 100
) -> ListAnswer[ModelObject]:
    """Models in order of registration."""
    found = [ModelObject.of(model) for model in await asyncio.to_thread(backend.art_models.all, asking.tenant)]
    return page_after(found, after, limit)


@router.get("/{model_id}")
async def get_model(model_id: str, asking: Asking, backend: Backed) -> ModelObject:
    """Show a model."""
    return ModelObject.of(await backend.art_models.show(asking.tenant, model_id))


@router.delete("/{model_id}", status_code=204)
async def delete_model(model_id: str, asking: Asking, backend: Backed) -> Response:
    """Delete a model and its checkpoints, and cancel its active job. Its runs stay on record."""
    model = await backend.art_models.show(asking.tenant, model_id)
    await cancel_open_run(backend, asking.tenant, model)
    await asyncio.to_thread(backend.art_models.delete, model)
    return Response(status_code=204)


@router.get("/{model_id}/checkpoints")
async def list_checkpoints(
    model_id: str, asking: Asking, backend: Backed, after: After = None, limit: Limit = 100, order: Order = "asc"
) -> ListAnswer[CheckpointObject]:
    """Checkpoints of the model's jobs, by step. The base model, step 0, is none of them."""
    model = await backend.art_models.show(asking.tenant, model_id)
    steps = sorted(await asyncio.to_thread(backend.art_models.steps, model), reverse=order == "desc")
    if after is not None:
        ids = [_id(model, step) for step in steps]
        if after not in ids:
            raise InvalidInput("there is no item of this id", "after")
        steps = steps[ids.index(after) + 1 :]
    found = []
    for step in steps[:limit]:
        metrics, name = await asyncio.to_thread(backend.art_models.metrics, model, step), f"{model.title}:step{step}"
        found.append(CheckpointObject(id=_id(model, step), step=step, metrics=metrics, model=name))
    return page_of(found, has_more=len(steps) > limit)


@router.delete("/{model_id}/checkpoints")
async def delete_checkpoints(
    model_id: str, body: JsonBody[Steps], asking: Asking, backend: Backed
) -> DeletedCheckpoints:
    """Delete checkpoints by step. The newest is refused: the next job starts from it."""
    model = await backend.art_models.show(asking.tenant, model_id)
    count, missing = await asyncio.to_thread(backend.art_models.delete_steps, model, body.steps)
    return DeletedCheckpoints(deleted_count=count, not_found_steps=missing)


def _id(model: ArtModel, step: int) -> str:
    return f"{model.model_id}:step{step}"
