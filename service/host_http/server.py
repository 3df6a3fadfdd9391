"""A host's HTTP server, for requests from the web service.

It listens at a Unix socket that only this user can open and, if the operator names an address, there by mutual TLS
(trust.py). Questions, answers and notices of commands do not go through Temporal.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from service.host_http.listening import config, listen_at, place_of
from service.host_http.trust import Trust
from shared.settings import Settings
from shared.storage.files import listen_privately, private_folder
from shared.storage.host_states import HostAddress
from shared.storage.paths import HostPaths

_BACKLOG = 256
_GRACE_S = 10


@contextmanager
def serving(settings: Settings, queue: str, routes: Sequence[Route]) -> Iterator[HostAddress]:
    """Serve for a `with` block; yields the addresses.

    `queue`: names the host among those of its root.

    Raises OSError: the operator's address is not one of this machine.
    """
    path, address = HostPaths(settings.root_path).socket(queue), settings.host_address
    app = Starlette(routes=routes, exception_handlers={ClientDisconnect: _left})
    private_folder(path.parent)
    with served(app, listen_privately(path, _BACKLOG)):
        if address is None:
            yield HostAddress(socket=str(path))
            return
        listener = listen_at(address)
        with served(app, listener, Trust.of(settings)):
            yield HostAddress(socket=str(path), address=place_of(listener))


def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it, and no bug of ours is logged


@contextmanager
def served(app: Starlette, listener: socket.socket, trust: Trust | None = None) -> Iterator[None]:
    """Serve an application in a thread with its own event loop, so that streams do not wait for Temporal's work."""
    settings = config(app, timeout_graceful_shutdown=_GRACE_S)
    settings.load()
    settings.ssl = trust.server_context() if trust is not None else None
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="answers", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise OSError(f"no server of answers could be started at {listener.getsockname()}")
        yield
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
