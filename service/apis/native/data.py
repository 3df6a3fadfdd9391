"""The native API's data: uploaded files, checks of a dataset before a run, and graders tried on a sample."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from longshore.fields import Frozen
from service.accounts.principals import Asking, reads_or_writes
from service.apis.json_bodies import JsonBody, JsonRoute
from service.backend import Backed
from service.files.files import FILE_NAME, FilePage, FileRecord
from shared.grading.graders import Grader, OneGrade, SampledItem
from shared.runs.previews import Preview, PreviewRequest

router = APIRouter(route_class=JsonRoute, dependencies=[Depends(reads_or_writes)])
_BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}},
    }
}


class GraderTrial(Frozen):
    """A grader and a sample to grade; without a sample the grader is only loaded."""

    grader: Grader
    sample: SampledItem | None = None


@router.post("/files", status_code=201, openapi_extra=_BYTES, responses={200: {"model": FileRecord}})
async def upload_file(
    request: Request,
    response: Response,
    backend: Backed,
    asking: Asking,
    name: Annotated[str, Query(description="a plain file name", json_schema_extra={"pattern": FILE_NAME})],
    content_length: Annotated[int, Header(ge=0, include_in_schema=False)] = 0,
) -> FileRecord:
    """Put the request's body into the store; its URI is a dataset's. The same file again has the same one, and 200."""
    asked_at = time.time()
    record = await backend.files.receive(asking.tenant, name, request.stream(), num_bytes=content_length)
    if record.created_at < asked_at:
        response.status_code = 200
    return record


@router.get("/files")
async def list_files(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=64, description="the `next` of the page before")] = None,
) -> FilePage:
    """Uploaded files, newest first."""
    return await backend.files.page(asking.tenant, limit=limit, after=after)


@router.get("/files/{file_id}")
async def get_file(file_id: str, backend: Backed, asking: Asking) -> FileRecord:
    """The record of an uploaded file."""
    return await backend.files.show(asking.tenant, file_id)


@router.get("/files/{file_id}/content", response_class=Response)
async def file_content(file_id: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """An uploaded file's bytes."""
    record = await backend.files.show(asking.tenant, file_id)
    headers = {"content-length": str(record.size), "etag": f'"{record.sha256}"'}
    return StreamingResponse(backend.files.content(record), media_type="application/octet-stream", headers=headers)


@router.delete("/files/{file_id}")
async def delete_file(file_id: str, backend: Backed, asking: Asking) -> FileRecord:
    """Delete an uploaded file. A run that has not read it yet fails."""
    return await backend.files.delete(asking.tenant, file_id)


@router.post("/validate")
async def validate(request: JsonBody[PreviewRequest], backend: Backed, asking: Asking) -> Preview:
    """Count a dataset's examples and tokens, and return the reason if a run would refuse it. Shows no rows."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named.model_copy(update={"num_rows": 0}))


@router.post("/preview")
async def preview(request: JsonBody[PreviewRequest], backend: Backed, asking: Asking) -> Preview:
    """The first rows of a dataset as a model will see them: which tokens are trained, and a report."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named)


@router.post("/graders/run")
async def try_grader(trial: JsonBody[GraderTrial], backend: Backed, asking: Asking) -> OneGrade:
    """Grade one sample, or check that the grader can be loaded. Without a grade, `error` says why."""
    await backend.runs.check_access(asking.tenant, trial)
    return await backend.checks.grade(asking.tenant, trial.grader, trial.sample)
