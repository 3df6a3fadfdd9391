"""The native API's runs: submitted, followed, changed; their files, sessions, and data before a run."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field, RootModel

from longshore.commands import Asked, Forward, ForwardBackward
from longshore.fields import Frozen
from longshore.training import SessionRun
from service.accounts import audit
from service.accounts.keys import BEARER, Asking, reads_or_writes
from service.apis.bodies import JsonBody, JsonRoute, file_answer, tar_answer
from service.apis.errors import RESPONSES
from service.automation.upkeep import RunRemoved
from service.backend import Backed, Backend, IdempotencyKey
from service.errors import Conflict, TemporalUnavailable
from service.files import FILE_NAME, FilePage, FileRecord, PublishedFiles
from service.runs.estimates import Estimate
from service.runs.files import GroupTexts, JobFile, RunReport, Traces
from service.runs.history import Metrics
from service.runs.overview import Overview, Sparkline
from service.runs.sessions import CommandView
from service.runs.views import EventPage, RunPage, RunView, StepPage, last_lines, log_line
from shared.errors import StoreUnavailable
from shared.grading import Grader, OneGrade, SampledItem
from shared.jobs.commands import stored_form
from shared.runs.acceptance import precision_of
from shared.runs.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from shared.runs.previews import Preview, PreviewRequest
from shared.runs.requests import Kind, RLRun, Run, RunId, Source
from shared.runs.status import CheckpointRef, State, StepKey, StepRequest, StepStatus
from shared.storage import paths
from shared.storage.artifacts import FileEntry
from shared.storage.files import MAX_PROFILED_STEPS, PROFILE_ID, ProfileRequest

# --- The native API, `/api/v1`: runs, files and dataset checks. The CLI is one of its clients ---

PREFIX = "/api/v1"
DEPENDENCIES = [*BEARER, Depends(reads_or_writes)]
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""Responses of an operation that answers in text; its errors are JSON."""
router = APIRouter(route_class=JsonRoute, prefix=PREFIX, dependencies=DEPENDENCIES, responses=RESPONSES)
open_router = APIRouter(prefix=PREFIX)
"""Operations that need no key."""
_POLL_S = 0.5
_EVENTS_AT_ONCE = 1000
_CLIENT_IS_GONE_S = 86_400.0
_LAST_STEP = 99_999_999
StepNumber = Annotated[int, Path(ge=0, le=_LAST_STEP)]
_HEALTH_PATIENCE_S = 5.0


class Health(Frozen):
    """The service's view of Temporal and the store."""

    status: Literal["ok", "degraded"]
    temporal: str
    store: str
    temporal_ui: str | None = None


@open_router.get("/health", responses={503: {"model": Health}})
async def health(backend: Backed) -> JSONResponse:
    """The service's health, open to everybody, so without anything about runs."""
    temporal, store = await asyncio.gather(_check_temporal(backend), _check_store(backend))
    ok = temporal == store == "ok"
    body = Health(
        status="ok" if ok else "degraded", temporal=temporal, store=store, temporal_ui=backend.settings.temporal_ui
    )
    return JSONResponse(body.model_dump(), status_code=200 if ok else 503)


async def alive() -> dict[str, str]:
    """Say that this process answers: to restart it would not bring Temporal or the store back."""
    return {"status": "ok"}


async def _check_temporal(backend: Backend) -> str:
    try:
        await backend.temporal.check()
        return "ok"
    except (TemporalUnavailable, StoreUnavailable):  # the first connection asks the store which keys are ours
        return "away"


async def _check_store(backend: Backend) -> str:
    try:
        async with asyncio.timeout(_HEALTH_PATIENCE_S):
            await asyncio.to_thread(backend.store.head, paths.run_index("health"))
        return "ok"
    except (StoreUnavailable, OSError):  # a TimeoutError is an OSError
        return "away"


class RunRequest(RootModel[SFTRun | DPORun | DistillRun | RewardRun | RLRun]):
    """A run, by its `kind`."""

    root: SFTRun | DPORun | DistillRun | RewardRun | RLRun = Field(discriminator="kind")


async def _source(request: Request) -> Source:
    """Return the source recorded in runs of this request. The middleware (edge.py) knows sessions."""
    return Source(api="page" if request.state.is_from_page else "native")


SentBy = Annotated[Source, Depends(_source)]


