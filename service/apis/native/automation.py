"""The native API's webhooks, `/api/v1/webhooks`, schedules, `/api/v1/schedules`, and sweeps, `/api/v1/sweeps`."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from longshore.fields import Name
from service.accounts.keys import Asking, reads_or_writes
from service.apis.bodies import JsonBody, JsonRoute
from service.automation.schedule_views import Backfill, ScheduleView
from service.automation.sweep_views import SweepView
from service.automation.webhooks import NewWebhook, Pinged, Rotation, WebhookChange, WebhookChoice, WebhookView
from service.backend import Backed, IdempotencyKey
from shared.automation import Delivery, ScheduledRun, Sweep, SweepId, WebhookId

router = APIRouter(route_class=JsonRoute, dependencies=[Depends(reads_or_writes)])


@router.post("/webhooks", status_code=201)
async def create_webhook(choice: JsonBody[WebhookChoice], backend: Backed, asking: Asking) -> NewWebhook:
    """Send messages on runs to an address. Only this answer shows the secret that messages are signed with."""
    return await backend.webhooks.create(asking.tenant, asking.key_id, choice)


@router.get("/webhooks")
async def list_webhooks(backend: Backed, asking: Asking) -> tuple[WebhookView, ...]:
    """All webhooks, oldest first."""
    return await backend.webhooks.of(asking.tenant)


@router.get("/webhooks/{webhook_id}")
async def get_webhook(webhook_id: WebhookId, backend: Backed, asking: Asking) -> WebhookView:
    return await backend.webhooks.show(asking.tenant, webhook_id)


@router.patch("/webhooks/{webhook_id}")
async def change_webhook(
    webhook_id: WebhookId, change: JsonBody[WebhookChange], backend: Backed, asking: Asking
) -> WebhookView:
    """Another url, other events, or enabled or not. What is not given stays."""
    return await backend.webhooks.change(asking.tenant, webhook_id, change)


@router.post("/webhooks/{webhook_id}/rotate")
async def rotate_secret(
    webhook_id: WebhookId, backend: Backed, asking: Asking, rotation: JsonBody[Rotation | None] = None
) -> NewWebhook:
    """A new secret, which this answer alone shows. Messages are signed with both until the old one's time is up."""
    return await backend.webhooks.rotate(asking.tenant, webhook_id, rotation or Rotation())


@router.delete("/webhooks/{webhook_id}")
async def delete_webhook(webhook_id: WebhookId, backend: Backed, asking: Asking) -> WebhookView:
    """Delete a webhook and its deliveries."""
    return await backend.webhooks.delete(asking.tenant, webhook_id)


@router.get("/webhooks/{webhook_id}/deliveries")
async def webhook_deliveries(
    webhook_id: WebhookId, backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=200)] = 20
) -> tuple[Delivery, ...]:
    """Deliveries of messages, newest first, with the receiver's answers."""
    return await backend.webhooks.deliveries(asking.tenant, webhook_id, limit)


@router.post("/webhooks/{webhook_id}/ping", status_code=202)
async def ping_webhook(webhook_id: WebhookId, backend: Backed, asking: Asking) -> Pinged:
    """Send it a `ping`. 409 when it is not enabled."""
    return await backend.webhooks.ping(asking.tenant, webhook_id)


@router.post("/schedules", status_code=201)
async def create_schedule(scheduled: JsonBody[ScheduledRun], backend: Backed, asking: Asking) -> ScheduleView:
    """Start runs at times. The same request once more is the same schedule; 409 for another under its name."""
    await asyncio.to_thread(
        backend.names.resolved, asking.tenant, scheduled.run, "run."
    )  # what it means is seen each time
    return await backend.schedules.create(asking.tenant, asking.key_id, scheduled)


@router.get("/schedules")
async def list_schedules(backend: Backed, asking: Asking) -> tuple[ScheduleView, ...]:
    """All schedules by name, without their actions."""
    return await backend.schedules.of(asking.tenant)


@router.get("/schedules/{name}")
async def get_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    """A schedule with its next times and its last actions: runs started, or the reason why not."""
    return await backend.schedules.show(asking.tenant, name)


@router.delete("/schedules/{name}")
async def delete_schedule(name: Name, backend: Backed, asking: Asking) -> ScheduleView:
    """Delete a schedule. Its runs stay, and continue."""
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
    """Start a run now, by its own rules of overlap and of unchanged data."""
    return await backend.schedules.trigger(asking.tenant, name)


@router.post("/schedules/{name}/backfill", status_code=202)
async def backfill_schedule(name: Name, span: JsonBody[Backfill], backend: Backed, asking: Asking) -> ScheduleView:
    """Start runs for the times of a span in the past."""
    return await backend.schedules.backfill(asking.tenant, name, span)


@router.post("/sweeps", status_code=201)
async def create_sweep(
    sweep: JsonBody[Sweep], request: Request, backend: Backed, asking: Asking, idempotency_key: IdempotencyKey = None
) -> SweepView:
    """Start runs that differ in a few fields, and publish the best. The same Idempotency-Key gives the same sweep."""
    return await backend.sweeps.create(asking, sweep, idempotency_key, request)


@router.get("/sweeps")
async def list_sweeps(
    backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> tuple[SweepView, ...]:
    """Sweeps, newest first."""
    return await backend.sweeps.of(asking.tenant, limit)


@router.get("/sweeps/{sweep_id}")
async def get_sweep(sweep_id: SweepId, backend: Backed, asking: Asking) -> SweepView:
    """A sweep: its trials with their values, states and metric, and which is the best."""
    return await backend.sweeps.show(asking.tenant, sweep_id)


@router.post("/sweeps/{sweep_id}/cancel", status_code=202)
async def cancel_sweep(sweep_id: SweepId, backend: Backed, asking: Asking) -> SweepView:
    """Start no more trials, and cancel those that are going on. 409 when the sweep has ended."""
    return await backend.sweeps.cancel(asking.tenant, sweep_id)
