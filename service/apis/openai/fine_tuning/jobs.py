"""`/v1/fine_tuning/jobs`: runs under OpenAI's names."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from service.accounts.principals import Asking, reads_or_writes
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.lists import ListAnswer, RetryCount, page_after, page_of
from service.apis.openai.fine_tuning.events import JobEvent, job_events
from service.apis.openai.fine_tuning.request import JobRequest
from service.apis.openai.fine_tuning.submission import submit_job
from service.apis.openai.fine_tuning.views import JobCheckpoint, JobObject, checkpoints_of, job_of
from service.backend import Backed, Backend, IdempotencyKey
from service.runs.views import RunView
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import MAX_METADATA, RunId

router = APIRouter(
    route_class=JsonRoute, prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], dependencies=[Depends(reads_or_writes)]
)

Limit = Annotated[int, Query(ge=1, le=100)]
_METADATA = "metadata["


async def _job(backend: Backend, tenant: str, run_id: str) -> RunView:
    """A run that came in through this API. Raises NotFound."""
    view = await backend.runs.view(tenant, run_id)
    if view.source.api != "openai":
        raise NotFound(f"{run_id} is no fine-tuning job: it was started through another API")
    return view


async def _shown(backend: Backend, view: RunView) -> JobObject:
    has_ended = view.state not in ("running", "paused")
    return job_of(view, (await backend.histories.of(view.run_id)).trained_tokens() if has_ended else None)


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
    after: Annotated[RunId | None, Query(description="the id of the last job of the page before")] = None,
    limit: Limit = 20,
) -> ListAnswer[JobObject]:
    """Jobs, newest first; `metadata[k]=v` shows those alone that have it."""
    if after is not None:
        await _job(backend, asking.tenant, after)
    wanted = _wanted_metadata(request)
    page = await backend.runs.page(asking.tenant, limit=limit, after=after, api="openai", metadata=wanted)
    return page_of([await _shown(backend, view) for view in page.runs], page.has_more)


def _wanted_metadata(request: Request) -> dict[str, str]:
    """`metadata[k]=v` of a query; anything else that would choose among jobs is refused."""
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
    after: Annotated[str | None, Query(max_length=256, description="the id of the page's last event before")] = None,
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
