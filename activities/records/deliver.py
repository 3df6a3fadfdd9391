"""Deliver: one notice to one webhook, signed as the Standard Webhooks specification says, each attempt on record."""

import base64
import hashlib
import hmac
import time
from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.host_context import HostContext, beating
from activities.sources.http import requested
from longshore.fields import Frozen
from shared.automation import Attempt, Delivery, Notice, Webhook, WebhookId
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.settings import DownloadSettings
from shared.storage.artifacts import read_record
from shared.storage.paths import delivery_record, webhook_record
from shared.storage.store import ObjectStore

_OPENED_BY = "webhooks.allow_private_addresses"
_KEPT_ATTEMPTS = 20
_KEPT_DELIVERIES = 200
_LONGEST_WAIT_S = 6 * 3600.0
"""The longest pause that a receiver's Retry-After is granted; it equals the retry policy's longest pause."""


class DeliverRequest(Frozen):
    """A notice for a webhook. The webhook's address and secret are read from its record: Temporal never sees them."""

    webhook_id: WebhookId
    notice: Notice


class Delivered(Frozen):
    """The receiver's HTTP status; None for a webhook that was deleted or disabled."""

    status: int | None


class NotDelivered(LongshoreError):
    """The receiver cannot be reached, or did not accept the notice. The delivery is retried later."""


class Deliver:
    """The activities that deliver notices to webhooks."""

    def __init__(self, host: HostContext) -> None:
        self._host = host
        webhooks = host.settings.webhooks
        self._reach = DownloadSettings(
            allow_private_addresses=webhooks.allow_private_addresses, timeout_s=webhooks.timeout_s
        )

    @activity.defn(name="deliver")
    def deliver(self, request: DeliverRequest) -> Delivered:
        """Make one attempt at a delivery.

        Raises:
            NotDelivered: another attempt may succeed.
            ApplicationError: the same; the receiver asks for a longer pause than the retry policy has.
            InvalidInput: the receiver's address is not allowed, or it answers that it is gone for good (410).
        """
        store = self._host.store
        with beating():
            webhook = _find(store, request)
            if webhook is None or not webhook.enabled:
                return Delivered(status=None)
            attempt, is_final = self._attempt(webhook, request.notice)
            _note(store, request, attempt)
        if attempt.problem is None:
            return Delivered(status=attempt.status)
        if is_final:
            raise InvalidInput(attempt.problem, request.webhook_id)
        wait_s = min(attempt.retry_after_s or 0, _LONGEST_WAIT_S)
        if wait_s > _planned_pause_s():
            later = timedelta(seconds=wait_s)
            raise ApplicationError(attempt.problem, type=NotDelivered.__name__, next_retry_delay=later)
        raise NotDelivered(attempt.problem)

    @activity.defn(name="give_up_delivery")
    def give_up(self, request: DeliverRequest) -> None:
        """Record that no more attempts are made."""
        store = self._host.store
        if _find(store, request) is not None:
            _write(store, request, _delivery(store, request).model_copy(update={"state": "failed"}))

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
        with requested("POST", webhook.url, self._reach, headers, body, _OPENED_BY) as response:
            return response.status, response.getheader("Retry-After")


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


def _find(store: ObjectStore, request: DeliverRequest) -> Webhook | None:
    with suppress(NotFound):
        return read_record(store, webhook_record(request.notice.tenant, request.webhook_id), Webhook)
    return None


def _delivery(store: ObjectStore, request: DeliverRequest) -> Delivery:
    notice = request.notice
    with suppress(NotFound):
        return read_record(store, delivery_record(notice.tenant, request.webhook_id, notice.notice_id), Delivery)
    run_id = notice.data.get("id")
    return Delivery(
        notice_id=notice.notice_id,
        type=notice.type,
        run_id=run_id if isinstance(run_id, str) else None,
        created_at=notice.created_at,
    )


def _note(store: ObjectStore, request: DeliverRequest, attempt: Attempt) -> None:
    """Put an attempt on record. A webhook keeps its newest deliveries."""
    before = _delivery(store, request)
    if not before.attempts:
        keys = [item.key for item in store.list(delivery_record(request.notice.tenant, request.webhook_id))]
        for key in keys[: max(0, len(keys) - _KEPT_DELIVERIES + 1)]:
            store.delete(key)
    after = before.model_copy(
        update={
            "state": "delivered" if attempt.problem is None else "pending",
            "num_attempts": before.num_attempts + 1,
            "attempts": (*before.attempts, attempt)[-_KEPT_ATTEMPTS:],
        }
    )
    _write(store, request, after)


def _write(store: ObjectStore, request: DeliverRequest, delivery: Delivery) -> None:
    key = delivery_record(request.notice.tenant, request.webhook_id, delivery.notice_id)
    store.put_bytes(key, delivery.model_dump_json(indent=1).encode())
