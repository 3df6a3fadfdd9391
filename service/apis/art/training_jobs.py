"""`/v1/preview/training-jobs` and `/v1/preview/sft-training-jobs`: train steps and runs under ART's names."""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from pydantic import BaseModel, ValidationError

from service.accounts.principals import Asking, reads_or_writes
from service.apis.art import sent_groups
from service.apis.art.job_events import JobStatus, TrainingEvent, TrainStep, error_of, read_step, sft_events, sft_status
from service.apis.art.job_request import ExperimentalConfig, RlRequest, SftConfig, SftRequest
from service.apis.art.job_runs import MODEL_LABEL
from service.apis.art.sent_groups import GROUPS
from service.apis.art.submission import submit_sft, submit_step
from service.apis.errors import describe
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.lists import ListAnswer
from service.backend import Backed, Backend
from service.files.files import uploads_folder
from service.runs.views import RunView
from shared.errors import InvalidInput, NotFound

router = APIRouter(route_class=JsonRoute, prefix="/v1/preview", tags=["art"], dependencies=[Depends(reads_or_writes)])

MAX_GROUPS_BYTES = 128 << 20
"""The largest train request: it is held in memory as text, and once more on disk."""
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


class JobObject(BaseModel):
    """A job as clients see it. `run_id`: the run that it is, or is a step of."""

    id: str
    object: Literal["training_job"] = "training_job"
    model_id: str
    kind: Literal["rl", "sft"]
    status: JobStatus
    error: str | None
    run_id: str


@router.post("/training-jobs", openapi_extra=_BODY)
async def create_job(request: Request, asking: Asking, backend: Backed) -> JobObject:
    """Train a model on trajectory groups: one optimizer step on all of them."""
    folder = uploads_folder(backend.settings.root_path)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with ExitStack() as files:
        body, lines = (files.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2))
        await _receive(request, body)
        sent = await asyncio.to_thread(_split, body, lines)
        asked = _asked(sent.fields)
        model = await backend.art_models.show(asking.tenant, asked.model_id)
        groups = await backend.files.receive(asking.tenant, _FILE_NAME, _pieces(lines), purpose=_PURPOSE)
    config = asked.experimental_config or ExperimentalConfig()
    run_id, step = await submit_step(backend, asking, model, config, groups.uri)
    return _of_step(await backend.runs.view(asking.tenant, run_id), TrainStep(f"{run_id}.{step.step}", step))


@router.post("/sft-training-jobs")
async def create_sft_job(body: JsonBody[SftRequest], asking: Asking, backend: Backed) -> JobObject:
    """Train a model on chats behind a URI, once through."""
    model = await backend.art_models.show(asking.tenant, body.model_id)
    view = await submit_sft(backend, asking, model, body.training_data_url, body.config or SftConfig())
    return _of_run(view)


@router.get("/training-jobs/{job_id}")
async def get_job(job_id: str, asking: Asking, backend: Backed) -> JobObject:
    """The current status of a job of either kind."""
    view, number = await _found(backend, asking.tenant, job_id)
    return _of_run(view) if number is None else _of_step(view, await read_step(backend, view, number))


@router.get("/training-jobs/{job_id}/events")
async def list_events(
    job_id: str,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256, description="the id of an event: what came behind it")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ListAnswer[TrainingEvent]:
    """Events of a job of either kind, oldest first."""
    view, number = await _found(backend, asking.tenant, job_id)
    if number is None:
        return await sft_events(backend, view, after, limit)
    return (await read_step(backend, view, number)).page(after, limit)


async def _receive(request: Request, file: BinaryIO) -> None:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_GROUPS_BYTES:
            raise HTTPException(413, f"a train request has at most {MAX_GROUPS_BYTES} bytes")
        await asyncio.to_thread(file.write, chunk)


def _split(body: BinaryIO, lines: BinaryIO) -> sent_groups.SentJob:
    body.seek(0)
    sent = sent_groups.split(body.read(), lines)
    lines.seek(0)
    return sent


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _asked(fields: dict[str, Any]) -> RlRequest:
    try:
        return RlRequest.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        problem = describe(error.errors())
        raise InvalidInput(problem.message, problem.place) from None


async def _found(backend: Backend, tenant: str, job_id: str) -> tuple[RunView, int | None]:
    """The run of a job, and its train step where it is one. Raises NotFound."""
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


def _of_run(view: RunView) -> JobObject:
    return JobObject(
        id=view.run_id,
        model_id=view.source.metadata[MODEL_LABEL],
        kind="sft",
        status=sft_status(view),
        error=error_of(view),
        run_id=view.run_id,
    )


def _of_step(view: RunView, step: TrainStep) -> JobObject:
    return JobObject(
        id=step.job_id,
        model_id=view.source.metadata[MODEL_LABEL],
        kind="rl",
        status=step.status,
        error=step.error,
        run_id=view.run_id,
    )
