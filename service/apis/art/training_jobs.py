"""`/v1/preview/training-jobs` and `/v1/preview/sft-training-jobs`: train steps and runs under ART's names.

A model is trained by a sequence of runs; each starts from the model's newest version. Train steps with the same
settings go to one run, which keeps the optimizer's state. A change of settings, or a supervised job in between, ends
that run, and the next job starts another.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, JsonValue, ValidationError

from service.accounts.principals import Asking, Principal, reads_or_writes
from service.apis.art import sent_groups, wandb_artifacts
from service.apis.art.job_config import ExperimentalConfig, SftConfig
from service.apis.art.job_events import (
    JobStatus,
    JobStep,
    TrainingEvent,
    failure_message,
    read_step,
    sft_events,
    sft_status,
)
from service.apis.art.job_request import MODEL_LABEL, RlRequest, SftRequest, art_source, rl_run, sft_run
from service.apis.art.sent_groups import GROUPS
from service.apis.errors import validation_problem
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.lists import ListAnswer
from service.backend import Backed, Backend
from service.errors import Conflict
from service.inference.art_models import ArtModel
from service.runs.views.run_view import RunView
from shared.errors import InvalidInput, NotFound
from shared.runs.status import StepRequest, StepStatus

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
        files = str(body.path), str(lines)
        asked = _asked(await decoding.call(request, read_job, *files, is_small=body.is_small, is_large=True))
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
    if number is None:
        return await sft_events(backend, view, after, limit)
    return (await read_step(backend, view, number)).page(after, limit)


def read_job(body: str, lines: str) -> dict[str, JsonValue]:
    """Write the groups of a train request, which lies in a file, as lines into another. Returns its other fields.

    Raises InvalidInput.
    """
    with Path(lines).open("wb") as file:
        sent = sent_groups.split(Path(body).read_bytes(), file)
    _asked(sent.fields)
    return sent.fields


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
                await _end(backend, last)
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
            await _end(backend, last)
        run = run.model_copy(update={"initial_adapter": await backend.art_models.newest(model)})
        source = art_source(model, {"training_data_url": url, **config.model_dump(mode="json", exclude_none=True)})
        return await backend.runs.submit(asking, run, source=source)


async def cancel_open_run(backend: Backend, tenant: str, model: ArtModel) -> None:
    """Cancel a model's active job."""
    if (last := await _open_run(backend, tenant, model)) is not None:
        with suppress(Conflict):  # it has just ended
            await backend.runs.cancel(tenant, last.run_id)


async def _open_run(backend: Backend, tenant: str, model: ArtModel) -> RunView | None:
    """The model's newest run, if it is going on, or paused until this client's next step."""
    page = await backend.runs.page(tenant, limit=1, api="art", metadata={MODEL_LABEL: model.model_id})
    if not page.runs:
        return None
    view = await backend.runs.view(tenant, page.runs[0].run_id)
    return view if view.state == "running" or view.client_away else None


async def _end(backend: Backend, view: RunView) -> None:
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
