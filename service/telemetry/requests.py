"""Counts and times requests to the web service, and gives each a span."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.telemetry.traces import context_of, current_ids

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNMATCHED = "unmatched"
_PREFIX = "/api/v1"  # of routers that have none of their own (service/app.py)
REQUESTS = Counter(
    "longshore_http_requests", "Requests that were answered, or whose answer began", ["method", "route", "status"]
)
SECONDS = Histogram(
    "longshore_http_request_seconds",
    "From a request to the beginning of its answer",
    ["method", "route"],
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
_asked: ContextVar[MutableMapping[str, Any] | None] = ContextVar("asked", default=None)


class SeenRequests:
    """ASGI middleware, the outermost. A route is named by its template, so that there are few of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tracer = trace.get_tracer("longshore.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        with self._span(method, scope) as span:

            async def seen(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route, status = _route_of(scope), message["status"]
                    REQUESTS.labels(method, route, status).inc()
                    SECONDS.labels(method, route).observe(time.perf_counter() - begin)
                    span.update_name(f"{method} {route}")
                    span.set_attributes({"http.route": route, "http.response.status_code": status})
                await send(message)

            await self._app(scope, receive, seen)

    @contextmanager
    def _span(self, method: str, scope: Scope) -> Iterator[trace.Span]:
        parent = context_of(Headers(scope=scope).get("traceparent"))
        token = _asked.set(scope)
        try:
            with self._tracer.start_as_current_span(
                method, parent, trace.SpanKind.SERVER, {"http.request.method": method}
            ) as span:
                yield span
        finally:
            _asked.reset(token)


def _route_of(scope: Scope) -> str:
    """Return a route's template. FastAPI leaves out the prefix that a router was included with."""
    template = str(getattr(scope.get("route"), "path", _UNMATCHED))
    is_included = scope["path"].startswith(_PREFIX) and template.startswith("/") and not template.startswith(_PREFIX)
    return _PREFIX + template if is_included else template


def request_ids() -> dict[str, str]:
    """Return the ids of the request in hand, for a line of the log."""
    found, scope = current_ids(), _asked.get()
    if scope is not None:
        principal = scope.get("state", {}).get("principal")
        run_id = scope.get("path_params", {}).get("run_id")
        found |= {"tenant": principal.tenant} if principal is not None else {}
        found |= {"run_id": run_id} if isinstance(run_id, str) else {}
    return found
