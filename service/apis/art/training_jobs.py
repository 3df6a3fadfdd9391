"""ART's API: its models, their training jobs, and the events of these."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field, JsonValue, StrictBool, ValidationError

from longshore.events import Step
from longshore.fields import Frozen
from longshore.views import RunView, StepStatus
from service.accounts.keys import Asking, Principal, reads_or_writes
from service.apis.art import wandb_artifacts
from service.apis.art.job_request import (
    GROUPS,
    MODEL_LABEL,
    ExperimentalConfig,
    RlRequest,
    SentModel,
    SftConfig,
    SftRequest,
    art_source,
    rl_run,
    sft_run,
    split,
)
from service.apis.bodies import (
    JsonBody,
    JsonRoute,
    ListAnswer,
    RecordView,
    Seconds,
    page_after,
    page_of,
    validation_problem,
)
from service.backend import Backed, Backend
from service.decoding import SMALL_BYTES
from service.inference.art_models import ArtModel, ArtSettings, ArtWord, finite_metrics, new_model
from service.runs.views import dropped, last_lines
from shared.errors import Conflict, InvalidInput, NotFound
from shared.runs.acceptance import precision_of
from shared.runs.status import StepRequest

# --- A job's events in the form of ART's client ---
# Its beginning, a `gradient_step` for every optimizer step, its end.
#
# The client converts every value of a gradient step to a number, and fails if one comes before the beginning's event.

EventType = Literal["training_started", "gradient_step", "training_ended", "training_failed"]
JobStatus = Literal["queued", "running", "succeeded", "failed"]
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


async def sft_events(backend: Backend, view: RunView) -> list[TrainingEvent]:
    """Return a supervised job's events, oldest first. A step that another worker has repeated comes again."""
    events: list[TrainingEvent] = []
    if view.num_steps is not None:
        events.append(_event(view.run_id, "training_started", {"num_sequences": view.num_steps}))
        events += [
            TrainingEvent(id=f"{view.run_id}:{item.cursor}", type="gradient_step", data=_numbers(item.event.metrics))
            for item in (await backend.histories.of(view.run_id)).events
            if isinstance(item.event, Step)
        ]
    return events if view.state == "running" else [*events, _end(view)]


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


# --- `/v1/preview/training-jobs` and `/v1/preview/sft-training-jobs`: train steps and runs under ART's names ---
#
# A model is trained by a sequence of runs; each starts from the model's newest version. Train steps with the same
# settings go to one run, which keeps the optimizer's state. A change of settings, or a supervised job in between, ends
# that run, and the next job starts another.

router = APIRouter(route_class=JsonRoute, prefix="/v1/preview", tags=["art"], dependencies=[Depends(reads_or_writes)])

