"""The native API's runs, sessions, and data before a run; its webhooks, schedules and sweeps."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field, RootModel

from longshore import views
from longshore.accounts import FileView
from longshore.automation import (
    ScheduledRun,
    ScheduleView,
    Sweep,
    SweepId,
    SweepView,
    WebhookId,
)
from longshore.commands import Asked, Forward, ForwardBackward
from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from longshore.fields import Name
from longshore.grading import OneGrade
from longshore.runs import Kind, RLRun, Run, RunId, Source, samples_of
from longshore.training import SessionRun
from service.accounts import audit
from service.accounts.keys import BEARER, Asking, reads_or_writes
from service.apis.bodies import JsonBody, JsonRoute, add_operations, file_answer, tar_answer
from service.apis.errors import RESPONSES
from service.automation.retention import Removals
from service.automation.schedules import Schedules
from service.automation.sweeps import Sweeps
from service.automation.webhooks import Webhooks
from service.backend import Backed, Backend, IdempotencyKey
from service.files import FILE_NAME, Files, PublishedFiles
from service.runs.files import Overviews, RunFiles, RunReader
from service.runs.runs import Runs
from service.runs.sessions import Sessions, TrainSteps
from service.runs.views import last_lines, log_line
from shared.errors import Conflict, StoreUnavailable, TemporalUnavailable
from shared.jobs.commands import stored_form
from shared.runs.acceptance import precision_of
from shared.runs.status import StepRequest

# --- Runs. The CLI is one of this API's clients ---

PREFIX = "/api/v1"
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""Responses of an operation that answers in text; its errors are JSON."""
router = APIRouter(
    route_class=JsonRoute, prefix=PREFIX, dependencies=[*BEARER, Depends(reads_or_writes)], responses=RESPONSES
)
open_router = APIRouter(prefix=PREFIX)
"""Operations that need no key."""
_POLL_S = 0.5
_EVENTS_AT_ONCE = 1000
_CLIENT_IS_GONE_S = 86_400.0
_LAST_STEP = 99_999_999
StepNumber = Annotated[int, Path(ge=0, le=_LAST_STEP)]
_HEALTH_PATIENCE_S = 5.0


@open_router.get("/health", responses={503: {"model": views.Health}})
async def health(backend: Backed) -> JSONResponse:
    """The service's health, open to everybody, so without anything about runs."""
    temporal, store = await asyncio.gather(_check_temporal(backend), _check_store(backend))
    ok = temporal == store == "ok"
    body = views.Health(
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
            await asyncio.to_thread(backend.store.head, "health")
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
) -> Callable[[Run], Awaitable[views.RunView]]:
    """Return a function that starts a run. A repeated key gives the same run, whatever its names mean by then."""

    async def submit(run: Run) -> views.RunView:
        named = await asyncio.to_thread(backend.names.resolved, asking.tenant, run)
        return await backend.runs.submit(asking, named, idempotency_key, source, asked=run)

    return submit


Submits = Annotated[Callable[[Run], Awaitable[views.RunView]], Depends(_submitting)]


@router.post("/runs", status_code=201)
async def submit_run(run: JsonBody[RunRequest], submit: Submits) -> views.RunView:
    """Start a run of any `kind`. The same Idempotency-Key gives the same run."""
    return await submit(run.root)


_TOLD: dict[type[Any], str] = {
    SFTRun: "a supervised fine-tuning run",
    DPORun: "a run that learns from preferences: pairs, or answers with a label",
    DistillRun: "a run whose student becomes like its teacher on a dataset",
    RewardRun: "a run that trains a reward model, of pairs or of scores",
    RLRun: "a reinforcement-learning run, which waits for train steps",
}


