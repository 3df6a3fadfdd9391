"""Webhooks: a tenant's records, the outbox of changes to send, and deliveries."""

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from operator import methodcaller
from urllib.parse import urlsplit

from pydantic import ValidationError
from sqlalchemy import delete, select
from temporalio import activity
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from activities.sources.http import requested
from longshore.automation import (
    Attempt,
    Delivery,
    NewWebhook,
    Pinged,
    Rotation,
    WebhookChange,
    WebhookChoice,
    WebhookView,
)
from service.accounts import audit
from service.accounts.tenants import Documents, Quotas
from service.database.engine import Database, OutboxRow
from service.runs.rows import serve
from service.temporal import Temporal
from shared.addresses import is_plainly_private, private_host
from shared.automation import DeliverRequest, Notice, Webhook, WebhookRequest, new_notice_id, new_secret
from shared.errors import Conflict, InvalidInput, LongshoreError
from shared.settings import DownloadSettings, Settings
from workflows.policies import queue_of

logger = logging.getLogger("longshore.service")

WEBHOOK_WORKFLOW = "WebhookWorkflow"
_MOST_WEBHOOKS = 20
_OUTBOX_PAGE = 100
_OPENED_BY = "webhooks.allow_private_addresses"
_KEPT_ATTEMPTS = 20
_LONGEST_WAIT_S = 6 * 3600.0
"""The longest pause that a receiver's Retry-After is granted; it equals the retry policy's longest pause."""
_KEPT_DELIVERIES = 200
_AT_ONCE = 8  # deliveries, which wait for receivers


class NotDelivered(LongshoreError):
    """The receiver cannot be reached, or did not accept the notice. The delivery is retried later."""