MAX_GROUPS_BYTES = 128 << 20
"""The largest train request: a child process holds it in memory as text."""
_ID = re.compile(r"(?P<run>[a-z0-9][a-z0-9-]{0,62})(\.(?P<step>[1-9][0-9]{0,7}))?")
_PIECE_BYTES = 1 << 20
_FILE_NAME, _PURPOSE = "trajectories.jsonl", "trajectories"
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["model_id", GROUPS],
                    "properties": {
                        "model_id": {"type": "string"},
                        GROUPS: {"type": "array", "minItems": 1, "items": {"type": "object"}},
                        "experimental_config": {"type": ["object", "null"]},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
_ENDING_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.2


class ArtJob(BaseModel):
    """A job as clients see it. `run_id`: the run that it is, or is a step of."""

    id: str
    object: Literal["training_job"] = "training_job"
    model_id: str
    kind: Literal["rl", "sft"]
    status: JobStatus
    error: str | None
    run_id: str


@router.post("/training-jobs", openapi_extra=_BODY)
async def create_job(request: Request, asking: Asking, backend: Backed) -> ArtJob:
    """Train a model on trajectory groups: one optimizer step on all of them."""
    decoding = backend.decoding
    async with decoding.received(request, MAX_GROUPS_BYTES) as body, decoding.scratch() as lines:
        await backend.quotas.admit_bytes(asking.tenant, body.num_bytes)
        files, is_small = (str(body.path), str(lines)), body.num_bytes <= SMALL_BYTES
        sees = {"reads": [body.path], "writes": [lines]}
        asked = _asked(await decoding.call(request, read_job, *files, is_small=is_small, is_large=True, **sees))
        model = await backend.art_models.show(asking.tenant, asked.model_id)
        with lines.open("rb") as file:
            groups = await backend.files.receive(asking.tenant, _FILE_NAME, _pieces(file), purpose=_PURPOSE)
    config = asked.experimental_config or ExperimentalConfig()
    run_id, step = await submit_step(backend, asking, model, config, groups.uri)
    return _job(await backend.runs.view(asking.tenant, run_id), JobStep(f"{run_id}.{step.step}", step))


@router.post("/sft-training-jobs")
async def create_sft_job(body: JsonBody[SftRequest], asking: Asking, backend: Backed) -> ArtJob:
    """Train a model on chats behind a URI, once through."""
    model = await backend.art_models.show(asking.tenant, body.model_id)
    url = body.training_data_url
    if url.startswith(wandb_artifacts.URL):
        url = await wandb_artifacts.artifact_uri(backend, asking.tenant, url)
    return _job(await submit_sft(backend, asking, model, url, body.config or SftConfig()))


@router.get("/training-jobs/{job_id}")
async def get_job(job_id: str, asking: Asking, backend: Backed) -> ArtJob:
    """The current status of a job of either kind."""
    view, number = await _found(backend, asking.tenant, job_id)
    return _job(view, None if number is None else await read_step(backend, view, number))


@router.get("/training-jobs/{job_id}/events")
async def list_events(
    job_id: str,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256, description="the id of an event: return later ones")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ListAnswer[TrainingEvent]:
    """Events of a job of either kind, oldest first."""
    view, number = await _found(backend, asking.tenant, job_id)
    found = await sft_events(backend, view) if number is None else (await read_step(backend, view, number)).events()
    return page_after(found, after, limit)


def read_job(body: str, lines: str) -> dict[str, JsonValue]:
    """Write the groups of a train request, which lies in a file, as lines into another. Returns its other fields.

    Raises InvalidInput.
    """
    with Path(lines).open("wb") as file:
        fields = split(Path(body).read_bytes(), file)
    _asked(fields)
    return fields


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _asked(fields: dict[str, Any]) -> RlRequest:
    try:
        return RlRequest.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        problem = validation_problem(error.errors())
        raise InvalidInput(problem.message, problem.place) from None


async def _found(backend: Backend, tenant: str, job_id: str) -> tuple[RunView, int | None]:
    """The run of a job, and its train step if it is one. Raises NotFound."""
    missing = NotFound(f"there is no training job {job_id[:80]}")
    match = _ID.fullmatch(job_id)
    if match is None:
        raise missing
    try:
        view = await backend.runs.view(tenant, match["run"])
    except NotFound:
        raise missing from None
    number = int(match["step"]) if match["step"] else None
    if view.source.api != "art" or (view.kind == "rl") != (number is not None):
        raise missing
    return view, number


def _job(view: RunView, step: JobStep | None = None) -> ArtJob:
    """Return a run as a job, or its train step."""
    return ArtJob(
        id=step.job_id if step else view.run_id,
        model_id=view.source.metadata[MODEL_LABEL],
        kind="rl" if step else "sft",
        status=step.status if step else sft_status(view),
        error=step.error if step else failure_message(view),
        run_id=view.run_id,
    )


async def submit_step(
    backend: Backend, asking: Principal, model: ArtModel, config: ExperimentalConfig, groups: str
) -> tuple[str, StepStatus]:
    """Give a file of groups to the model's run, or start a run if there is none. Returns the run's id and the step.

    Raises:
        InvalidInput: names the field and the rule that it breaks.
        Conflict: the model is busy with a job of another kind, or of other settings.
        QuotaExceeded
    """
    wanted = rl_run(model, config, None)
    async with backend.art_models.lock(model.model_id):
        run_id = None
        if (last := await _open_run(backend, asking.tenant, model)) is not None:
            if last.run == wanted.model_copy(update={"initial_adapter": last.run.initial_adapter}):
                run_id = last.run_id
            else:
                await _job_end(backend, last)
        if run_id is None:
            run = wanted.model_copy(update={"initial_adapter": await backend.art_models.newest(model)})
            source = art_source(model, config.model_dump(mode="json", exclude_none=True))
            run_id = (await backend.runs.submit(asking, run, source=source)).run_id
        request = StepRequest(key=f"art-{secrets.token_hex(12)}", groups=groups)
        return run_id, await backend.steps.train(asking.tenant, run_id, request)


async def submit_sft(backend: Backend, asking: Principal, model: ArtModel, url: str, config: SftConfig) -> RunView:
    """Start a supervised job. Raises as `submit_step` does."""
    run = sft_run(model, url, config, None)
    await backend.runs.check_run(asking.tenant, run, "longshore.")
    async with backend.art_models.lock(model.model_id):
        if (last := await _open_run(backend, asking.tenant, model)) is not None:
            await _job_end(backend, last)
        run = run.model_copy(update={"initial_adapter": await backend.art_models.newest(model)})
        source = art_source(model, {"training_data_url": url, **config.model_dump(mode="json", exclude_none=True)})
        return await backend.runs.submit(asking, run, source=source)


async def _open_run(backend: Backend, tenant: str, model: ArtModel) -> RunView | None:
    """The model's newest run, if it is going on, or paused until this client's next step."""
    page = await backend.runs.page(tenant, limit=1, api="art", metadata={MODEL_LABEL: model.model_id})
    if not page.runs:
        return None
    view = await backend.runs.view(tenant, page.runs[0].run_id)
    return view if view.state == "running" or view.client_away else None


async def _job_end(backend: Backend, view: RunView) -> None:
    """Finish an RL run after the steps that it has. Raises Conflict for another kind of run, or if that takes long."""
    if view.kind == "rl":
        with suppress(Conflict):  # it has just ended
            await backend.steps.finish(view.tenant, view.run_id)
        deadline = time.monotonic() + _ENDING_PATIENCE_S
        while time.monotonic() < deadline:
            if (await backend.runs.view(view.tenant, view.run_id)).state != "running":
                return
            await asyncio.sleep(_LOOK_EVERY_S)
    raise Conflict(f"the model is busy with {view.run_id}, a job of another kind or other settings: wait for its end")


# --- `/v1/preview/models`: models to be trained, and their checkpoints ---

models_router = APIRouter(
    route_class=JsonRoute, prefix="/v1/preview/models", tags=["art"], dependencies=[Depends(reads_or_writes)]
)

_PROJECT = "uncategorized"  # W&B's default project
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query(max_length=256, description="the id of the previous page's last item")]


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
    run_id: None = Field(default=None, description="id of a W&B run: there is none")
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


