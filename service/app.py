"""The web service: `python -m service.app [--host 127.0.0.1] [--port 8484] [--allow-host NAME]`."""

import argparse
import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware import Middleware

from service import native_api, problems
from service.auth import ApiKeys, keys_path
from service.edge import LOOPBACK_NAMES, Edge
from service.files import uploads_folder
from service.native_api import Backend
from shared.errors import LongshoreError
from shared.settings import Settings
from shared.store import open_store

logger = logging.getLogger("longshore.service")
MAX_BODY_BYTES = 1 << 20
_SWEEP_EVERY_S = 5.0


def create_app(settings: Settings | None = None, allowed_hosts: Sequence[str] | None = None) -> FastAPI:
    """The application.

    Args:
        settings: read from the environment if absent, as when uvicorn calls this as a factory.
        allowed_hosts: names that a Host header may carry; if absent, this machine's and that of `api_url`; `*` for any.
    """
    settings = settings or Settings()
    keys = ApiKeys(keys_path(settings.root_path), settings.api_key)
    if keys.is_empty:
        logger.warning("no API key is known, so every request is refused: set LONGSHORE_API_KEY")
    hosts = allowed_hosts if allowed_hosts is not None else (*LOOPBACK_NAMES, urlsplit(settings.api_url).hostname or "")
    edge = Middleware(
        Edge,
        keys=keys,
        allowed_hosts=None if "*" in hosts else hosts,
        max_body_bytes=MAX_BODY_BYTES,
        max_upload_bytes=settings.download.max_bytes,
    )
    app = FastAPI(
        title="Longshore",
        version="1",
        description="Runs on a self-hosted training backend.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan,
        middleware=[edge],
    )
    app.state.backend = Backend(settings, open_store(settings.store, settings.s3))
    app.include_router(native_api.router)
    app.add_api_route("/health", native_api.health, include_in_schema=False)
    problems.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    backend: Backend = app.state.backend
    # What a killed service was receiving.
    await asyncio.to_thread(shutil.rmtree, uploads_folder(backend.settings.root_path), ignore_errors=True)
    sweep = asyncio.create_task(_keep_accepted_runs_going(backend))
    yield
    sweep.cancel()


async def _keep_accepted_runs_going(backend: Backend) -> None:
    """Sweep once Temporal and the store answer; then start what was accepted while Temporal was away."""
    swept = False
    while True:
        try:
            if not swept:
                await backend.runs.sweep()
                swept = True
            await backend.runs.start_waiting()
        except (LongshoreError, OSError) as error:
            logger.warning("accepted runs wait: %s", error)
        except Exception:  # whatever it is, nothing else starts them
            logger.exception("accepted runs wait")
        await asyncio.sleep(_SWEEP_EVERY_S)


def main() -> None:
    """Serve until SIGTERM."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8484)
    parser.add_argument("--allow-host", action="append", help="a name that a Host header may carry; * for any")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    hosts = arguments.allow_host
    if hosts is None and arguments.host not in LOOPBACK_NAMES:
        hosts = ["*"]  # DNS rebinding is a danger to services that only this machine can reach
    uvicorn.run(
        create_app(allowed_hosts=hosts),
        host=arguments.host,
        port=arguments.port,
        access_log=False,  # the edge logs, with request ids
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=3,
    )


if __name__ == "__main__":
    main()
