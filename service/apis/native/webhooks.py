"""The native API's webhooks, `/api/v1/webhooks`."""

from typing import Annotated

from fastapi import APIRouter, Query

from service.accounts.principals import Asking
from service.apis.json_bodies import JsonBody, JsonRoute
from service.automation.webhooks import NewWebhook, Pinged, Rotation, WebhookChange, WebhookChoice, WebhookView
from service.backend import Backed
from shared.runs.webhooks import Delivery, WebhookId

router = APIRouter(route_class=JsonRoute)


@router.post("/webhooks", status_code=201)
async def create_webhook(choice: JsonBody[WebhookChoice], backend: Backed, asking: Asking) -> NewWebhook:
    """Tell an address of runs. Only this answer shows the secret that messages are signed with."""
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
    """Forget a webhook and its deliveries."""
    return await backend.webhooks.delete(asking.tenant, webhook_id)


@router.get("/webhooks/{webhook_id}/deliveries")
async def webhook_deliveries(
    webhook_id: WebhookId, backend: Backed, asking: Asking, limit: Annotated[int, Query(ge=1, le=200)] = 20
) -> tuple[Delivery, ...]:
    """What became of messages, newest first, with what the receiver answered."""
    return await backend.webhooks.deliveries(asking.tenant, webhook_id, limit)


@router.post("/webhooks/{webhook_id}/ping", status_code=202)
async def ping_webhook(webhook_id: WebhookId, backend: Backed, asking: Asking) -> Pinged:
    """Send it a `ping`. 409 when it is not enabled."""
    return await backend.webhooks.ping(asking.tenant, webhook_id)
