"""The web service: `python -P -m longshore.server service.app [--host 127.0.0.1] [--port 8484] [--allow-host NAME]`."""

import argparse
import asyncio
import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from service import decoding
from service.accounts.keys import BEARER
from service.accounts.limits import RateLimit
from service.apis import errors as problems
from service.apis import page as pages
from service.apis.art import training_jobs as art_jobs
from service.apis.art import wandb_artifacts
from service.apis.edge import LOOPBACK_NAMES, Edge, HeadRequests
from service.apis.native import installation
from service.apis.native import runs as runs_api
from service.apis.openai import chat as openai_chat
from service.apis.openai import files as openai_files
from service.apis.openai import jobs as openai_jobs
from service.apis.openai.jobs import SentRequests
from service.apis.tinker import routes as tinker_routes
from service.apis.tinker import samples as tinker_samples
from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from service.files import uploads_folder
from service.host_http.connections import BoundedListener, config, observed
from service.telemetry import SeenRequests, request_ids, stop_tracing
from shared.errors import LongshoreError
from shared.log_lines import escape_output
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.store import open_store

logger = logging.getLogger("longshore.service")
MAX_BODY_BYTES = 1 << 20
_SWEEP_EVERY_S = 5.0
_WATCH_EVERY_S = 1.0
_GAUGES_EVERY_S = 15.0  # as often as Prometheus asks
_EVICT_EVERY_S = 2.0
_PRUNE_EVERY_S = 3600.0
_FORGET_EVERY_S = 600.0
_LONGEST_PAUSE_S = 10.0
_LAST_ANSWERS_S = 2.0
_THREADS = 64
_SWITCH_S = 0.0005  # the event loop waits this long for each thread that computes: Python's own 5 ms are felt

ROUTERS = (
    runs_api.open_router,
    runs_api.router,
    installation.episodes_router,
    installation.router,
    installation.accounts_router,
    installation.codec_router,
)
OPENAI_ROUTERS = (
    openai_files.router,
    openai_files.uploads,
    openai_jobs.router,
    openai_jobs.graders_router,
    openai_chat.router,
)
ART_ROUTERS = (art_jobs.models_router, art_jobs.router)
TINKER_ROUTERS = (
    tinker_routes.sessions_router,
    tinker_routes.training_router,
    tinker_samples.results_router,
    tinker_samples.router,
    tinker_routes.rest_router,
    tinker_routes.downloads_router,
)


