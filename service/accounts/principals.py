"""Principals: the tenant and the scopes of a request's API key. The edge finds them; endpoints declare what they need.

Dependencies are coroutines, though they wait for nothing: FastAPI calls a plain function on a thread, each time.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeGuard, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from longshore.fields import Frozen
from service.errors import Forbidden
from shared.runs.requests import FIRST_TENANT, Tenant

Scope = Literal["read", "write", "inference", "admin"]
"""`admin`: the tenant's keys and audit log; in the first tenant also tenants, quotas and Temporal's payloads. No scope
contains another."""
ALL_SCOPES: tuple[Scope, ...] = get_args(Scope)


class Principal(Frozen):
    """The holder of an API key."""

    tenant: Tenant
    key_id: str
    title: str = ""
    scopes: frozenset[Scope]

    @property
    def is_operator(self) -> bool:
        """True for an admin of the whole installation."""
        return self.tenant == FIRST_TENANT and "admin" in self.scopes

    def demand(self, scope: Scope) -> None:
        """Raises Forbidden when the key lacks a scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this key lacks the scope {scope}: it has {', '.join(sorted(self.scopes)) or 'none'}")


BEARER = [Depends(HTTPBearer(auto_error=False, description="an API key"))]
"""A dependency of every operation, only for the API's description: the middleware (edge.py) has checked the key."""


async def principal(request: Request) -> Principal:
    """The request's principal, which the middleware (edge.py) has found."""
    found: Principal = request.state.principal
    return found


Asking = Annotated[Principal, Depends(principal)]


Demand = Callable[[Request], Awaitable[None]]


def require(*scopes: Scope) -> Demand:
    """A dependency: the key must have this scope, or one of these."""

    async def demand(request: Request) -> None:
        asking = await principal(request)
        if not asking.scopes & set(scopes):
            asking.demand(scopes[0])

    return _noted(demand)


def require_operator(what: str) -> Demand:
    """A dependency: the key must be of an admin of the first tenant. `what`: what only they may do, for the message."""

    async def demand(request: Request) -> None:
        if not (await principal(request)).is_operator:
            raise Forbidden(f"{what} the first tenant's admins")

    return _noted(demand)


async def reads_or_writes(request: Request) -> None:
    """A FastAPI dependency: GET and HEAD need the scope `read`, other methods `write`. Raises Forbidden."""
    (await principal(request)).demand("read" if request.method in ("GET", "HEAD") else "write")


def is_demand(call: object) -> TypeGuard[Demand]:
    """True for a dependency that demands a scope of the request's key."""
    return call in _demands


_demands: set[object] = set()


def _noted(demand: Demand) -> Demand:
    _demands.add(demand)
    return demand


_noted(reads_or_writes)
