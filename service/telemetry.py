"""Traces of requests and workflows, metrics of Temporal's SDK, ids for the log."""

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from temporalio import activity, workflow
from temporalio.client import Interceptor
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

if TYPE_CHECKING:
    from temporalio.contrib.opentelemetry import TracingInterceptor


# --- Traces, sent by OTLP (HTTP, protobuf) if OTEL_EXPORTER_OTLP_ENDPOINT is set ---
#
# One trace leads from a request through workflow and activities to the optimizer steps, whose spans the GPU host makes
# of the worker's events (activities/telemetry.py). Temporal's interceptor makes a workflow's spans outside of the
# workflow and skips those of replays; ids travel in headers, which no workflow reads.

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACE_PARENT = "traceparent"
# Only ids, counts and names: an error's text, a path or a header may contain a user's text.
_ATTRIBUTES = re.compile(
    r"temporal\w+ID|temporalActivityType|longshore\.\w+|error\.type"
    r"|http\.request\.method|http\.route|http\.response\.status_code"
)
# Users' pages and the service's own lists ask each second.
_DROPPED = ("QueryWorkflow:", "HandleQuery:")
_ERROR = re.compile(r"[A-Za-z_]\w{0,63}")
_LAST_MS = 5000
_interceptors: tuple[Interceptor, ...] = ()


def start_tracing(process: str) -> None:
    """Send spans of this process from now on, if an endpoint is named. Called once, at a process's start."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    global _interceptors
    resource = Resource.create({"service.name": f"longshore-{process}"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    trace.set_tracer_provider(provider)
    _interceptors = (temporal_interceptor(trace.get_tracer("longshore.temporal")),)


def stop_tracing() -> None:
    """Send the last spans. Safe to repeat."""
    if _interceptors:
        trace.get_tracer_provider().force_flush(_LAST_MS)  # type: ignore[attr-defined]


@contextmanager
def span_of_program(process: str, name: str, parent: str | None) -> Iterator[str | None]:
    """Record a span of the whole program; yields the header that continues its trace elsewhere, None without one."""
    start_tracing(process)
    try:
        with trace.get_tracer("longshore.program").start_as_current_span(name, context_of(parent)):
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier)
            yield carrier.get(_TRACE_PARENT)
    finally:
        stop_tracing()


def tracing_interceptors() -> Sequence[Interceptor]:
    """Return the interceptors that a client of Temporal needs to propagate traces."""
    return _interceptors


def context_of(traceparent: str | None) -> Any:
    """Return the context that a request's header names. Neither baggage nor `tracestate`, a client's text, is taken."""
    return TraceContextTextMapPropagator().extract({_TRACE_PARENT: traceparent} if traceparent else {})


def current_ids() -> dict[str, str]:
    """Return the ids of the current work, for log lines."""
    found: dict[str, str] = {}
    if workflow.in_workflow():
        found["run_id"] = workflow.info().workflow_id
    elif activity.in_activity():
        info = activity.info()
        found["run_id"], found["activity"] = info.workflow_id or "", info.activity_type
        found["tenant"] = info.priority.fairness_key or ""  # service/temporal.py: each tenant's own
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        found |= {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
    return {name: value for name, value in found.items() if value}


def temporal_interceptor(tracer: trace.Tracer) -> "TracingInterceptor":
    """Return the interceptor of clients and workers. It passes on ids alone: neither baggage nor `tracestate`."""
    from temporalio.contrib.opentelemetry import TracingInterceptor, TracingWorkflowInboundInterceptor
    from temporalio.worker import WorkflowInboundInterceptor, WorkflowInterceptorClassInput

    class InWorkflow(TracingWorkflowInboundInterceptor):
        def __init__(self, next: WorkflowInboundInterceptor) -> None:
            super().__init__(next)
            self.text_map_propagator = TraceContextTextMapPropagator()
            self._before: Any = None

        def _load_workflow_context_carrier(self) -> Any:
            """Return the trace that the workflow was started in, or a new one.

            A schedule starts it in none. A workflow that continues as new begins another, so that no trace grows
            without bound; its first span links to the one before.
            """
            is_loaded = bool(self._workflow_context_carrier)
            carrier, info = super()._load_workflow_context_carrier(), workflow.info()
            if not is_loaded and (carrier is None or info.continued_run_id):
                self._before = carrier
                carrier = self._workflow_context_carrier = _own_trace(info.run_id)
            return carrier

        def _completed_span(self, span_name: str, **options: Any) -> None:
            if span_name.startswith("RunWorkflow:"):
                options["link_context_carrier"] = self._before
            super()._completed_span(span_name, **options)

    class WithoutBaggage(TracingInterceptor):
        def __init__(self) -> None:
            super().__init__(tracer)
            self.text_map_propagator = TraceContextTextMapPropagator()

        def workflow_interceptor_class(self, input: WorkflowInterceptorClassInput) -> type[InWorkflow]:
            super().workflow_interceptor_class(input)
            return InWorkflow

        def _completed_workflow_span(self, params: Any) -> Any:
            is_first = params.name.startswith("RunWorkflow:")
            if not is_first or params.context != _own_trace(params.attributes["temporalRunID"]):
                return super()._completed_workflow_span(params)
            root = copy(self.tracer)
            root.id_generator = _ids(context_of(params.context[_TRACE_PARENT]))  # type: ignore[attr-defined]
            before = trace.get_current_span(context_of((params.link_context or {}).get(_TRACE_PARENT)))
            links = [trace.Link(before.get_span_context())] if params.link_context else []
            span = root.start_span(params.name, Context(), params.kind, params.attributes, links, params.time_ns)
            span.end(params.time_ns)
            return params.context

    return WithoutBaggage()


def _own_trace(execution: str) -> dict[str, Any]:
    """Return the header of a workflow's own trace, the same in each replay, on any host."""
    ids = hashlib.sha256(execution.encode()).hexdigest()
    return {_TRACE_PARENT: f"00-{ids[:32]}-{ids[32:48]}-01"}


