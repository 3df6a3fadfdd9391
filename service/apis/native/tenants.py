"""The native API's endpoints for `/whoami`, keys, tenants, usage and the audit log."""

import logging
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from longshore.fields import Frozen, pattern
from service.accounts.audit import AuditPage
from service.accounts.keys import (
    ALL_SCOPES,
    BEARER,
    Asking,
    KeyView,
    NewKey,
    Principal,
    Scope,
    require,
    require_operator,
)
from service.accounts.tenants import TenantRecord, TenantUsage
from service.apis.bodies import JsonBody, JsonRoute
from service.apis.errors import RESPONSES
from service.automation.upkeep import GarbageView
from service.backend import Backed, Backend
from service.errors import Conflict, Forbidden
from shared.automation import GarbageRequest
from shared.field_rules import NO_NUL
from shared.limits import QuotaSettings
from shared.runs.requests import FIRST_TENANT, Tenant

logger = logging.getLogger("longshore.service")
router = APIRouter(route_class=JsonRoute, prefix="/api/v1", dependencies=BEARER, responses=RESPONSES)
_admin = [Depends(require("admin"))]

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

    tenant: TenantRecord
    key: NewKey
    warning: str | None = None


@router.get("/whoami")
async def whoami(asking: Asking) -> Principal:
    """The tenant and the scopes of the key that asks."""
    return asking


@router.get("/usage", dependencies=[Depends(require("read"))])
async def usage(backend: Backed, asking: Asking) -> TenantUsage:
    """The tenant's usage and quotas."""
    return await backend.quotas.usage(asking.tenant)


@router.post("/keys", status_code=201, dependencies=_admin)
async def create_key(request: JsonBody[KeyRequest], backend: Backed, asking: Asking) -> NewKey:
    """Make a key. It is shown this once."""
    return await backend.keys.create(
        asking.tenant,
        title=request.title,
        scopes=request.scopes,
        expires_at=request.expires_at,
        created_by=asking.key_id,
    )


@router.get("/keys", dependencies=_admin)
async def list_keys(backend: Backed, asking: Asking) -> tuple[KeyView, ...]:
    """The tenant's keys, newest first, without their secrets."""
    return await backend.keys.list(asking.tenant)


@router.delete("/keys/{key_id}", dependencies=_admin)
async def revoke_key(key_id: str, backend: Backed, asking: Asking) -> KeyView:
    """End a key for good."""
    return await backend.keys.revoke(asking.tenant, key_id)


_operators = [Depends(require_operator("tenants are an affair of"))]


@router.post("/tenants", status_code=201, dependencies=_operators)
async def create_tenant(request: JsonBody[TenantRequest], backend: Backed, asking: Asking) -> NewTenant:
    """Make a tenant and its first key. 409 when the name is taken."""
    backend.quotas.check_priced(request.quotas)
    try:
        tenant = await backend.tenants.create(request.tenant, request.title, request.quotas)
    except Conflict:
        if request.tenant == FIRST_TENANT or await _has_key(backend, request.tenant):
            raise
        # Its making was cut off before somebody had a key to it: who tries again is given one.
        tenant = await backend.tenants.complete(request.tenant)
    key = await backend.keys.create(tenant.tenant, title="first", scopes=ALL_SCOPES, created_by=asking.key_id)
    return NewTenant(tenant=tenant, key=key, warning=_shared_folders(backend))


def _shared_folders(backend: Backend) -> str | None:
    """The warning for a second tenant if all tenants may read folders of the hosts; None if no folder is open."""
    if not (roots := backend.settings.download.file_roots):
        return None
    text = f"every tenant may read files below {', '.join(map(str, roots))} on this installation's hosts"
    logger.warning("%s (download.file_roots)", text)
    return f"{text}: name other folders as download.file_roots, or with `longshore dev --open`"


async def _has_key(backend: Backend, tenant: str) -> bool:
    """True if the tenant has a key that is neither revoked nor expired."""
    keys = await backend.keys.list(tenant)
    return any(key.revoked_at is None and (key.expires_at is None or key.expires_at > time.time()) for key in keys)


@router.get("/tenants", dependencies=_operators)
async def list_tenants(backend: Backed) -> tuple[TenantRecord, ...]:
    """All tenants, by name."""
    return await backend.tenants.list()


@router.get("/tenants/{tenant}/usage", dependencies=_operators)
async def tenant_usage(tenant: Tenant, backend: Backed) -> TenantUsage:
    """A tenant's usage and quotas."""
    return await backend.quotas.usage((await backend.tenants.show(tenant)).tenant)


@router.put("/tenants/{tenant}/quotas", dependencies=_operators)
async def set_quotas(tenant: Tenant, quotas: JsonBody[QuotaSettings], backend: Backed) -> TenantRecord:
    """Set a tenant's quotas. Fields that are left out return to the installation's values."""
    backend.quotas.check_priced(quotas)
    return await backend.tenants.set_quotas(tenant, quotas)


@router.post("/gc", dependencies=_operators)
async def collect_garbage(
    backend: Backed,
    dry_run: Annotated[bool, Query(description="only report what would be deleted")] = True,
    wait_s: Annotated[float, Query(ge=0, le=600, description="how long to wait for the end")] = 60,
) -> GarbageView:
    """Measure all tenants' storage, and delete objects that the policies expire. A repeated call joins."""
    return await backend.garbage.collect(GarbageRequest(is_dry=dry_run), wait_s)


@router.get("/audit", dependencies=_admin)
async def audit_log(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, le=2**62, description="the `next` of the previous page")] = None,
    everybody: Annotated[
        bool,
        Query(description="for the first tenant only: entries of all tenants, and of requests without a valid key"),
    ] = False,
) -> AuditPage:
    """Requests that changed something or were refused, newest first."""
    if everybody and not asking.is_operator:
        raise Forbidden("only admins of the first tenant see the log of other tenants")
    return await backend.audit.page(None if everybody else asking.tenant, limit, before)
