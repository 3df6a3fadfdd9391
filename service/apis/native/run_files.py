"""More endpoints of runs in the native API: overview and sparklines, reports, job files, rollouts."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import Field

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.principals import Asking
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.native.runs import TEXT, StepNumber
from service.backend import Backed
from service.errors import Conflict
from service.runs.files import GroupTexts, JobFile, RunReport, Traces
from service.runs.overview import Overview, Sparkline
from shared.runs.requests import RunId
from shared.storage.staging import MAX_PROFILED_STEPS, PROFILE_ID, ProfileRequest

router = APIRouter(route_class=JsonRoute)
JobId = Annotated[str, Path(pattern=r"^[0-9]{6}$")]
ProfileId = Annotated[str, Path(pattern=PROFILE_ID)]
FenceLabel = Annotated[str, Path(pattern=r"^e[0-9]{6}-a[0-9]{2}$")]


class AskedProfile(Frozen):
    """How many steps a trace is to have, at most: a job has only those that are left of it."""

    steps: int = Field(default=3, ge=1, le=MAX_PROFILED_STEPS)


@router.get("/overview")
async def show_overview(backend: Backed, asking: Asking) -> Overview:
    """Counts of runs by state, positions in the queue for workers, and the titles of keys."""
    return await backend.overviews.show(asking.tenant)


@router.get("/sparklines")
async def list_sparklines(
    backend: Backed, asking: Asking, run_id: Annotated[list[RunId], Query(max_length=200)]
) -> dict[RunId, Sparkline]:
    """The loss of runs, or the reward of RL runs, in a few dozen numbers each. Unknown runs are left out."""
    runs = await backend.runs.of(asking.tenant, run_id)
    lines = await asyncio.gather(*(backend.overviews.sparkline(run) for run in runs))
    return {run.run_id: line for run, line in zip(runs, lines, strict=True)}


@router.get("/runs/{run_id}/report")
async def run_report(run_id: RunId, backend: Backed, asking: Asking) -> RunReport:
    """Reports of tokenizing and packing, as far as they have come."""
    status = await backend.runs.view(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.report, status)


@router.get("/runs/{run_id}/jobs")
async def list_jobs(run_id: RunId, backend: Backed, asking: Asking) -> tuple[JobFile, ...]:
    """Every attempt at every job of a run, in order."""
    await backend.runs.record(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.jobs, run_id)


@router.get("/runs/{run_id}/jobs/{job_id}/{fence}", response_class=Response)
async def show_job(run_id: RunId, job_id: JobId, fence: FenceLabel, backend: Backed, asking: Asking) -> Response:
    """The job file as the worker was given it, to the byte."""
    await backend.runs.record(asking.tenant, run_id)
    data = await asyncio.to_thread(backend.run_files.job, run_id, job_id, fence)
    return Response(data, media_type="application/json")


@router.get("/runs/{run_id}/jobs/{job_id}/{fence}/output", response_class=Response, responses=TEXT)
async def show_output(run_id: RunId, job_id: JobId, fence: FenceLabel, backend: Backed, asking: Asking) -> Response:
    """The end of stdout and stderr of the worker of a failed attempt."""
    await backend.runs.record(asking.tenant, run_id)
    data = await asyncio.to_thread(backend.run_files.output, run_id, job_id, fence)
    return PlainTextResponse(data)


@router.post("/runs/{run_id}/profiles", status_code=202)
async def ask_profile(run_id: RunId, body: JsonBody[AskedProfile], backend: Backed, asking: Asking) -> ProfileRequest:
    """Trace a run's next optimizer steps with torch's profiler. 409 when it has ended, or one is waited for."""
    if (await backend.runs.view(asking.tenant, run_id)).state != "running":
        raise Conflict(f"{run_id} does not run: there are no steps to come")
    audit.touched(run_id)
    return await backend.run_files.ask_profile(asking.tenant, run_id, body.steps)


@router.get("/runs/{run_id}/profiles")
async def list_profiles(run_id: RunId, backend: Backed, asking: Asking) -> Traces:
    """The traces of a run's steps, and the one that is waited for."""
    await backend.runs.record(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.traces, run_id)


@router.get("/runs/{run_id}/jobs/{job_id}/{fence}/profiles/{profile_id}", response_class=Response)
async def show_profile(
    run_id: RunId, job_id: JobId, fence: FenceLabel, profile_id: ProfileId, backend: Backed, asking: Asking
) -> StreamingResponse:
    """One trace, as Perfetto opens it: Chrome's JSON, as gzip."""
    await backend.runs.record(asking.tenant, run_id)
    pieces = await asyncio.to_thread(backend.run_files.trace, run_id, job_id, fence, profile_id)
    return StreamingResponse(pieces, media_type="application/gzip")


@router.get("/runs/{run_id}/checkpoints/{fence}/{step}/download", response_class=Response)
async def download_checkpoint(
    run_id: RunId, fence: FenceLabel, step: StepNumber, backend: Backed, asking: Asking
) -> StreamingResponse:
    """A checkpoint as a tar, with its manifest."""
    await backend.runs.record(asking.tenant, run_id)
    files = await asyncio.to_thread(backend.run_files.checkpoint, run_id, fence, step)
    folder = f"{run_id}-{fence}-step-{step}"
    headers = {"content-disposition": f'attachment; filename="{folder}.tar"'}
    return StreamingResponse(files.tar(folder), media_type="application/x-tar", headers=headers)


@router.get("/runs/{run_id}/steps/{step}/rollouts")
async def step_rollouts(
    run_id: RunId, step: StepNumber, backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=32)] = 4
) -> tuple[GroupTexts, ...]:
    """The first groups of a train step as text, with their rewards. 409 where they are not kept here."""
    status = await backend.steps.show(asking.tenant, run_id, step, 0)
    return await asyncio.to_thread(backend.run_files.rollouts, run_id, status, limit)