@models_router.post("")
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


@models_router.get("")
async def list_models(
    asking: Asking, backend: Backed, after: After = None, limit: Limit = 100
) -> ListAnswer[ModelObject]:
    """Models in order of registration."""
    found = [ModelObject.of(model) for model in await backend.art_models.all(asking.tenant)]
    return page_after(found, after, limit)


@models_router.get("/{model_id}")
async def get_model(model_id: str, asking: Asking, backend: Backed) -> ModelObject:
    """Show a model."""
    return ModelObject.of(await backend.art_models.show(asking.tenant, model_id))


@models_router.delete("/{model_id}", status_code=204)
async def delete_model(model_id: str, asking: Asking, backend: Backed) -> Response:
    """Delete a model and its checkpoints, and cancel its active job. Its runs stay on record."""
    model = await backend.art_models.show(asking.tenant, model_id)
    if (last := await _open_run(backend, asking.tenant, model)) is not None:
        with suppress(Conflict):  # it has just ended
            await backend.runs.cancel(asking.tenant, last.run_id)
    await backend.art_models.delete(model)
    await backend.quotas.measure(model.tenant)
    return Response(status_code=204)


@models_router.get("/{model_id}/checkpoints")
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


@models_router.delete("/{model_id}/checkpoints")
async def delete_checkpoints(
    model_id: str, body: JsonBody[Steps], asking: Asking, backend: Backed
) -> DeletedCheckpoints:
    """Delete checkpoints by step. The newest is refused: the next job starts from it."""
    model = await backend.art_models.show(asking.tenant, model_id)
    count, missing = await asyncio.to_thread(backend.art_models.delete_steps, model, body.steps)
    await backend.quotas.measure(model.tenant)
    return DeletedCheckpoints(deleted_count=count, not_found_steps=missing)


def _id(model: ArtModel, step: int) -> str:
    return f"{model.model_id}:step{step}"
