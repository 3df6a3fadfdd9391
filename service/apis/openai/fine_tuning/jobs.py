"""OpenAI's fine-tuning API: jobs, their checkpoints and events, and graders tried before one."""

import asyncio
import hashlib
import secrets
import time
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field, JsonValue

from longshore.fields import Frozen
from service.accounts.keys import Asking, Principal, reads_or_writes, require
from service.accounts.tenants import Quotas
from service.apis.bodies import JsonBody, JsonRoute, ListAnswer, RetryCount, page_after, page_of
from service.apis.openai.fine_tuning.runs import Examples, JobRequest, count_examples, openai_source, run_of_job
from service.apis.openai.fine_tuning.views import (
    FILE_ID,
    JobCheckpoint,
    JobEvent,
    JobObject,
    checkpoints_of,
    job_events,
    job_of,
)
from service.backend import Backed, Backend, IdempotencyKey
from service.runs.views import RunView
from shared.errors import InvalidInput, NotFound
from shared.grading import Grader, OneGrade, SampledItem
from shared.runs.requests import MAX_METADATA, RLRun, RunId
from shared.storage import paths
from shared.storage.store import ObjectStore

# --- `/v1/fine_tuning/jobs`: fine-tuning jobs in OpenAI's form. Each is a run ---
#
# A job is accepted by looking up its files and model, choosing its hyperparameters, and submitting its run.

router = APIRouter(
    route_class=JsonRoute, prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], dependencies=[Depends(reads_or_writes)]
)

Limit = Annotated[int, Query(ge=1, le=100)]
_METADATA = "metadata["
_TRAINING_PURPOSE = "fine-tune"
WINDOW_S = 1800.0


async def _job(backend: Backend, tenant: str, run_id: str) -> RunView:
    """A run that came in through this API. Raises NotFound."""
    view = await backend.runs.view(tenant, run_id)
    if view.source.api != "openai":
        raise NotFound(f"{run_id} is no fine-tuning job: it was started through another API")
    return view


async def _shown(backend: Backend, view: RunView) -> JobObject:
    has_ended = view.state not in ("running", "paused")
    trained_tokens = (await backend.histories.of(view.run_id)).trained_tokens() if has_ended else None
    return job_of(view, trained_tokens)


@router.post("")
async def create_job(
    body: JsonBody[JobRequest],
    asking: Asking,
    backend: Backed,
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = None,
) -> JobObject:
    """Start a fine-tuning job. The same Idempotency-Key, and a client's own retry, give the same job."""
    return await _shown(backend, await submit_job(backend, asking, body, idempotency_key, retry_count))


@router.get("")
async def list_jobs(
    request: Request,
    asking: Asking,
    backend: Backed,
    after: Annotated[RunId | None, Query(description="the id of the previous page's last job")] = None,
    limit: Limit = 20,
) -> ListAnswer[JobObject]:
    """Jobs, newest first; `metadata[k]=v` shows those alone that have it."""
    if after is not None:
        await _job(backend, asking.tenant, after)
    wanted = _wanted_metadata(request)
    page = await backend.runs.page(asking.tenant, limit=limit, after=after, api="openai", metadata=wanted)
    return page_of([await _shown(backend, view) for view in page.runs], page.has_more)


def _wanted_metadata(request: Request) -> dict[str, str]:
    """Return the filters `metadata[k]=v` of a query. Other filters are refused."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(_METADATA) and name.endswith("]"):
            found[name.removeprefix(_METADATA)[:-1]] = value
            if "\0" in name + value:
                raise InvalidInput("no metadata holds a NUL", "metadata")
        elif name not in ("after", "limit"):
            raise InvalidInput("jobs are not listed by this: after, limit and metadata[k]=v", name[:64])
    if len(found) > MAX_METADATA:
        raise InvalidInput(f"a job has at most {MAX_METADATA} of them", "metadata")
    return found


@router.get("/{run_id}")
async def get_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """A job's current status."""
    return await _shown(backend, await _job(backend, asking.tenant, run_id))


@router.post("/{run_id}/cancel")
async def cancel_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """End a job at its next step, with a checkpoint. 409 when it has ended."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.cancel(asking.tenant, run_id))


@router.post("/{run_id}/pause")
async def pause_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """End a job at its next step, to be resumed later. 409 when it has ended."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.pause(asking.tenant, run_id))


@router.post("/{run_id}/resume")
async def resume_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """Go on from the last checkpoint. 409 when the job runs, or succeeded."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.resume(asking.tenant, run_id))


@router.get("/{run_id}/events")
async def list_events(
    run_id: RunId,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256, description="the id of the previous page's last event")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> ListAnswer[JobEvent]:
    """The job's events, newest first."""
    view = await _job(backend, asking.tenant, run_id)
    return page_after(job_events(view, await backend.histories.of(run_id)), after, limit)


@router.get("/{run_id}/checkpoints")
async def list_checkpoints(
    run_id: RunId,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256)] = None,
    limit: Limit = 10,
) -> ListAnswer[JobCheckpoint]:
    """Checkpoints in the store, newest first."""
    found = await checkpoints_of(backend, await _job(backend, asking.tenant, run_id))
    return page_after(found, after, limit)


