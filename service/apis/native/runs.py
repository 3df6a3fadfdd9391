"""The native API, `/api/v1`: runs, files and dataset checks. The CLI is one of its clients."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field, RootModel

from longshore.fields import Frozen
from service.accounts.principals import BEARER, Asking, reads_or_writes
from service.apis.errors import RESPONSES
from service.apis.file_answers import file_answer, tar_answer
from service.apis.json_bodies import JsonBody, JsonRoute
from service.automation.removals import RunRemoved
from service.backend import Backed, Backend, IdempotencyKey
from service.errors import TemporalUnavailable
from service.files.files import PublishedFiles
from service.runs.estimates import Estimate
from service.runs.views.history import Metrics
from service.runs.views.run_view import EventPage, RunPage, RunView, StepPage
from service.runs.views.words import last_lines, log_line
from shared.errors import StoreUnavailable
from shared.runs.acceptance import precision_of
from shared.runs.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from shared.runs.requests import Kind, RLRun, Run, RunId, Source
from shared.runs.status import CheckpointRef, State, StepKey, StepRequest, StepStatus
from shared.storage import paths
from shared.storage.artifacts import FileEntry

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
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL; POST /files gives one")
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
    after: Annotated[int | None, Query(ge=0, le=_LAST_STEP, description="the `next` of the page before")] = None,
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
    after: Annotated[RunId | None, Query(description="the `next` of the page before")] = None,
    state: State | None = None,
    kind: Kind | None = None,
    words: Annotated[str | None, Query(max_length=128, description="within the id, the name or the model")] = None,
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
    after: Annotated[str | None, Query(max_length=256, description="the `next` of the page before")] = None,
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
