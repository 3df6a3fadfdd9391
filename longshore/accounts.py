"""Tenants with their quotas, keys, uploaded files, and the audit log, as the API shows them and is asked for them."""

import hashlib
import secrets
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator

from longshore.fields import NO_NUL, Frozen, pattern
from longshore.runs import Tenant


def _no_truth(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError("a number, and neither true nor false")
    return given


WorkerSharing = Literal["all", "tenant", "none"]


class QuotaSettings(BaseModel, extra="forbid"):
    """Default quotas, for tenants without their own; None: no limit."""

    _not_a_truth = field_validator("*", mode="before")(_no_truth)

    concurrent_runs: int | None = Field(
        default=None, ge=0, description="most runs that are accepted and have not ended"
    )
    gpu_hours: float | None = Field(default=None, ge=0, description="most GPU hours of the last 30 days' runs")
    spending: float | None = Field(
        default=None,
        ge=0,
        description="highest cost of the tenant's runs of the last 30 days, by `prices`; beyond it they are paused",
    )
    stored_bytes: int | None = Field(
        default=None,
        ge=0,
        description="most bytes of uploads, published versions, and the downloads and results of runs",
    )
    worker_sharing: WorkerSharing | None = Field(
        default=None,
        description="whose adapters may be trained on one worker: `tenant` (the default): this tenant's; `all`: those "
        "of all tenants with `all`; `none`: only one run's",
    )
    worker_weight: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="a tenant's weight, relative to others' (1), on shared workers and in queues for hosts",
    )


class Room(Frozen):
    """The bytes that a tenant stores, and how many it may, as the service counted them shortly before; None: no quota.

    A host keeps to it while it writes for the tenant.
    """

    used: int = 0
    most: int | None = None

    @property
    def left(self) -> int | None:
        return None if self.most is None else max(0, self.most - self.used)


class Measured(BaseModel, frozen=True):
    """A tenant's bytes in the store by category, except for uploads. `at`: when the last of them was measured.

    Shared data counts in full for every tenant that uses it.
    """

    at: float = 0.0
    num_bytes: dict[str, int] = {}


class TenantView(Frozen):
    """A tenant. `quotas`: fields that are set override the installation's."""

    tenant: Tenant
    title: str = ""
    quotas: QuotaSettings = QuotaSettings()
    created_at: float


class TenantUsage(Frozen):
    """A tenant's usage and quotas; a quota of None is no limit.

    `cost`: of its GPU hours; None if they have no price. `measured`: the bytes that are only measured periodically.
    """

    tenant: Tenant
    concurrent_runs: int
    gpu_hours: float
    stored_bytes: int
    measured: Measured = Measured()
    cost: float | None = None
    currency: str = "USD"
    quotas: QuotaSettings


Scope = Literal["read", "write", "inference", "admin"]
"""`admin`: the tenant's keys and audit log; in the first tenant also tenants, quotas and Temporal's payloads. No scope
contains another."""


ALL_SCOPES: tuple[Scope, ...] = get_args(Scope)


class KeyHolder(Frozen):
    """The holder of an API key."""

    tenant: Tenant
    key_id: str
    title: str = ""
    scopes: frozenset[Scope]


class KeyView(Frozen):
    """A key as the API shows it. `last_used_at` is at most a minute old."""

    key_id: str
    tenant: Tenant
    title: str
    prefix: str
    scopes: tuple[Scope, ...]
    created_by: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKey(KeyView):
    """A key that was just made. No other answer shows it."""

    key: str


def new_key() -> tuple[str, str]:
    """Make a key of 256 random bits. Returns it, and the part of it that may be shown."""
    mark = secrets.token_hex(6)
    return f"ls-{mark}-{secrets.token_urlsafe(32)}", mark


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class AuditEntry(Frozen):
    """One request. `path` omits the query string, which may hold secrets. `target`: what it changed, if anything."""

    id: int
    time: float
    tenant: str | None
    key_id: str | None
    method: str
    path: str
    target: str | None
    status: int
    address: str | None
    request_id: str


class AuditPage(Frozen):
    """Entries, newest first. `next` is the `before` of the following page."""

    entries: tuple[AuditEntry, ...]
    next: int | None


class FileView(Frozen):
    """A file in the store. The same bytes under the same name have the same URI."""

    file_id: str
    tenant: Tenant
    name: str
    purpose: str = "dataset"
    size: int
    sha256: str
    uri: str
    created_at: float


class FilePage(Frozen):
    """Files, newest first. `next` is the `after` of the following page."""

    files: tuple[FileView, ...]
    has_more: bool
    next: str | None = None


Title = Annotated[str, pattern(NO_NUL, "text here has no NUL character", max_length=128)]


class KeyRequest(Frozen):
    """A key that is to be made. It belongs to the tenant of the key that asks."""

    title: Title = ""
    scopes: frozenset[Scope] = Field(
        default=frozenset(("read", "write", "inference")), min_length=1, json_schema_extra={"uniqueItems": False}
    )
    expires_at: float | None = Field(default=None, description="seconds since 1970; never if absent")


class TenantRequest(Frozen):
    """A tenant that is to be made. `quotas`: fields that are given override the installation's."""

    tenant: Tenant
    title: Title = ""
    quotas: QuotaSettings = QuotaSettings()


class NewTenant(Frozen):
    """A tenant, and its first key, shown this once and an admin's. `warning`: what it shares with other tenants."""

    tenant: TenantView
    key: NewKey
    warning: str | None = None