class Webhooks:
    """A tenant's webhooks. Those of another are not found."""

    def __init__(self, settings: Settings, database: Database, temporal: Temporal, quotas: Quotas) -> None:
        self._settings = settings
        self._database = database
        self._temporal = temporal
        self._records = Documents(database, quotas, "webhook", Webhook)
        self._deliveries = Documents(database, quotas, "delivery", Delivery, is_counted=False)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "webhooks")

    async def create(self, tenant: str, owner: str | None, choice: WebhookChoice) -> NewWebhook:
        """Create a webhook with a new secret, which only this answer contains.

        Raises:
            InvalidInput: the url is not allowed. (The addresses of host names are checked at delivery.)
            Conflict: the tenant has as many as it may have.
            QuotaExceeded
        """
        self._check(choice.url)
        webhook = Webhook(
            webhook_id=f"wh-{secrets.token_hex(12)}",
            tenant=tenant,
            owner=owner,
            url=choice.url,
            events=choice.events,
            secret=new_secret(),
            created_at=time.time(),
        )
        await self._records.add(tenant, webhook.webhook_id, webhook, check=_check_number)
        audit.touched(webhook.webhook_id)
        return NewWebhook.of(webhook)

    async def of(self, tenant: str) -> tuple[WebhookView, ...]:
        """List webhooks, oldest first."""
        found = await self._records.all(tenant)
        return tuple(WebhookView.of(webhook) for webhook in sorted(found, key=lambda w: w.created_at))

    async def show(self, tenant: str, webhook_id: str) -> WebhookView:
        return WebhookView.of(await self._records.get(tenant, webhook_id))

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

    async def rotate(self, tenant: str, webhook_id: str, rotation: Rotation | None = None) -> NewWebhook:
        """Give a webhook a new secret, which only this answer contains. Messages are signed with both for a while."""
        overlap_s = (rotation or Rotation()).overlap_s

        def change(before: Webhook) -> dict[str, object]:
            return {
                "secret": new_secret(),
                "previous_secret": before.secret if overlap_s else None,
                "previous_until": time.time() + overlap_s if overlap_s else None,
            }

        return NewWebhook.of(await self._update(tenant, webhook_id, change))

    async def _update(self, tenant: str, webhook_id: str, change: Callable[[Webhook], dict[str, object]]) -> Webhook:
        after = await self._records.change(tenant, webhook_id, lambda w: w.model_copy(update=change(w)))
        audit.touched(webhook_id)
        return after

    async def delete(self, tenant: str, webhook_id: str) -> WebhookView:
        """Delete a webhook, its secret and its deliveries."""
        webhook = await self._records.get(tenant, webhook_id)
        await self._records.delete(tenant, webhook_id)
        await self._deliveries.delete_below(tenant, f"{webhook_id}/")
        audit.touched(webhook_id)
        return WebhookView.of(webhook)

    async def deliveries(self, tenant: str, webhook_id: str, limit: int = 20) -> tuple[Delivery, ...]:
        """List deliveries with the receiver's answers, newest first. A webhook keeps about 200."""
        await self._records.get(tenant, webhook_id)
        return tuple((await self._deliveries.all(tenant, f"{webhook_id}/"))[: -limit - 1 : -1])

    async def ping(self, tenant: str, webhook_id: str) -> Pinged:
        """Send a `ping`, whatever events the webhook asked for. Raises Conflict when it is not enabled."""
        webhook = await self._records.get(tenant, webhook_id)
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

    async def send_outbox(self) -> int:
        """Start a workflow for each row of the outbox, then delete the row. Returns the number of rows.

        Two services may do so at once, since the id of a workflow is that of the notice.
        """
        num_done = 0
        oldest = select(OutboxRow).order_by(OutboxRow.created_at, OutboxRow.id).limit(_OUTBOX_PAGE)
        while rows := await self._database.reading(lambda session: session.scalars(oldest).all()):
            for row in rows:
                await self._send(row)
                sent = delete(OutboxRow).where(OutboxRow.id == row.id)
                await self._database.writing(methodcaller("execute", sent))
                num_done += 1
        return num_done

    async def _send(self, row: OutboxRow) -> None:
        try:
            fields = {"tenant": row.tenant, "type": row.type, "created_at": row.created_at}
            notice = Notice.model_validate({"notice_id": row.id, "data": row.payload, **fields})
        except ValidationError:  # written by another version: it must not block the rows after it
            logger.exception("%s is not sent to any webhook", row.id)
            return
        webhooks = await self._records.all(notice.tenant)
        if wanting := tuple(webhook.webhook_id for webhook in webhooks if webhook.wants(notice.type)):
            await self._send_to(notice, wanting)

    async def _send_to(self, notice: Notice, webhook_ids: tuple[str, ...]) -> None:
        first_retry_s = self._settings.webhooks.first_retry_s
        request = WebhookRequest(notice=notice, webhook_ids=webhook_ids, first_retry_s=first_retry_s)
        once = WorkflowIDReusePolicy.REJECT_DUPLICATE
        with suppress(WorkflowAlreadyStartedError):
            await self._temporal.start(WEBHOOK_WORKFLOW, request, notice.notice_id, notice.tenant, id_reuse_policy=once)

    # Deliveries.

    async def serve(self) -> None:
        """Deliver notices, until cancelled. Raises TemporalUnavailable: before the first one."""
        queue = queue_of("deliver", self._settings.control_queue)
        await serve(self._temporal, queue, self.deliver, self.give_up, at_once=_AT_ONCE)

    @activity.defn(name="deliver")
    async def deliver(self, request: DeliverRequest) -> None:
        """Make one attempt at a delivery, unless the webhook was deleted or disabled.

        Raises:
            NotDelivered: another attempt may succeed.
            ApplicationError: the same; the receiver asks for a longer pause than the retry policy has.
            InvalidInput: the receiver's address is not allowed, or it answers that it is gone for good (410).
        """
        webhook = await self._records.find(request.notice.tenant, request.webhook_id)
        if webhook is None or not webhook.enabled:
            return
        loop = asyncio.get_running_loop()
        attempt, is_final = await loop.run_in_executor(self._threads, self._attempt, webhook, request.notice)
        await self._note(request, partial(_with_attempt, attempt))
        if attempt.problem is None:
            return
        if is_final:
            raise InvalidInput(attempt.problem, request.webhook_id)
        wait_s = min(attempt.retry_after_s or 0, _LONGEST_WAIT_S)
        if wait_s > _planned_pause_s():
            later = timedelta(seconds=wait_s)
            raise ApplicationError(attempt.problem, type=NotDelivered.__name__, next_retry_delay=later)
        raise NotDelivered(attempt.problem)

    @activity.defn(name="give_up_delivery")
    async def give_up(self, request: DeliverRequest) -> None:
        if await self._records.find(request.notice.tenant, request.webhook_id) is not None:
            await self._note(request, lambda before: before.model_copy(update={"state": "failed"}))

    async def _note(self, request: DeliverRequest, change: Callable[[Delivery], Delivery]) -> None:
        """Change the record of a delivery. A webhook keeps its newest ones."""
        notice, run_id = request.notice, request.notice.data.get("id")
        key = f"{request.webhook_id}/{notice.notice_id}"
        new = Delivery(
            notice_id=notice.notice_id,
            type=notice.type,
            run_id=run_id if isinstance(run_id, str) else None,
            created_at=notice.created_at,
        )
        if await self._deliveries.add(notice.tenant, key, new) is None:
            keys = await self._deliveries.keys(notice.tenant, f"{request.webhook_id}/")
            for old in keys[:-_KEPT_DELIVERIES]:
                await self._deliveries.delete(notice.tenant, old)
        await self._deliveries.change(notice.tenant, key, change)

    def _attempt(self, webhook: Webhook, notice: Notice) -> tuple[Attempt, bool]:
        """Make one attempt. Returns its record, and True if it must not be retried."""
        at = time.time()
        try:
            status, retry_after = self._post(webhook, notice, at)
        except InvalidInput as error:
            return Attempt(at=at, problem=error.message), True
        except TimeoutError:
            return Attempt(at=at, problem="the receiver does not answer in time"), False
        except (OSError, HTTPException) as error:
            return Attempt(at=at, problem=f"the receiver cannot be reached ({type(error).__name__})"), False
        problem = _refusal(status)
        wait_s = retry_after_s(retry_after, at) if problem else None
        return Attempt(at=at, status=status, problem=problem, retry_after_s=wait_s), status == HTTPStatus.GONE

    def _post(self, webhook: Webhook, notice: Notice, at: float) -> tuple[int, str | None]:
        """Returns status and Retry-After of the answer. Its body is not read; a redirect is an answer like others."""
        body, timestamp = notice.body(), int(at)
        signatures = (signature(key, notice.notice_id, timestamp, body) for key in webhook.keys(at))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "longshore",
            "Connection": "close",
            "webhook-id": notice.notice_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(signatures),
        }
        settings = self._settings.webhooks
        reach = DownloadSettings(allow_private_addresses=settings.allow_private_addresses, timeout_s=settings.timeout_s)
        with requested("POST", webhook.url, reach, headers, body, _OPENED_BY) as response:
            return response.status, response.getheader("Retry-After")