def _ids(context: Context) -> Any:
    """Return an id generator that gives a span the ids of a context, as if it were the header's span."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    named = trace.get_current_span(context).get_span_context()

    class Named(IdGenerator):
        def generate_span_id(self) -> int:
            return named.span_id

        def generate_trace_id(self) -> int:
            return named.trace_id

    return Named()


def _exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

    class ScrubbingExporter(OTLPSpanExporter):
        """Sends spans without anything that a user may have written: every span goes through here."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return super().export([scrubbed(span) for span in spans if not span.name.startswith(_DROPPED)])

    return ScrubbingExporter()


def scrubbed(span: Any) -> Any:
    """Return a span with listed attributes alone, without events (errors' texts), with an error's type at most."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, Status

    error = _ERROR.match(span.status.description or "")
    kept = {name: value for name, value in (span.attributes or {}).items() if _ATTRIBUTES.fullmatch(name)}
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=kept | ({"error.type": error[0]} if error else {}),
        links=[Link(link.context) for link in span.links],
        kind=span.kind,
        status=Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


# --- Counts and times requests to the web service, and gives each a span ---

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNMATCHED = "unmatched"
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
                    route, status = str(getattr(scope.get("route"), "path", _UNMATCHED)), message["status"]
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


def request_ids() -> dict[str, str]:
    """Return the ids of the request in hand, for a line of the log."""
    found, scope = current_ids(), _asked.get()
    if scope is not None:
        principal = scope.get("state", {}).get("principal")
        run_id = scope.get("path_params", {}).get("run_id")
        found |= {"tenant": principal.tenant} if principal is not None else {}
        found |= {"run_id": run_id} if isinstance(run_id, str) else {}
    return found


# --- Temporal's own metrics of this process, at the same port as ours ---

# The SDK's own buckets begin at 50 ms, and end at a minute: too coarse for a request, too short for a step.
_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 3600.0)
_BUCKETS = dict.fromkeys(("request_latency", "activity_execution_latency"), _BUCKETS_S)
_runtime: Runtime | None = None


def start_sdk_metrics() -> str:
    """Count the metrics of Temporal clients that connect from now on. Called once, at a process's start.

    Returns the address at which the SDK shows them, of this machine alone: ours hands them on.
    """
    global _runtime
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shown = PrometheusConfig(
        address, counters_total_suffix=True, durations_as_seconds=True, histogram_bucket_overrides=_BUCKETS
    )
    _runtime = Runtime(telemetry=TelemetryConfig(metrics=shown, attach_service_name=False))
    return f"http://{address}/metrics"


def sdk_runtime() -> Runtime | None:
    """Return the runtime that counts; None for the SDK's own."""
    return _runtime