async def _submitting(
    backend: Backed, asking: Asking, source: SentBy, idempotency_key: IdempotencyKey = None
) -> Callable[[Run], Awaitable[RunView]]:
    """Return a function that starts a run. A repeated key gives the same run, whatever its names mean by then."""

    async def submit(run: Run) -> RunView:
        named = await asyncio.to_thread(backend.names.resolved, asking.tenant, run)
        return await backend.runs.submit(asking, named, idempotency_key, source, asked=run)

    return submit


Submits = Annotated[Callable[[Run], Awaitable[RunView]], Depends(_submitting)]


@router.post("/runs/sft", status_code=201)
async def submit_sft(run: JsonBody[SFTRun], submit: Submits) -> RunView:
    """Start a supervised fine-tuning run. The same Idempotency-Key gives the same run."""
    return await submit(run)


@router.post("/runs/dpo", status_code=201)
async def submit_dpo(run: JsonBody[DPORun], submit: Submits) -> RunView:
    """Start a run that learns from preferences: pairs, or answers with a label. The same Idempotency-Key gives the same
    run."""
    return await submit(run)


@router.post("/runs/distill", status_code=201)
async def submit_distill(run: JsonBody[DistillRun], submit: Submits) -> RunView:
    """Start a run whose student becomes like its teacher on a dataset. The same Idempotency-Key gives the same run."""
    return await submit(run)


@router.post("/runs/reward", status_code=201)
async def submit_reward(run: JsonBody[RewardRun], submit: Submits) -> RunView:
    """Start a run that trains a reward model, of pairs or of scores. The same Idempotency-Key gives the same run."""
    return await submit(run)


@router.post("/runs/rl", status_code=201)
async def submit_rl(run: JsonBody[RLRun], submit: Submits) -> RunView:
    """Start a reinforcement-learning run, which waits for train steps. The same Idempotency-Key gives the same run."""
    return await submit(run)


@router.post("/estimate")
async def estimate_run(run: JsonBody[RunRequest], backend: Backed, asking: Asking) -> Estimate:
    """What a run would be: steps and tokens, counted; time and cost, where earlier runs of its model tell. Starts
    nothing."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, run.root)
    precision = await asyncio.to_thread(precision_of, named.dtype, backend.settings, backend.store)
    found = await backend.estimates.of(asking.tenant, named.model_copy(update={"dtype": precision.dtype}))
    return found.model_copy(update={"precision": precision})


class StepSubmission(Frozen):
    """One train step. The same key trains once, however often it is sent."""

    key: StepKey
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL; POST /files returns one")
    wait_s: float = Field(default=0, ge=0, le=60, description="how long to wait for the step's end")


@router.post("/runs/{run_id}/steps", status_code=202)
async def train_step(run_id: RunId, step: JsonBody[StepSubmission], backend: Backed, asking: Asking) -> StepStatus:
    """Train one file of trajectory groups, after those that came before. 409 when the run takes no more."""
    return await backend.steps.train(asking.tenant, run_id, StepRequest(key=step.key, groups=step.groups), step.wait_s)


@router.get("/runs/{run_id}/steps")
async def list_steps(
    run_id: RunId,
    backend: Backed,
    asking: Asking,
    after: Annotated[int | None, Query(ge=0, le=_LAST_STEP, description="the `next` of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> StepPage:
    """The train steps of an RL run that have ended, in order. 409 for a run of another kind."""
    await backend.steps.record(asking.tenant, run_id)
    return await backend.reader.steps(run_id, after, limit)


@router.get("/runs/{run_id}/steps/{step}")
async def get_step(
    run_id: RunId,
    step: StepNumber,
    backend: Backed,
    asking: Asking,
    wait_s: Annotated[float, Query(ge=0, le=60, description="how long to wait for the step's end")] = 0,
) -> StepStatus:
    """A train step's current status. 0: the policy before the first, of a run that evaluates its own rollouts."""
    return await backend.steps.show(asking.tenant, run_id, step, wait_s)


@router.post("/runs/{run_id}/finish", status_code=202)
async def finish_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """Tell an RL run that no more steps come: it ends after those that wait. 409 when it has ended."""
    return await backend.steps.finish(asking.tenant, run_id)


