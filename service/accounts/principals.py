"""Principals: the tenant and the scopes of a request's API key. The edge finds them; endpoints say what they require.

Dependencies are coroutines, though they wait for nothing: FastAPI calls a plain function on a thread, each time.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from service.errors import Forbidden
from shared.contract import Frozen
from shared.runs.requests import FIRST_TENANT, Tenant

Scope = Literal["read", "write", "inference", "admin"]
"""`admin`: the tenant's keys and audit log; in the first tenant also tenants and quotas. No scope contains another."""
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


def require(scope: Scope) -> Callable[[Principal], Awaitable[None]]:
    """A dependency: the key must have this scope."""

    async def check(asking: Asking) -> None:
        asking.demand(scope)

    return check


async def reads_or_writes(request: Request, asking: Asking) -> None:
    """A FastAPI dependency: GET and HEAD need the scope `read`, other methods `write`. Raises Forbidden."""
    asking.demand("read" if request.method in ("GET", "HEAD") else "write")
