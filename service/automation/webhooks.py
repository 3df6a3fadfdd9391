"""Webhooks for the APIs: a tenant's records in the store, and the outbox of changes to send."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError
from sqlalchemy import delete, select
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.database.engine import Database, KeyedLocks, OutboxRow
from service.errors import Conflict
from service.temporal import Temporal
from shared.addresses import is_plainly_private, private_host
from shared.automation import (
    Delivery,
    Notice,
    NoticeId,
    NoticeType,
    Webhook,
    WebhookId,
    WebhookRequest,
    WebhookUrl,
    new_notice_id,
    new_secret,
)
from shared.errors import InvalidInput, NotFound
from shared.settings import Settings
from shared.storage.paths import delivery_record, webhook_record
from shared.storage.store import ObjectStore

logger = logging.getLogger("longshore.service")

WEBHOOK_WORKFLOW = "WebhookWorkflow"
_MOST_WEBHOOKS = 20
_OVERLAP_S = 86_400.0
_OUTBOX_PAGE = 100


class WebhookChoice(Frozen):
    """A webhook, as a user asks for it."""

    url: WebhookUrl
    events: tuple[NoticeType, ...] = Field(default=(), description="only these events are sent; all if empty")


class WebhookChange(Frozen):
    """The fields to change; the rest stays."""

    url: WebhookUrl | None = None
    events: tuple[NoticeType, ...] | None = None
    enabled: bool | None = None


class WebhookView(Frozen):
    """A webhook without its secret."""

    id: WebhookId = Field(validation_alias="webhook_id")
    url: str
    events: tuple[NoticeType, ...]
    enabled: bool
    created_at: float
    previous_until: float | None = Field(default=None, description="the previous secret also signs until this time")

    @classmethod
    def of(cls, webhook: Webhook) -> Self:
        return cls.model_validate(webhook, from_attributes=True)


class Rotation(Frozen):
    """How long the old secret is still used together with the new one."""

    overlap_s: float = Field(
        default=_OVERLAP_S, ge=0, le=7 * _OVERLAP_S, description="how long the old secret signs with the new one"
    )


class NewWebhook(WebhookView):
    """A webhook with its new secret, which no other answer shows."""

    secret: str = Field(repr=False, description="secret to verify signatures with (standardwebhooks.com)")


class Pinged(Frozen):
    """The ping that was sent; `GET …/deliveries` shows its outcome."""

    notice_id: NoticeId


class Webhooks:
    """A tenant's webhooks. Those of another are not found."""

    def __init__(self, settings: Settings, store: ObjectStore, temporal: Temporal, quotas: Quotas) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self._quotas = quotas
        self._locks = KeyedLocks()  # held while a webhook's record is read and written

    async def create(self, tenant: str, owner: str | None, choice: WebhookChoice) -> NewWebhook:
        """Create a webhook with a new secret, which only this answer contains.

        Raises:
            InvalidInput: the url is not allowed. (The addresses of host names are checked at delivery.)
            Conflict: the tenant has as many as it may have.
            QuotaExceeded
        """
        self._check(choice.url)
        if len(await asyncio.to_thread(self._ids, tenant)) >= _MOST_WEBHOOKS:
            raise Conflict(f"a tenant has at most {_MOST_WEBHOOKS} webhooks: delete one")
        webhook = Webhook(
            webhook_id=f"wh-{secrets.token_hex(12)}",
            tenant=tenant,
            owner=owner,
            url=choice.url,
            events=choice.events,
            secret=new_secret(),
            created_at=time.time(),
        )
        await self._write(webhook)
        audit.touched(webhook.webhook_id)
        return NewWebhook.of(webhook)

    async def of(self, tenant: str) -> tuple[WebhookView, ...]:
        """List a tenant's webhooks, oldest first."""
        found = await asyncio.to_thread(self._all, tenant)
        return tuple(WebhookView.of(webhook) for webhook in sorted(found, key=lambda w: w.created_at))

    async def show(self, tenant: str, webhook_id: str) -> WebhookView:
        return WebhookView.of(await asyncio.to_thread(self._read, tenant, webhook_id))

    async def change(self, tenant: str, webhook_id: str, change: WebhookChange) -> WebhookView:
        """Change a webhook. Messages under way go to the new url; a webhook that is not enabled gets none.

        Raises InvalidInput: as for a new one.
        """
        if change.url is not None:
            self._check(change.url)
        changed = {name: value for name, value in dict(change).items() if value is not None}
        return WebhookView.of(await self._update(tenant, webhook_id, lambda before: changed))

    def _check(self, url: str) -> None:
        if not self._settings.webhooks.allow_private_addresses and is_plainly_private(urlsplit(url).hostname or ""):
            raise InvalidInput(private_host("webhooks.allow_private_addresses"), "url")

    async def rotate(self, tenant: str, webhook_id: str, rotation: Rotation) -> NewWebhook:
        """Give a webhook a new secret. For `overlap_s` seconds messages are signed with the old one, too."""

        def change(before: Webhook) -> dict[str, object]:
            overlaps = rotation.overlap_s > 0
            return {
                "secret": new_secret(),
                "previous_secret": before.secret if overlaps else None,
                "previous_until": time.time() + rotation.overlap_s if overlaps else None,
            }

        return NewWebhook.of(await self._update(tenant, webhook_id, change))

    async def _update(self, tenant: str, webhook_id: str, change: Callable[[Webhook], dict[str, object]]) -> Webhook:
        async with self._locks.of(tenant, webhook_id):
            before = await asyncio.to_thread(self._read, tenant, webhook_id)
            after = before.model_copy(update=change(before))
            await self._write(after)
        audit.touched(webhook_id)
        return after

    async def delete(self, tenant: str, webhook_id: str) -> WebhookView:
        """Delete a webhook, its secret and its deliveries."""
        async with self._locks.of(tenant, webhook_id):
            webhook = await asyncio.to_thread(self._read, tenant, webhook_id)
            await asyncio.to_thread(self._remove, webhook)
        audit.touched(webhook_id)
        return WebhookView.of(webhook)

    async def deliveries(self, tenant: str, webhook_id: str, limit: int) -> tuple[Delivery, ...]:
        """Deliveries of notices, the newest first. A webhook keeps about 200."""
        await asyncio.to_thread(self._read, tenant, webhook_id)
        return await asyncio.to_thread(self._deliveries, tenant, webhook_id, limit)

    async def ping(self, tenant: str, webhook_id: str) -> Pinged:
        """Send a webhook a `ping`, whatever events it asked for. Raises Conflict when it is not enabled."""
        webhook = await asyncio.to_thread(self._read, tenant, webhook_id)
        if not webhook.enabled:
            raise Conflict(f"{webhook_id} is not enabled")
        notice = Notice(
            notice_id=new_notice_id(),
            tenant=tenant,
            type="ping",
            created_at=time.time(),
            data={"object": "webhook", "webhook": webhook_id},
        )
        await self._send_to(notice, (webhook_id,))
        return Pinged(notice_id=notice.notice_id)

    # The outbox.

    async def send_outbox(self, database: Database) -> int:
        """Start a workflow for each row of the outbox, then delete the row. Returns the number of rows.

        Two services may do so at once, since the id of a workflow is that of the notice.
        """
        num_done = 0
        oldest = select(OutboxRow).order_by(OutboxRow.created_at, OutboxRow.id).limit(_OUTBOX_PAGE)
        while rows := await database.reading(lambda session: session.scalars(oldest).all()):
            for row in rows:
                await self._send(row)
                sent = delete(OutboxRow).where(OutboxRow.id == row.id)
                await database.writing(methodcaller("execute", sent))
                num_done += 1
        return num_done

    async def _send(self, row: OutboxRow) -> None:
        try:
            fields = {"tenant": row.tenant, "type": row.type, "created_at": row.created_at}
            notice = Notice.model_validate({"notice_id": row.id, "data": row.payload, **fields})
        except ValidationError:  # written by another version: it must not block the rows after it
            logger.exception("%s is not sent to any webhook", row.id)
            return
        webhooks = await asyncio.to_thread(self._all, notice.tenant)
        if wanting := tuple(webhook.webhook_id for webhook in webhooks if webhook.wants(notice.type)):
            await self._send_to(notice, wanting)

    async def _send_to(self, notice: Notice, webhook_ids: tuple[str, ...]) -> None:
        first_retry_s = self._settings.webhooks.first_retry_s
        request = WebhookRequest(notice=notice, webhook_ids=webhook_ids, first_retry_s=first_retry_s)
        once = WorkflowIDReusePolicy.REJECT_DUPLICATE
        with suppress(WorkflowAlreadyStartedError):
            await self._temporal.start(WEBHOOK_WORKFLOW, request, notice.notice_id, notice.tenant, id_reuse_policy=once)

    # Records. What follows `_write` is blocking.

    async def _write(self, webhook: Webhook) -> None:
        key, data = webhook_record(webhook.tenant, webhook.webhook_id), webhook.model_dump_json(indent=1).encode()
        await self._quotas.put_record(webhook.tenant, key, data)

    def _ids(self, tenant: str) -> list[str]:
        prefix = webhook_record(tenant)
        return [item.key.removeprefix(prefix) for item in self._store.list(prefix)]

    def _all(self, tenant: str) -> list[Webhook]:
        found = []
        for webhook_id in self._ids(tenant):
            try:
                found.append(self._read(tenant, webhook_id))
            except NotFound:  # deleted since
                continue
            except ValidationError as error:  # one record that cannot be read must not strand the others
                # Without the input that pydantic quotes, which may be the secret.
                rules = error.errors(include_url=False, include_context=False, include_input=False)
                logger.error("webhook %s of %s cannot be read, and gets nothing: %s", webhook_id, tenant, rules)
        return found

    def _read(self, tenant: str, webhook_id: str) -> Webhook:
        try:
            return Webhook.model_validate_json(self._store.get_bytes(webhook_record(tenant, webhook_id)))
        except NotFound:
            raise NotFound(f"there is no webhook {webhook_id}") from None

    def _remove(self, webhook: Webhook) -> None:
        self._store.delete(webhook_record(webhook.tenant, webhook.webhook_id))
        for item in list(self._store.list(delivery_record(webhook.tenant, webhook.webhook_id))):
            self._store.delete(item.key)

    def _deliveries(self, tenant: str, webhook_id: str, limit: int) -> tuple[Delivery, ...]:
        keys = [item.key for item in self._store.list(delivery_record(tenant, webhook_id))]
        return tuple(Delivery.model_validate_json(self._store.get_bytes(key)) for key in reversed(keys[-limit:]))