@router.get("/runs")
async def list_runs(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[RunId | None, Query(description="the `next` of the previous page")] = None,
    state: State | None = None,
    kind: Kind | None = None,
    words: Annotated[str | None, Query(max_length=128, description="text in the id, the name or the model")] = None,
    idle: Annotated[bool, Query(description="include sessions that have waited for a command for a day")] = False,
) -> RunPage:
    """Runs, newest first, as they stood a second ago at most.

    Sessions that have waited for a command for a day are only listed where `idle`, `kind`, `state` or `words` ask for
    them.
    """
    is_asked_for = idle or kind or state or words
    since = None if is_asked_for else time.time() - _CLIENT_IS_GONE_S
    return await backend.runs.page(
        asking.tenant, limit=limit, after=after, state=state, kind=kind, words=words, no_session_idle_since=since
    )


@router.get("/runs/{run_id}")
async def get_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """A run's current status."""
    return await backend.runs.view(asking.tenant, run_id)


@router.post("/runs/{run_id}/cancel", status_code=202)
async def cancel_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """End a run: at its next step boundary with a checkpoint, or at once where it does not train. 409 when it has."""
    return await backend.runs.cancel(asking.tenant, run_id)


@router.post("/runs/{run_id}/resume", status_code=202)
async def resume_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """Go on from the last checkpoint of a paused, failed or cancelled run. 409 for any other."""
    return await backend.runs.resume(asking.tenant, run_id)


@router.post("/runs/{run_id}/pause", status_code=202)
async def pause_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """End a run at its next step boundary, with a checkpoint, to be resumed later. 409 when it has ended."""
    return await backend.runs.pause(asking.tenant, run_id)