async def submit_job(
    backend: Backend, asking: Principal, request: JobRequest, given_key: str | None, retry_count: str | None
) -> RunView:
    """Start a job; or find the one that a key, or a client's first attempt, has started.

    Args:
        given_key: an Idempotency-Key.
        retry_count: how often the client has sent this before, by its own header.

    Raises:
        InvalidInput: names the field and the rule that it breaks.
        QuotaExceeded
    """
    if request.integrations and backend.settings.wandb_mode == "disabled":
        raise InvalidInput("W&B is switched off in this installation", "integrations")
    training = await _examples(backend, asking.tenant, request.training_file, "training_file")
    validation = None
    if request.validation_file is not None:
        validation = await _examples(backend, asking.tenant, request.validation_file, "validation_file")
    start = await asyncio.to_thread(backend.names.starting_point, asking.tenant, request.model)
    run, hyperparameters = run_of_job(request, start, training, validation)
    if isinstance(run, RLRun):
        place = "method.reinforcement.grader"
        run = await asyncio.to_thread(backend.names.with_rewards, asking.tenant, run, place)
    key = given_key or await idempotency_key(backend.store, backend.quotas, asking, request, retry_count)
    return await backend.runs.submit(asking, run, key, openai_source(request, hyperparameters), asked=request)


async def _examples(backend: Backend, tenant: str, given: str, place: str) -> Examples:
    """Look up a data file, and count its examples. Raises InvalidInput if it does not exist, or is not for training."""
    if not FILE_ID.fullmatch(given):
        if "/" in given:
            return Examples(given)
        raise InvalidInput("this is neither the id of a file, nor a URI", place)
    try:
        record = await backend.files.show(tenant, given)
    except NotFound as error:
        raise InvalidInput(str(error), place) from None
    if record.purpose != _TRAINING_PURPOSE:
        raise InvalidInput(f"{given} has the purpose {record.purpose}: jobs read files of {_TRAINING_PURPOSE}", place)
    return Examples(record.uri, await asyncio.to_thread(count_examples, backend.files.content(record), record.size))


class _Sent(Frozen):
    """The Idempotency-Key that a request was given, and when."""

    key: str
    at: float


async def idempotency_key(
    store: ObjectStore, quotas: Quotas, asking: Principal, request: Frozen, retry_count: str | None
) -> str:
    """Return the key for a request without one; the same for a client's retry. It is recorded before it is used."""
    digest = hashlib.sha256(f"{asking.key_id} {request.model_dump_json()}".encode()).hexdigest()
    place = paths.sent_request(asking.tenant, digest)
    if retry_count is not None and retry_count.isdecimal() and retry_count.strip("0"):
        with suppress(NotFound):
            before = _Sent.model_validate_json(await asyncio.to_thread(store.get_bytes, place))
            if time.time() - before.at < WINDOW_S:
                return before.key
    sent = _Sent(key=f"sent-{secrets.token_hex(16)}", at=time.time())
    await quotas.put_record(asking.tenant, place, sent.model_dump_json().encode())
    return sent.key


def prune_sent_requests(store: ObjectStore) -> None:
    """Delete the records of requests that are too old to be retried. Blocking."""
    for item in list(store.list(paths.SENT_REQUESTS)):
        try:
            sent = _Sent.model_validate_json(store.get_bytes(item.key))
        except NotFound:  # another service process has deleted it
            continue
        # If the same request was sent again in the meantime, its record has changed.
        if time.time() - sent.at >= WINDOW_S and store.head(item.key) == item:
            store.delete(item.key)


# --- `/v1/fine_tuning/alpha/graders`: graders tried before a job is started with them ---

graders_router = APIRouter(
    route_class=JsonRoute,
    prefix="/v1/fine_tuning/alpha/graders",
    tags=["graders"],
    dependencies=[Depends(require("write"))],
)

MAX_SAMPLE_CHARS = 100_000


class RunGrader(Frozen):
    """A grader, what a model wrote, and the dataset's row that this answers."""

    grader: Grader
    model_sample: str = Field(max_length=MAX_SAMPLE_CHARS)
    item: dict[str, JsonValue] | None = None


class ValidateGrader(Frozen):
    grader: Grader


class GraderErrors(BaseModel):
    """Kinds of errors: one is true where there is no grade. `details`, our own field, has the reason in words."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    details: str | None = None


class GraderMetadata(BaseModel):
    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    scores: dict[str, float | None]
    sampled_model_name: str | None = None
    token_usage: int | None = None


class GraderAnswer(BaseModel):
    """`reward` is 0 if there is no grade; then `metadata.errors` says why."""

    object: Literal["grader.run"] = "grader.run"
    reward: float
    sub_rewards: dict[str, float | None]
    metadata: GraderMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


@graders_router.post("/run")
async def run_grader(body: JsonBody[RunGrader], asking: Asking, backend: Backed) -> GraderAnswer:
    """Grade one sample."""
    await backend.runs.check_access(asking.tenant, body)
    sample = SampledItem(sample={"output_text": body.model_sample}, item=body.item or {})
    return _answer(body.grader, await backend.checks.grade(asking.tenant, body.grader, sample))


@graders_router.post("/validate")
async def validate_grader(body: JsonBody[ValidateGrader], asking: Asking, backend: Backed) -> ValidateGrader:
    """See whether a grader could be used here: its source is loaded, its templates and formula are read."""
    await backend.runs.check_access(asking.tenant, body)
    await backend.checks.grade(asking.tenant, body.grader, None)
    return body


def _answer(grader: Grader, found: OneGrade) -> GraderAnswer:
    scores = found.parts or {grader.name: found.grade}
    return GraderAnswer(
        reward=found.grade if found.grade is not None else 0.0,
        sub_rewards=found.parts,
        metadata=GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(grader, found.error),
            execution_time=found.duration_s,
            scores=scores,
        ),
    )


def _errors(grader: Grader, reason: str | None) -> GraderErrors:
    if reason is None:
        return GraderErrors()
    match grader.type:
        case "python":
            return GraderErrors(
                python_grader_runtime_error=True, python_grader_runtime_error_details=reason, details=reason
            )
        case "string_check" | "text_similarity":
            return GraderErrors(invalid_variable_error=True, details=reason)
        case _:
            return GraderErrors(other_error=True, details=reason)
