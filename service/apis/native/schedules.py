"""The native API's schedules, `/api/v1/schedules`."""

from typing import Annotated

from fastapi import APIRouter, Query

from service.accounts.principals import Asking
from service.apis.json_bodies import JsonBody, JsonRoute
from service.automation.schedule_views import Backfill, ScheduleView
from service.backend import Backed
from shared.runs.requests import Name
from shared.runs.schedules import ScheduledRun

router = APIRouter(route_class=JsonRoute)


@router.post("/schedules", status_code=201)
async def create_schedule(scheduled: JsonBody[ScheduledRun], backend: Backed, asking: Asking) -> ScheduleView:
    """Start a run by the clock. The same request once more is the same schedule; 409 for another under its name."""
    return await backend.schedules.create(asking.tenant, asking.key_id, scheduled)


@router.get("/schedules")
async def list_schedules(backend: Backed, asking: Asking) -> tuple[ScheduleView, ...]:
    """All schedules by name, without their actions."""
    return await backend.schedules.of(asking.tenant)


@router.get("/schedules/{name}")
async def get_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    """A schedule, when it acts next, and what it did last: runs started, or why not."""
    return await backend.schedules.show(asking.tenant, name)


@router.delete("/schedules/{name}")
async def delete_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    """Forget a schedule. Its runs stay, and go on."""
    return await backend.schedules.delete(asking.tenant, name)


@router.post("/schedules/{name}/pause", status_code=202)
async def pause_schedule(
    name: Name, backend: Backed, asking: Asking, note: Annotated[str | None, Query(max_length=256)] = None
) -> ScheduleView:
    """Start nothing until it is resumed."""
    return await backend.schedules.pause(asking.tenant, name, note)


@router.post("/schedules/{name}/resume", status_code=202)
async def resume_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    return await backend.schedules.resume(asking.tenant, name)


@router.post("/schedules/{name}/trigger", status_code=202)
async def trigger_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    """Act now, once, by its own rules of overlap and of unchanged data."""
    return await backend.schedules.trigger(asking.tenant, name)


@router.post("/schedules/{name}/backfill", status_code=202)
async def backfill_schedule(name: Name, span: JsonBody[Backfill], backend: Backed, asking: Asking) -> ScheduleView:
    """Act at the times of a span in the past."""
    return await backend.schedules.backfill(asking.tenant, name, span)
