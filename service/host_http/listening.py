"""Listening sockets for untrusted clients: a limit of open connections, and a deadline for a request's headers."""

import asyncio
import resource
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from pydantic import IPvAnyAddress, IPvAnyNetwork
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers."""
_MOST_HEADER_BYTES = 16 << 10
_MOST = 2048  # at a TLS port each takes some 310 KiB before its client has proved anything: asyncio's buffer


class BoundedListener(socket.socket):
    """A listening socket that closes each new connection while `most` others are open. It takes over `listener`.

    `most` is at most a third of the files that this process may open. Clients that connect and send nothing, not even
    a TLS handshake, could otherwise use up its memory and its file descriptors: asyncio and uvicorn have no such bound.
    """

    def __init__(self, listener: socket.socket, most: int = _MOST) -> None:
        super().__init__(fileno=listener.detach())
        may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most if may_open == resource.RLIM_INFINITY else min(most, may_open // 3)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError: no connection is waiting, or the one that was had to be closed."""
        connection, address = super().accept()
        if len(self._accepted) >= self._most:  # closed ones count until they are collected
            self._accepted = weakref.WeakSet(each for each in self._accepted if each.fileno() >= 0)
        if len(self._accepted) >= self._most:
            connection.close()
            raise BlockingIOError
        self._accepted.add(connection)
        return connection, address


def listen_at(address: IPvAnyAddress, port: int = 0, most: int = _MOST) -> BoundedListener:
    """Listen at an address of this machine, at a free port unless one is named. Raises OSError."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return BoundedListener(socket.create_server((str(address), port), family=family), most)


def place_of(listener: socket.socket) -> str:
    """Return `host:port`."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


class _OneLength(h11.Connection):
    """Refuses a request that gives its length twice, since a proxy in front may read it differently (RFC 9112, 6.3).

    h11 itself goes by the chunks, and keeps the connection.
    """

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError, which uvicorn answers with 400 and the connection's end."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("a body has one length: Content-Length, or chunks of HTTP/1.1")
        return event


class BoundedH11(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for headers; uvicorn's own timeout ends with the first byte of a request.

    The time for a body is limited in service/apis/edge.py.
    """

    _owed: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _OneLength(h11.SERVER, self.config.h11_max_incomplete_event_size or _MOST_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Start the deadline when a request begins. Further bytes do not prolong it."""
        if not self._client_owes:
            self._disarm()
        elif self._owed is None and not self.transport.is_closing():
            self._owed = self.loop.call_later(HEADERS_S, self.transport.abort)

    @property
    def _client_owes(self) -> bool:
        """True while the client has begun a request, and the service waits for the rest of its headers or body."""
        if self.transport.is_closing():  # its request was refused, perhaps in the middle
            return False
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _disarm(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None


def config(app: ASGIApp, trusted_proxies: Sequence[IPvAnyNetwork] = (), **options: Any) -> uvicorn.Config:
    """uvicorn's settings. `options`: uvicorn's own, such as `host` and `port`."""
    return uvicorn.Config(
        app,
        http=BoundedH11,  # not httptools, which uvicorn prefers if it is installed: it does not limit headers
        loop="asyncio",  # not uvloop: it does not ask a socket's own `accept`
        ws="none",
        # X-Forwarded-For can be forged, so only named proxies are trusted.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=[str(network) for network in trusted_proxies],
        access_log=False,  # the edge logs, with request ids
        log_config=None,
        server_header=False,
        **options,
    )