def _check_number(others: Sequence[Webhook]) -> None:
    if len(others) >= _MOST_WEBHOOKS:
        raise Conflict(f"a tenant has at most {_MOST_WEBHOOKS} webhooks: delete one")


def signature(key: bytes, notice_id: str, timestamp: int, body: bytes) -> str:
    """HMAC-SHA256 over `id.timestamp.body` (Standard Webhooks, symmetric signatures, v1)."""
    signed = b"%s.%d.%s" % (notice_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def retry_after_s(header: str | None, now: float) -> float | None:
    """Parse a Retry-After header (RFC 9110, 10.2.3), a number of seconds or a date; None for neither."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _planned_pause_s() -> float:
    """The pause before the next attempt by the retry policy alone, in seconds."""
    info = activity.info()
    policy = info.retry_policy
    if policy is None:
        return 0.0
    longest = policy.maximum_interval or timedelta(seconds=_LONGEST_WAIT_S)
    exponent = min(info.attempt - 1, 64)
    planned_s = policy.initial_interval.total_seconds() * policy.backoff_coefficient**exponent
    return min(planned_s, longest.total_seconds())


def _refusal(status: int) -> str | None:
    match status // 100:
        case 2:
            return None
        case 3:
            return f"the receiver answered {status}: redirects are not followed"
        case _:
            return f"the receiver answered {status}"


def _with_attempt(attempt: Attempt, before: Delivery) -> Delivery:
    return before.model_copy(
        update={
            "state": "delivered" if attempt.problem is None else "pending",
            "num_attempts": before.num_attempts + 1,
            "attempts": (*before.attempts, attempt)[-_KEPT_ATTEMPTS:],
        }
    )