def _add_submission(kind: type[Any]) -> None:
    async def submit_kind(run: JsonBody[kind], submit: Submits) -> views.RunView:  # type: ignore[valid-type]
        return await submit(run)

    name = kind.model_fields["kind"].default
    submit_kind.__name__ = submit_kind.__qualname__ = f"submit_{name}"
    submit_kind.__doc__ = f"Start {_TOLD[kind]}. The same Idempotency-Key gives the same run."
    router.post(f"/runs/{name}", status_code=201)(submit_kind)


for _kind in _TOLD:
    _add_submission(_kind)


@router.post("/estimate")
async def estimate_run(run: JsonBody[RunRequest], backend: Backed, asking: Asking) -> views.Estimate:
    """What a run would be: steps and tokens, counted; time and cost, where earlier runs of its model tell. Starts
    nothing."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, run.root)
    precision = await asyncio.to_thread(precision_of, named.dtype, backend.settings, backend.store)
    found = await backend.estimates.of(asking.tenant, named.model_copy(update={"dtype": precision.dtype}))
    return found.model_copy(update={"precision": precision})


@router.post("/runs/{run_id}/steps", status_code=202)
async def train_step(
    run_id: RunId, step: JsonBody[views.StepSubmission], backend: Backed, asking: Asking
) -> views.StepStatus:
    """Train one file of trajectory groups, after those that came before. 409 when the run takes no more."""
    return await backend.steps.train(asking.tenant, run_id, StepRequest(key=step.key, groups=step.groups), step.wait_s)


@router.get("/runs/{run_id}/steps")
async def list_steps(
    run_id: RunId,
    backend: Backed,
    asking: Asking,
    after: Annotated[int | None, Query(ge=0, le=_LAST_STEP, description="the `next` of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> views.StepPage:
    """The train steps of an RL run that have ended, in order. 409 for a run of another kind."""
    await backend.steps.record(asking.tenant, run_id)
    return await backend.reader.steps(run_id, after, limit)


@router.get("/runs")
async def list_runs(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[RunId | None, Query(description="the `next` of the previous page")] = None,
    state: views.State | None = None,
    kind: Kind | None = None,
    words: Annotated[str | None, Query(max_length=128, description="text in the id, the name or the model")] = None,
    idle: Annotated[bool, Query(description="include sessions that have waited for a command for a day")] = False,
) -> views.RunPage:
    """Runs, newest first, as they stood a second ago at most.

    Sessions that have waited for a command for a day are only listed where `idle`, `kind`, `state` or `words` ask for
    them.
    """
    is_asked_for = idle or kind or state or words
    since = None if is_asked_for else time.time() - _CLIENT_IS_GONE_S
    return await backend.runs.page(
        asking.tenant, limit=limit, after=after, state=state, kind=kind, words=words, no_session_idle_since=since
    )


add_operations(
    router,
    {"run_id": RunId},
    ("get_run", "GET /runs/{run_id}", Runs.view, 200),
    ("cancel_run", "POST /runs/{run_id}/cancel", Runs.cancel, 202),
    ("resume_run", "POST /runs/{run_id}/resume", Runs.resume, 202),
    ("pause_run", "POST /runs/{run_id}/pause", Runs.pause, 202),
    ("retry_run", "POST /runs/{run_id}/retry", Runs.retry, 201),
    ("finish_run", "POST /runs/{run_id}/finish", TrainSteps.finish, 202),
    ("remove_run", "DELETE /runs/{run_id}", Removals.remove, 200),
    ("run_checkpoints", "GET /runs/{run_id}/checkpoints", RunReader.checkpoints, 200),
    ("list_jobs", "GET /runs/{run_id}/jobs", RunFiles.jobs, 200),
    ("list_profiles", "GET /runs/{run_id}/profiles", RunFiles.traces, 200),
    ("show_overview", "GET /overview", Overviews.show, 200),
)


@router.get("/runs/{run_id}/events", response_model=views.EventPage)
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
) -> views.EventPage:
    end = asyncio.get_running_loop().time() + wait_s
    while True:
        page = await backend.reader.events(run_id, after, limit)
        if page.events or asyncio.get_running_loop().time() >= end or await _has_ended(backend, tenant, run_id):
            return page
        await asyncio.sleep(_POLL_S)


async def _event_pages(backend: Backend, tenant: str, run_id: str, after: str | None) -> AsyncIterator[views.EventPage]:
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
async def run_metrics(run_id: RunId, backend: Backed, asking: Asking) -> views.Metrics:
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


@router.get("/runs/{run_id}/files")
async def run_files(run_id: RunId, backend: Backed, asking: Asking) -> tuple[views.FileEntry, ...]:
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


# --- What else there is of runs: overview and sparklines, reports, job files, rollouts ---

JobId = Annotated[str, Path(pattern=r"^[0-9]{6}$")]
ProfileId = Annotated[str, Path(pattern=views.PROFILE_ID)]
FenceLabel = Annotated[str, Path(pattern=r"^e[0-9]{6}-a[0-9]{2}$")]


@router.get("/sparklines")
async def list_sparklines(
    backend: Backed, asking: Asking, run_id: Annotated[list[RunId], Query(max_length=200)]
) -> dict[RunId, views.Sparkline]:
    """The loss of runs, or the reward of RL runs, in a few dozen numbers each. Unknown runs are left out."""
    runs = await backend.runs.of(asking.tenant, run_id)
    lines = await asyncio.gather(*(backend.overviews.sparkline(run) for run in runs))
    return {run.run_id: line for run, line in zip(runs, lines, strict=True)}


@router.get("/runs/{run_id}/report")
async def run_report(run_id: RunId, backend: Backed, asking: Asking) -> views.RunReport:
    """Reports of tokenizing and packing, as far as they have come."""
    status = await backend.runs.view(asking.tenant, run_id)
    return await asyncio.to_thread(backend.run_files.report, status)


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
async def ask_profile(
    run_id: RunId, body: JsonBody[views.AskedProfile], backend: Backed, asking: Asking
) -> views.ProfileRequest:
    """Trace a run's next optimizer steps with torch's profiler. 409 when it has ended, or one is waited for."""
    if (await backend.runs.view(asking.tenant, run_id)).state != "running":
        raise Conflict(f"{run_id} does not run: there are no steps to come")
    audit.touched(run_id)
    return await backend.run_files.ask_profile(asking.tenant, run_id, body.steps)


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
    return tar_answer(files, f"{run_id}-{fence}-step-{step}")


@router.get("/runs/{run_id}/steps/{step}/rollouts")
async def step_rollouts(
    run_id: RunId, step: StepNumber, backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=32)] = 4
) -> tuple[views.GroupTexts, ...]:
    """The first groups of a train step as text, with their rewards. 409 where they are not kept here."""
    status = await backend.steps.show(asking.tenant, run_id, step, 0)
    return await asyncio.to_thread(backend.run_files.rollouts, run_id, status, limit)


@router.get("/runs/{run_id}/steps/{step}/samples")
async def step_samples(
    run_id: RunId,
    step: StepNumber,
    backend: Backed,
    asking: Asking,
    of: Annotated[
        str, Query(max_length=100, description="`train`, or of an evaluation `eval` or `eval_NAME`")
    ] = "train",
    failed: Annotated[bool, Query(description="only episodes without a reward")] = False,
    first: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=256)] = 32,
) -> tuple[views.DrawnSample, ...]:
    """Samples that a run drew itself, as graders saw them, with the course of their episodes."""
    run = (await backend.runs.record(asking.tenant, run_id)).run
    if isinstance(run, RLRun):
        drawn = (await backend.steps.show(asking.tenant, run_id, step, 0)).samples
    else:
        evaluations = (await backend.histories.of(run_id)).metrics().evaluations
        drawn = next((one.drawn for one in evaluations if one.step == step), {})
    return await asyncio.to_thread(backend.run_files.samples, drawn, of, samples_of(run, of), failed, first, limit)


# --- Sessions: a client trains a slot command by command ---

Number = Annotated[int, Path(ge=1, le=99_999_999, description="commands run in the order of their numbers, from 1")]
Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for its result or end")]


class SentCommand(RootModel[Asked]):
    """A command, by its `kind`."""

    def packed(self) -> bytes | None:
        return stored_form(self.root) if isinstance(self.root, Forward | ForwardBackward) else None

    @classmethod
    def of_packed(cls, data: bytes) -> "SentCommand":
        return cls.model_construct(data)  # type: ignore[arg-type]  # the command's file, which is not parsed here


@router.post("/sessions", status_code=201)
async def open_session(
    session: JsonBody[SessionRun], backend: Backed, asking: Asking, idempotency_key: IdempotencyKey = None
) -> views.RunView:
    """Open a session. The same Idempotency-Key gives the same session. It is a run: /runs has its events and end."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, session)
    return await backend.runs.submit(asking, named, idempotency_key, asked=session)