class DescribedApp(FastAPI):
    """A FastAPI whose description names the fields that tell the members of unions apart."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _require_tags(super().openapi())
        return super().openapi()


def _require_tags(part: Any) -> None:
    """Mark tags of unions as required: each member has a default for its tag, but within a union it must be sent."""
    match part:
        case {"oneOf": _, "discriminator": {"propertyName": tag}}:
            part.setdefault("required", [tag])
    match part:
        case dict():
            for inner in part.values():
                _require_tags(inner)
        case list():
            for inner in part:
                _require_tags(inner)


def create_app(settings: Settings | None = None, allowed_hosts: Sequence[str] | None = None) -> FastAPI:
    """Make the application.

    Args:
        settings: read from the environment if absent, as when uvicorn calls this as a factory.
        allowed_hosts: names that a Host header may carry; if absent, this machine's and that of `api_url`; `*` for any.
    """
    settings = settings or Settings()
    backend = Backend(settings, open_store(settings.store, settings.s3), open_database(settings))
    if not backend.keys.has_bootstrap:
        logger.warning("LONGSHORE_API_KEY is not set: only keys that were made through the API are accepted")
    hosts = allowed_hosts if allowed_hosts is not None else (*LOOPBACK_NAMES, urlsplit(settings.api_url).hostname or "")
    in_hand: set[object] = set()
    temporal_ui = installation.ui_origin(settings)
    edge = Middleware(
        Edge,
        keys=backend.keys,
        sign_ins=backend.sign_ins,
        episodes=backend.episodes,
        audit=backend.audit,
        rate_limit=RateLimit(settings.rate_limit.per_s, settings.rate_limit.burst),
        allowed_hosts=None if "*" in hosts else {host.lower() for host in hosts},
        max_body_bytes=MAX_BODY_BYTES,
        max_upload_bytes=settings.download.max_bytes,
        in_hand=in_hand,
        temporal_ui=temporal_ui,
    )
    app = DescribedApp(
        title="Longshore",
        version="1",
        description="Runs on a self-hosted training backend.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # service/telemetry.py sees to it
        lifespan=_lifespan,
        middleware=[
            Middleware(SeenRequests),
            *([Middleware(installation.CodecCors, origin=temporal_ui)] if temporal_ui else []),
            edge,
            Middleware(HeadRequests),
        ],
    )
    app.state.backend, app.state.decoding, app.state.in_hand = backend, backend.decoding, in_hand
    app.state.tinker_samples = tinker_samples.Samples(backend)
    for router in (*ROUTERS, *TINKER_ROUTERS, wandb_artifacts.router, wandb_artifacts.open_router):
        app.include_router(router)
    for router in (*OPENAI_ROUTERS, *ART_ROUTERS):
        app.include_router(router, dependencies=BEARER, responses=problems.FOREIGN_RESPONSES)
    app.include_router(openai_chat.messages_router, dependencies=BEARER, responses=problems.MESSAGE_RESPONSES)
    app.include_router(pages.router)
    app.mount(pages.STATIC, pages.static_files)
    for path in ("/health", "/readyz"):
        app.add_api_route(path, runs_api.health, include_in_schema=False)
    app.add_api_route("/healthz", runs_api.alive, include_in_schema=False)
    problems.install(app)
    app.add_exception_handler(404, pages.unknown_address)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    backend: Backend = app.state.backend
    # Small reads and writes of the store. Python's own number follows the cores: six of them on two.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "service"))
    # What a killed service was receiving.
    await asyncio.to_thread(shutil.rmtree, uploads_folder(backend.settings.root_path), ignore_errors=True)
    await asyncio.to_thread(engine.upgrade, backend.database)
    chores = _chores(backend, app.state.tinker_samples)
    if backend.settings.metrics.port is not None:
        chores += (("gauges are not refreshed", _GAUGES_EVERY_S, backend.gauges.refresh),)
    loops = [asyncio.create_task(_repeat(*each)) for each in chores]
    yield
    with suppress(TimeoutError):  # uvicorn has cancelled open requests, whose last answers need the database
        async with asyncio.timeout(_LAST_ANSWERS_S):
            while app.state.in_hand:  # noqa: ASYNC110 - a set tells nobody
                await asyncio.sleep(0.02)
    await backend.hosts.close()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.to_thread(backend.database.close)
    await asyncio.to_thread(stop_tracing)  # SIGTERM ends the process behind this


def _chores(
    backend: Backend, samples: tinker_samples.Samples
) -> tuple[tuple[str, float, Callable[[], Awaitable[object]]], ...]:
    """Return the repeated work: the log's message while it fails, seconds between two times, and a function."""
    return (
        ("accepted runs wait", _SWEEP_EVERY_S, _Sweep(backend)),
        ("steps of runs are not refreshed", _WATCH_EVERY_S, backend.states.refresh_training),
        ("runs wait for samplers and workers", _EVICT_EVERY_S, backend.eviction.evict),
        ("spending limits are not held", _SWEEP_EVERY_S, backend.runs.hold_spending),
        ("runs without clients go on", _SWEEP_EVERY_S, backend.runs.pause_left),
        ("webhooks wait", _WATCH_EVERY_S, backend.webhooks.send_outbox),
        ("deliveries to webhooks wait", _SWEEP_EVERY_S, backend.webhooks.serve),
        ("workflows wait for the database", _WATCH_EVERY_S, backend.serve_workflows),
        ("garbage is left", _SWEEP_EVERY_S, backend.garbage.collect_when_due),
        ("the audit log grows", _PRUNE_EVERY_S, backend.audit.prune),
        ("unfinished files are left", _PRUNE_EVERY_S, backend.files.prune),
        ("parts of uploads are left", _PRUNE_EVERY_S, backend.uploads.prune),
        ("sent requests are remembered", _PRUNE_EVERY_S, SentRequests(backend.database, backend.quotas).prune),
        ("results of sessions are left", _PRUNE_EVERY_S, backend.sessions.prune),
        ("answers are remembered", _FORGET_EVERY_S, backend.inference.prune),
        ("episodes are remembered", _FORGET_EVERY_S, backend.episodes.prune),
        ("samples are remembered", _PRUNE_EVERY_S, samples.prune),
    )


class _Sweep:
    """Starts accepted runs that Temporal does not know; the first time it also restores schedules and sweeps there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_restored = False

    async def __call__(self) -> None:
        await self._backend.runs.sweep()
        if not self._has_restored:
            await self._backend.schedules.restore()
            await self._backend.sweeps.restore()
            self._has_restored = True


async def _repeat(trouble: str, every_s: float, work: Callable[[], Awaitable[object]]) -> None:
    """Repeat work for ever, whatever errors it raises. Each new reason is logged once."""
    logged = ""
    while True:
        begin = time.monotonic()
        try:
            await work()
            logged = ""
        except (LongshoreError, OSError) as error:
            if logged != (logged := str(error)):
                logger.warning("%s: %s", trouble, error)
        except Exception:
            logger.exception(trouble)
        took_s = time.monotonic() - begin
        await asyncio.sleep(max(every_s, min(took_s, _LONGEST_PAUSE_S)))  # slow work is done less often


def main() -> None:
    """Serve until SIGTERM."""
    from uvicorn.main import STARTUP_FAILURE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8484)
    parser.add_argument("--allow-host", action="append", help="a name that a Host header may carry; * for any")
    arguments = parser.parse_args()
    hosts = arguments.allow_host
    if hosts is None and arguments.host not in LOOPBACK_NAMES:
        hosts = ["*"]  # checking Host only protects services on loopback (from DNS rebinding)
    settings = Settings()
    with observed("web", settings, request_ids):
        server = _server(settings, hosts, arguments.host, arguments.port)
        with suppress(KeyboardInterrupt):
            server.run([BoundedListener(server.config.bind_socket())])
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _server(settings: Settings, allowed_hosts: Sequence[str] | None, host: str, port: int) -> uvicorn.Server:
    app = create_app(settings, allowed_hosts)
    # Some 200,000 objects live as long as the process. Without freezing them each full garbage collection would delay
    # requests by a tenth of a second.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    private_folder(settings.root_path)
    decoding.prepare_children()
    return uvicorn.Server(config(app, settings.trusted_proxies, host=host, port=port, timeout_graceful_shutdown=3))


if __name__ == "__main__":
    escape_output()
    main()
    # Ended by Ctrl-C, in good order (SIGTERM ends the process before it comes here). As in service.host: an interpreter
    # that is taken down under the SDK's threads may abort.
    logging.shutdown()
    os._exit(0)