@router.post("/runs/{run_id}/retry", status_code=201)
async def retry_run(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """A failed or cancelled run's request as a new run, from the beginning. 409 for any other."""
    return await backend.runs.retry(asking, run_id)


@router.delete("/runs/{run_id}")
async def remove_run(run_id: RunId, backend: Backed, asking: Asking) -> RunRemoved:
    """Remove a run that has ended, with its checkpoints and logs. What it published stays. 409 while it is needed."""
    return await backend.removals.remove(asking.tenant, run_id)


@router.get("/runs/{run_id}/events", response_model=EventPage)
async def run_events(
    run_id: RunId,
    request: Request,
    backend: Backed,
    asking: Asking,
    after: Annotated[str | None, Query(max_length=256, description="the `next` of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    wait_s: Annotated[float, Query(ge=0, le=60, description="how many seconds to wait for the first new event")] = 0,
) -> Any:
    """The workers' events, in order.

    `Accept: text/event-stream` streams until the run ends (`Last-Event-ID` continues a stream);
    `application/x-ndjson` gives lines.
    """
    await backend.runs.record(asking.tenant, run_id)
    wanted = request.headers.get("accept", "")
    if "text/event-stream" in wanted:
        after = request.headers.get("last-event-id") or after
        return StreamingResponse(_event_stream(backend, asking.tenant, run_id, after), media_type="text/event-stream")
    page = await _events_within(backend, asking.tenant, run_id, after, limit, wait_s)
    if "application/x-ndjson" in wanted:
        lines = "".join(item.model_dump_json() + "\n" for item in page.events)
        return PlainTextResponse(lines, media_type="application/x-ndjson")
    return page


async def _events_within(
    backend: Backend, tenant: str, run_id: str, after: str | None, limit: int, wait_s: float
) -> EventPage:
    end = asyncio.get_running_loop().time() + wait_s
    while True:
        page = await backend.reader.events(run_id, after, limit)
        if page.events or asyncio.get_running_loop().time() >= end or await _has_ended(backend, tenant, run_id):
            return page
        await asyncio.sleep(_POLL_S)


async def _event_pages(backend: Backend, tenant: str, run_id: str, after: str | None) -> AsyncIterator[EventPage]:
    """Yield pages of events as they come, until the run has ended and all were read."""
    while True:
        ended = await _has_ended(backend, tenant, run_id)  # first, so that the next page is complete if it has ended
        page = await backend.reader.events(run_id, after, _EVENTS_AT_ONCE)
        yield page
        after = page.next or after
        if not page.events:
            if ended:
                return
            await asyncio.sleep(_POLL_S)


async def _has_ended(backend: Backend, tenant: str, run_id: str) -> bool:
    return (await backend.runs.view(tenant, run_id)).state != "running"


async def _event_stream(backend: Backend, tenant: str, run_id: str, after: str | None) -> AsyncIterator[str]:
    async for page in _event_pages(backend, tenant, run_id, after):
        for item in page.events:
            yield f"id: {item.cursor}\nevent: {item.event.event}\ndata: {item.model_dump_json()}\n\n"
        if not page.events:
            yield ": waiting\n\n"  # a comment keeps proxies from closing a quiet stream
    yield f"event: end\ndata: {(await backend.runs.view(tenant, run_id)).model_dump_json()}\n\n"


@router.get("/runs/{run_id}/metrics")
async def run_metrics(run_id: RunId, backend: Backed, asking: Asking) -> Metrics:
    """A run's metrics by step, of the newest worker where a step was done twice; of an RL run also its train steps'."""
    await backend.runs.record(asking.tenant, run_id)
    return (await backend.histories.of(run_id)).metrics()


@router.get("/runs/{run_id}/logs", response_class=Response, responses=TEXT)
async def run_logs(run_id: RunId, backend: Backed, asking: Asking, follow: bool = False) -> Response:
    """The run's log, in lines of text."""
    await backend.runs.record(asking.tenant, run_id)
    return StreamingResponse(_log_lines(backend, asking.tenant, run_id, follow), media_type="text/plain; charset=utf-8")


async def _log_lines(backend: Backend, tenant: str, run_id: str, follow: bool) -> AsyncIterator[str]:
    async for page in _event_pages(backend, tenant, run_id, None):
        for item in page.events:
            yield log_line(item) + "\n"
        if not page.events and not follow:
            break
    yield "".join(line + "\n" for line in last_lines(await backend.runs.view(tenant, run_id)))


@router.get("/runs/{run_id}/checkpoints")
async def run_checkpoints(run_id: RunId, backend: Backed, asking: Asking) -> tuple[CheckpointRef, ...]:
    """Checkpoints in the store, oldest first."""
    await backend.runs.record(asking.tenant, run_id)
    return await asyncio.to_thread(backend.reader.checkpoints, run_id)


@router.get("/runs/{run_id}/files")
async def run_files(run_id: RunId, backend: Backed, asking: Asking) -> tuple[FileEntry, ...]:
    """The files that the run published: paths, sizes, hashes. 409 before that."""
    return (await _published(backend, asking.tenant, run_id)).entries


@router.get("/runs/{run_id}/files/{path:path}", response_class=Response)
async def run_file(run_id: RunId, path: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """One published file."""
    return file_answer(await _published(backend, asking.tenant, run_id), path)


@router.get("/runs/{run_id}/download", response_class=Response)
async def download_run(run_id: RunId, backend: Backed, asking: Asking) -> StreamingResponse:
    """Everything that the run published, as a tar."""
    return tar_answer(await _published(backend, asking.tenant, run_id), run_id)


async def _published(backend: Backend, tenant: str, run_id: str) -> PublishedFiles:
    status = await backend.runs.view(tenant, run_id)
    return await asyncio.to_thread(PublishedFiles.of, status, backend.settings.s3)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


# --- More endpoints of runs in the native API: overview and sparklines, reports, job files, rollouts ---

files_router = APIRouter(route_class=JsonRoute)
JobId = Annotated[str, Path(pattern=r"^[0-9]{6}$")]
ProfileId = Annotated[str, Path(pattern=PROFILE_ID)]
FenceLabel = Annotated[str, Path(pattern=r"^e[0-9]{6}-a[0-9]{2}$")]


class AskedProfile(Frozen):
    """How many steps a trace is to have, at most: a job has only those that are left of it."""

    steps: int = Field(default=3, ge=1, le=MAX_PROFILED_STEPS)


@files_router.get("/overview")
async def show_overview(backend: Backed, asking: Asking) -> Overview:
    """Counts of runs by state, positions in the queue for workers, and the titles of keys."""
    return await backend.overviews.show(asking.tenant)


@files_router.get("/sparklines")
async def list_sparklines(
    backend: Backed, asking: Asking, run_id: Annotated[list[RunId], Query(max_length=200)]
) -> dict[RunId, Sparkline]:
    """The loss of runs, or the reward of RL runs, in a few dozen numbers each. Unknown runs are left out."""
    runs = await backend.runs.of(asking.tenant, run_id)
    lines = await asyncio.gather(*(backend.overviews.sparkline(run) for run in runs))
    return {run.run_id: line for run, line in zip(runs, lines, strict=True)}


@files_router.get("/runs/{run_id}/report")
async def run_report(run_id: RunId, backend: Backed, asking: Asking) -> RunReport:
    """Reports of tokenizing and packing, as far as they have come."""
    status = await backend.runs.view(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.report, status)


@files_router.get("/runs/{run_id}/jobs")
async def list_jobs(run_id: RunId, backend: Backed, asking: Asking) -> tuple[JobFile, ...]:
    """Every attempt at every job of a run, in order."""
    await backend.runs.record(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.jobs, run_id)


@files_router.get("/runs/{run_id}/jobs/{job_id}/{fence}", response_class=Response)
async def show_job(run_id: RunId, job_id: JobId, fence: FenceLabel, backend: Backed, asking: Asking) -> Response:
    """The job file as the worker was given it, to the byte."""
    await backend.runs.record(asking.tenant, run_id)
    data = await asyncio.to_thread(backend.run_files.job, run_id, job_id, fence)
    return Response(data, media_type="application/json")


@files_router.get("/runs/{run_id}/jobs/{job_id}/{fence}/output", response_class=Response, responses=TEXT)
async def show_output(run_id: RunId, job_id: JobId, fence: FenceLabel, backend: Backed, asking: Asking) -> Response:
    """The end of stdout and stderr of the worker of a failed attempt."""
    await backend.runs.record(asking.tenant, run_id)
    data = await asyncio.to_thread(backend.run_files.output, run_id, job_id, fence)
    return PlainTextResponse(data)


@files_router.post("/runs/{run_id}/profiles", status_code=202)
async def ask_profile(run_id: RunId, body: JsonBody[AskedProfile], backend: Backed, asking: Asking) -> ProfileRequest:
    """Trace a run's next optimizer steps with torch's profiler. 409 when it has ended, or one is waited for."""
    if (await backend.runs.view(asking.tenant, run_id)).state != "running":
        raise Conflict(f"{run_id} does not run: there are no steps to come")
    audit.touched(run_id)
    return await backend.run_files.ask_profile(asking.tenant, run_id, body.steps)


@files_router.get("/runs/{run_id}/profiles")
async def list_profiles(run_id: RunId, backend: Backed, asking: Asking) -> Traces:
    """The traces of a run's steps, and the one that is waited for."""
    await backend.runs.record(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.traces, run_id)


@files_router.get("/runs/{run_id}/jobs/{job_id}/{fence}/profiles/{profile_id}", response_class=Response)
async def show_profile(
    run_id: RunId, job_id: JobId, fence: FenceLabel, profile_id: ProfileId, backend: Backed, asking: Asking
) -> StreamingResponse:
    """One trace, as Perfetto opens it: Chrome's JSON, as gzip."""
    await backend.runs.record(asking.tenant, run_id)
    pieces = await asyncio.to_thread(backend.run_files.trace, run_id, job_id, fence, profile_id)
    return StreamingResponse(pieces, media_type="application/gzip")


@files_router.get("/runs/{run_id}/checkpoints/{fence}/{step}/download", response_class=Response)
async def download_checkpoint(
    run_id: RunId, fence: FenceLabel, step: StepNumber, backend: Backed, asking: Asking
) -> StreamingResponse:
    """A checkpoint as a tar, with its manifest."""
    await backend.runs.record(asking.tenant, run_id)
    files = await asyncio.to_thread(backend.run_files.checkpoint, run_id, fence, step)
    folder = f"{run_id}-{fence}-step-{step}"
    headers = {"content-disposition": f'attachment; filename="{folder}.tar"'}
    return StreamingResponse(files.tar(folder), media_type="application/x-tar", headers=headers)


@files_router.get("/runs/{run_id}/steps/{step}/rollouts")
async def step_rollouts(
    run_id: RunId, step: StepNumber, backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=32)] = 4
) -> tuple[GroupTexts, ...]:
    """The first groups of a train step as text, with their rewards. 409 where they are not kept here."""
    status = await backend.steps.show(asking.tenant, run_id, step, 0)
    return await asyncio.to_thread(backend.run_files.rollouts, run_id, status, limit)


# --- The native API's sessions: a client trains a slot command by command ---

sessions_router = APIRouter(route_class=JsonRoute, dependencies=[Depends(reads_or_writes)])
Number = Annotated[int, Path(ge=1, le=99_999_999, description="commands run in the order of their numbers, from 1")]
Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for the result")]


class SentCommand(RootModel[Asked]):
    """A command, by its `kind`."""

    def packed(self) -> bytes | None:
        return stored_form(self.root) if isinstance(self.root, Forward | ForwardBackward) else None

    @classmethod
    def of_packed(cls, data: bytes) -> "SentCommand":
        return cls.model_construct(data)  # type: ignore[arg-type]  # the command's file, which is not parsed here


@sessions_router.post("/sessions", status_code=201)
async def open_session(
    session: JsonBody[SessionRun], backend: Backed, asking: Asking, idempotency_key: IdempotencyKey = None
) -> RunView:
    """Open a session. The same Idempotency-Key gives the same session. It is a run: /runs has its events and end."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, session)
    return await backend.runs.submit(asking, named, idempotency_key, asked=session)


@sessions_router.get("/sessions")
async def list_sessions(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[RunId | None, Query(description="the `next` of the previous page")] = None,
    state: State | None = None,
) -> RunPage:
    """Sessions, newest first, as they stood a second ago at most."""
    return await backend.runs.page(asking.tenant, limit=limit, after=after, state=state, kind="session")


@sessions_router.put("/sessions/{run_id}/commands/{number}", status_code=202)
async def send_command(
    run_id: RunId, number: Number, command: JsonBody[SentCommand], backend: Backed, asking: Asking, wait_s: Wait = 0
) -> CommandView:
    """Send a command, which is durable when this answers, and done once however often it is sent."""
    return await backend.sessions.send(asking.tenant, run_id, number, command.root, wait_s)


@sessions_router.get("/sessions/{run_id}/commands/{number}")
async def get_command(run_id: RunId, number: Number, backend: Backed, asking: Asking, wait_s: Wait = 0) -> CommandView:
    """A command's state, or its result."""
    return await backend.sessions.show(asking.tenant, run_id, number, wait_s)


@sessions_router.post("/sessions/{run_id}/close", status_code=202)
async def close_session(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """Take no more commands: the session ends after those that wait, and its state stays. 409 when it has ended."""
    return await backend.sessions.close(asking.tenant, run_id)


# --- The native API's data: uploaded files, checks of a dataset before a run, and graders tried on a sample ---

data_router = APIRouter(route_class=JsonRoute, dependencies=[Depends(reads_or_writes)])
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


@data_router.post("/files", status_code=201, openapi_extra=_BYTES, responses={200: {"model": FileRecord}})
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


@data_router.get("/files")
async def list_files(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=64, description="the `next` of the previous page")] = None,
) -> FilePage:
    """Uploaded files, newest first."""
    return await backend.files.page(asking.tenant, limit=limit, after=after)


@data_router.get("/files/{file_id}")
async def get_file(file_id: str, backend: Backed, asking: Asking) -> FileRecord:
    """The record of an uploaded file."""
    return await backend.files.show(asking.tenant, file_id)


@data_router.get("/files/{file_id}/content", response_class=Response)
async def file_content(file_id: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """An uploaded file's bytes."""
    record = await backend.files.show(asking.tenant, file_id)
    headers = {"content-length": str(record.size), "etag": f'"{record.sha256}"'}
    return StreamingResponse(backend.files.content(record), media_type="application/octet-stream", headers=headers)


@data_router.delete("/files/{file_id}")
async def delete_file(file_id: str, backend: Backed, asking: Asking) -> FileRecord:
    """Delete an uploaded file. A run that has not read it yet fails."""
    return await backend.files.delete(asking.tenant, file_id)


@data_router.post("/validate")
async def validate(request: JsonBody[PreviewRequest], backend: Backed, asking: Asking) -> Preview:
    """Count a dataset's examples and tokens, and return the reason if a run would refuse it. Shows no rows."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named.model_copy(update={"num_rows": 0}))


@data_router.post("/preview")
async def preview(request: JsonBody[PreviewRequest], backend: Backed, asking: Asking) -> Preview:
    """The first rows of a dataset as a model will see them: which tokens are trained, and a report."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named)


@data_router.post("/graders/run")
async def try_grader(trial: JsonBody[GraderTrial], backend: Backed, asking: Asking) -> OneGrade:
    """Grade one sample, or check that the grader can be loaded. Without a grade, `error` says why."""
    await backend.runs.check_access(asking.tenant, trial)
    return await backend.checks.grade(asking.tenant, trial.grader, trial.sample)