@router.get("/sessions")
async def list_sessions(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[RunId | None, Query(description="the `next` of the previous page")] = None,
    state: views.State | None = None,
) -> views.RunPage:
    """Sessions, newest first, as they stood a second ago at most."""
    return await backend.runs.page(asking.tenant, limit=limit, after=after, state=state, kind="session")


@router.put("/sessions/{run_id}/commands/{number}", status_code=202)
async def send_command(
    run_id: RunId, number: Number, command: JsonBody[SentCommand], backend: Backed, asking: Asking, wait_s: Wait = 0
) -> views.CommandView:
    """Send a command, which is durable when this answers, and done once however often it is sent."""
    return await backend.sessions.send(asking.tenant, run_id, number, command.root, wait_s)


add_operations(
    router,
    {"run_id": RunId, "number": Number, "step": StepNumber, "wait_s": Wait},
    ("get_command", "GET /sessions/{run_id}/commands/{number}", Sessions.show, 200),
    ("get_step", "GET /runs/{run_id}/steps/{step}", TrainSteps.show, 200),
    ("close_session", "POST /sessions/{run_id}/close", Sessions.close, 202),
)


# --- Data: uploaded files, checks of a dataset before a run, and graders tried on a sample ---

_BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}},
    }
}


@router.post("/files", status_code=201, openapi_extra=_BYTES, responses={200: {"model": FileView}})
async def upload_file(
    request: Request,
    response: Response,
    backend: Backed,
    asking: Asking,
    name: Annotated[str, Query(description="a plain file name", json_schema_extra={"pattern": FILE_NAME})],
    content_length: Annotated[int, Header(ge=0, include_in_schema=False)] = 0,
) -> FileView:
    """Put the request's body into the store; its URI is a dataset's. The same file again has the same one, and 200."""
    asked_at = time.time()
    record = await backend.files.receive(asking.tenant, name, request.stream(), num_bytes=content_length)
    if record.created_at < asked_at:
        response.status_code = 200
    return record


