"""A process's log, traces and metrics for operators. Metrics have a separate port, which tenants cannot reach."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.host_http.listening import listen_at
from service.host_http.server import served
from service.telemetry.sdk_metrics import start_sdk_metrics
from service.telemetry.traces import current_ids, start_tracing, stop_tracing
from shared.log_lines import start_logging
from shared.settings import Settings

_AT_ONCE = 16
_log = logging.getLogger("longshore.metrics")


@contextmanager
def observed(process: str, settings: Settings, ids: Callable[[], dict[str, str]] = current_ids) -> Iterator[None]:
    """Log, and send spans and serve metrics as the settings say, for a `with` block: all that a process does.

    `ids`: returns the ids of the current work, for log lines.
    """
    start_logging(settings.log_format, ids)
    start_tracing(process)
    try:
        with _metrics_served(settings):
            yield
    finally:
        stop_tracing()


@contextmanager
def _metrics_served(settings: Settings) -> Iterator[None]:
    """Serve metrics for a `with` block, if a port is set. To be entered before a client of Temporal connects.

    Raises SystemExit: the port is taken, or the address is not one of this machine.
    """
    port, address = settings.metrics.port, settings.metrics.address
    if port is None:
        yield
        return
    try:
        listener = listen_at(address, port, _AT_ONCE)
    except OSError as error:
        raise SystemExit(f"LONGSHORE_METRICS__PORT: cannot listen at port {port} of {address}: {error}") from None
    disable_created_metrics()  # a series more for each
    REGISTRY.register(sdk := start_sdk_metrics())
    try:
        with served(Starlette(routes=[Route("/metrics", _metrics)]), listener):
            _log.info("metrics at port %d of %s", port, address)
            yield
    finally:
        REGISTRY.unregister(sdk)


def _metrics(request: Request) -> Response:
    return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST})
