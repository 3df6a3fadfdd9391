"""Webhooks: a tenant's addresses, the notices on its runs that they get, and the deliveries."""

import base64
import json
import secrets
import time
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue

from longshore.fields import Frozen
from shared.runs.requests import Tenant

WebhookId = Annotated[str, Field(pattern=r"^wh-[0-9a-f]{24}$")]
NoticeId = Annotated[str, Field(pattern=r"^evt-[0-9a-f]{23}$")]
NoticeType = Literal[
    "run.created",
    "run.resumed",
    "run.paused",
    "run.succeeded",
    "run.failed",
    "run.cancelled",
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
    "ping",
]
NOTICE_TYPES: tuple[NoticeType, ...] = get_args(NoticeType)
_SECRET_PREFIX = "whsec_"
_SECRET_BYTES = 32


def _plain_http(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a webhook's url is http://host/path or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a url may not carry a user or password: check the signature instead")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("a url is written in ASCII without spaces: escape other characters")
    return url


WebhookUrl = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_plain_http)]


class Webhook(Frozen):
    """The record of a webhook. Only here its secret is stored, unencrypted, since signing needs it."""

    schema_version: Literal[1] = 1
    webhook_id: WebhookId
    tenant: Tenant
    owner: str | None = Field(default=None, description="id of the API key that created it")
    url: WebhookUrl
    events: tuple[NoticeType, ...] = Field(default=(), description="only these events are sent; all if empty")
    enabled: bool = True
    secret: str = Field(repr=False, description="whsec_ and the key of the signatures in base64")
    previous_secret: str | None = Field(default=None, repr=False, description="the previous secret, which also signs")
    previous_until: float | None = Field(default=None, description="until when it does, in seconds since 1970")
    created_at: float

    def wants(self, kind: str) -> bool:
        return self.enabled and (not self.events or kind in self.events)

    def keys(self, now: float) -> tuple[bytes, ...]:
        """Return the signing keys at a moment: the current secret's, then the previous one's while it is valid."""
        before = self.previous_secret if now < (self.previous_until or 0) else None
        return tuple(base64.b64decode(s.removeprefix(_SECRET_PREFIX)) for s in (self.secret, before) if s)


class Notice(Frozen):
    """A message to webhooks. It is small; clients get more from the API."""

    notice_id: NoticeId
    tenant: Tenant
    type: NoticeType
    created_at: float
    data: dict[str, JsonValue]

    def body(self) -> bytes:
        """Return the body, the same bytes at every attempt, with the fields that clients of OpenAI's webhooks read."""
        moment = datetime.fromtimestamp(self.created_at, UTC).isoformat(timespec="milliseconds")
        said = {
            "id": self.notice_id,
            "object": "event",
            "type": self.type,
            "created_at": int(self.created_at),
            "timestamp": moment.replace("+00:00", "Z"),
            "data": self.data,
        }
        return json.dumps(said, separators=(",", ":")).encode()


class Attempt(Frozen):
    """One attempt to deliver. `status`: the receiver's HTTP status; None without an answer."""

    at: float
    status: int | None = None
    problem: str | None = None
    retry_after_s: float | None = Field(default=None, description="seconds that the receiver asked to wait")


class Delivery(Frozen):
    """The delivery of one notice to one webhook. `attempts`: only the last ones."""

    notice_id: NoticeId
    type: NoticeType
    run_id: str | None = None
    created_at: float
    state: Literal["pending", "delivered", "failed"] = "pending"
    num_attempts: int = 0
    attempts: tuple[Attempt, ...] = ()


def new_secret() -> str:
    """Return a new key for a webhook's signatures: 256 random bits."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def new_notice_id() -> str:
    """Return milliseconds since 1970 in 11 hex digits, so that ids sort by time, and 12 random digits."""
    return f"evt-{int(time.time() * 1000):011x}{secrets.token_hex(6)}"


class WebhookRequest(Frozen):
    """A notice and its webhooks. Workflows may not read settings, so it also has the first retry's delay."""

    notice: Notice
    webhook_ids: tuple[WebhookId, ...]
    first_retry_s: float
