"""uvicorn's configuration: a deadline for the headers of a request, trust in named proxies alone."""

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.settings import Settings

HEADERS_S = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers."""


class BoundedH11(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for headers; uvicorn's own timeout ends with the first byte of a request.

    The time for a body is limited in edge.py.
    """

    _owed: asyncio.TimerHandle | None = None

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
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _disarm(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None


def config(app: FastAPI, settings: Settings, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for our service. `options`: uvicorn's own, such as `host` and `port`."""
    return uvicorn.Config(
        app,
        http=BoundedH11,  # not httptools, which uvicorn prefers if it is installed: it does not limit headers
        ws="none",
        # X-Forwarded-For can be forged, so only named proxies are trusted.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
        access_log=False,  # the edge logs, with request ids
        log_config=None,
        server_header=False,
        **options,
    )
