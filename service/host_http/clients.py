"""The web service's connections to hosts."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from service.host_http.trust import Trust
from shared.settings import Settings
from shared.storage.files import reachable
from shared.storage.host_states import HostAddress

_CONNECT_S = 5.0


class HostUnreachable(Exception):
    """A host cannot be reached from here."""


class HostClients:
    """Connections to hosts, kept for the next requests.

    `silence_s`: a host that sends nothing for so long is taken for lost.
    """

    def __init__(self, settings: Settings, silence_s: float) -> None:
        self._settings = settings
        self._timeout = httpx.Timeout(silence_s, connect=_CONNECT_S)
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._open = AsyncExitStack()

    async def close(self) -> None:
        self._clients.clear()
        await self._open.aclose()

    async def to(self, at: HostAddress) -> httpx.AsyncClient:
        """Return a client of a host: by its socket if that is on this machine, else by its address.

        Raises Unreachable: it is on another machine, and names no address.
        """
        if (known := self._clients.get(at.socket) or self._clients.get(at.address or "")) is not None:
            return known
        is_here = await asyncio.to_thread(Path(at.socket).is_socket)
        place = at.socket if is_here else at.address
        if place is None:
            raise HostUnreachable("it is on another machine, and names no address: set LONGSHORE_HOST_ADDRESS there")
        if place not in self._clients:  # it may have been made during that look
            self._clients[place] = self._made(place, is_here)
        return self._clients[place]

    def _made(self, place: str, is_here: bool) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        if is_here:
            uds = self._open.enter_context(reachable(Path(place)))
            transport = httpx.AsyncHTTPTransport(uds=uds, verify=False, limits=limits, trust_env=False)
            url = "http://host"
        else:
            verify = Trust.of(self._settings).client_context()
            transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False)
            url = f"https://{place}"
        headers = {"accept-encoding": "identity"}
        client = httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=self._timeout)
        self._open.push_async_callback(client.aclose)
        return client