_AFTER = Annotated[str | None, Query(max_length=64, description="the `next` of the previous page")]
add_operations(
    router,
    {"file_id": str, "limit": Annotated[int, Query(ge=1, le=1000)], "after": _AFTER},
    ("list_files", "GET /files", Files.page, 200),
    ("get_file", "GET /files/{file_id}", Files.show, 200),
    ("delete_file", "DELETE /files/{file_id}", Files.delete, 200),
)


@router.get("/files/{file_id}/content", response_class=Response)
async def file_content(file_id: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """An uploaded file's bytes."""
    record = await backend.files.show(asking.tenant, file_id)
    headers = {"content-length": str(record.size), "etag": f'"{record.sha256}"'}
    return StreamingResponse(backend.files.content(record), media_type="application/octet-stream", headers=headers)


@router.post("/validate")
async def validate(request: JsonBody[views.PreviewRequest], backend: Backed, asking: Asking) -> views.Preview:
    """Count a dataset's examples and tokens, and return the reason if a run would refuse it. Shows no rows."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named.model_copy(update={"num_rows": 0}))


@router.post("/preview")
async def preview(request: JsonBody[views.PreviewRequest], backend: Backed, asking: Asking) -> views.Preview:
    """The first rows of a dataset as a model will see them: which tokens are trained, and a report."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, request)
    return await backend.checks.preview(asking.tenant, named)


@router.post("/graders/run")
async def try_grader(trial: JsonBody[views.GraderTrial], backend: Backed, asking: Asking) -> OneGrade:
    """Grade one sample, or check that the grader can be loaded. Without a grade, `error` says why."""
    await backend.runs.check_access(asking.tenant, trial)
    return await backend.checks.grade(asking.tenant, trial.grader, trial.sample)


# --- Webhooks, schedules and sweeps ---

add_operations(
    router,
    {"webhook_id": WebhookId, "limit": Annotated[int, Query(ge=1, le=200)]},
    ("create_webhook", "POST /webhooks", Webhooks.create, 201),
    ("list_webhooks", "GET /webhooks", Webhooks.of, 200),
    ("get_webhook", "GET /webhooks/{webhook_id}", Webhooks.show, 200),
    ("change_webhook", "PATCH /webhooks/{webhook_id}", Webhooks.change, 200),
    ("rotate_secret", "POST /webhooks/{webhook_id}/rotate", Webhooks.rotate, 200),
    ("delete_webhook", "DELETE /webhooks/{webhook_id}", Webhooks.delete, 200),
    ("webhook_deliveries", "GET /webhooks/{webhook_id}/deliveries", Webhooks.deliveries, 200),
    ("ping_webhook", "POST /webhooks/{webhook_id}/ping", Webhooks.ping, 202),
)
_NOTE = Annotated[str | None, Query(max_length=256)]
add_operations(
    router,
    {"name": Name, "note": _NOTE, "sweep_id": SweepId, "limit": Annotated[int, Query(ge=1, le=100)]},
    ("list_schedules", "GET /schedules", Schedules.of, 200),
    ("get_schedule", "GET /schedules/{name}", Schedules.show, 200),
    ("delete_schedule", "DELETE /schedules/{name}", Schedules.delete, 200),
    ("pause_schedule", "POST /schedules/{name}/pause", Schedules.pause, 202),
    ("resume_schedule", "POST /schedules/{name}/resume", Schedules.resume, 202),
    ("trigger_schedule", "POST /schedules/{name}/trigger", Schedules.trigger, 202),
    ("backfill_schedule", "POST /schedules/{name}/backfill", Schedules.backfill, 202),
    ("list_sweeps", "GET /sweeps", Sweeps.of, 200),
    ("get_sweep", "GET /sweeps/{sweep_id}", Sweeps.show, 200),
    ("cancel_sweep", "POST /sweeps/{sweep_id}/cancel", Sweeps.cancel, 202),
)


@router.post("/schedules", status_code=201)
async def create_schedule(scheduled: JsonBody[ScheduledRun], backend: Backed, asking: Asking) -> ScheduleView:
    """Start runs at times. The same request once more is the same schedule; 409 for another under its name."""
    # The names in it are looked up each time that it acts.
    await asyncio.to_thread(backend.names.resolved, asking.tenant, scheduled.run, "run.")
    return await backend.schedules.create(asking.tenant, asking.key_id, scheduled)


@router.post("/sweeps", status_code=201)
async def create_sweep(
    sweep: JsonBody[Sweep], request: Request, backend: Backed, asking: Asking, idempotency_key: IdempotencyKey = None
) -> SweepView:
    """Start runs that differ in a few fields, and publish the best. The same Idempotency-Key gives the same sweep."""
    return await backend.sweeps.create(asking, sweep, idempotency_key, request)
