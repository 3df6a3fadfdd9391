"""Clients of hosts' HTTP servers: questions to samplers, sessions' commands."""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import ValidationError

from service.host_http.server import Trust
from shared.errors import NotFound, StoreUnavailable
from shared.runs.start import MOST_TOLD_BYTES
from shared.settings import Settings
from shared.storage.files import reachable
from shared.storage.host_states import HostAddress
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

# --- The web service's connections to hosts ---

_CONNECT_S, _PATIENCE_S = 5.0, 5.0


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


# --- Sends sessions' commands to their hosts, and waits for the results ---

# Intervals of looking for the host of a session without one: at first, and after some failed attempts.
_LOOK_AGAIN_S, _LOOK_SLOWLY_S = 0.05, 1.0
_MOST_KNOWN = 4096
_LOST = (httpx.HTTPError, OSError, StoreUnavailable, HostUnreachable)


@dataclass(frozen=True)
class HostReply:
    """What a session's host says about a command: its `result`, or else whether the host will do it (`is_served`).

    Without either, the store may have the result, or the session may have no host.
    """

    is_served: bool
    result: bytes | None = None


class SessionHosts:
    """The hosts of sessions, whose addresses are in the store."""

    def __init__(self, store: ObjectStore, clients: HostClients) -> None:
        self._store = store
        self._clients = clients
        self._hosts: dict[str, HostAddress] = {}
        self._in_vain: dict[str, tuple[int, float]] = {}  # how often a host was looked for, and when it may be again

    async def ask(self, run_id: str, number: int, wait_s: float, command: bytes = b"") -> HostReply:
        """Send a command that is in the store to the session's host, if there is one, and wait for the result.

        `command`: the object in the store; it may be empty. `number` 0 only says that the store has something new.
        """
        try:
            if (host := await self._host(run_id)) is None:
                return HostReply(is_served=False)
            client = await self._clients.to(host)
            content = command if len(command) <= MOST_TOLD_BYTES else b""
            path, wanted = f"/sessions/{run_id}/commands/{number}", {"wait_s": f"{wait_s:.3f}"}
            timeout = httpx.Timeout(wait_s + _PATIENCE_S, connect=_CONNECT_S)
            answer = await client.post(path, params=wanted, content=content, timeout=timeout)
        except _LOST:
            self._hosts.pop(run_id, None)
            return HostReply(is_served=False)
        match answer.status_code:
            case httpx.codes.OK:
                self._in_vain.pop(run_id, None)
                return HostReply(is_served=True, result=answer.content)
            case httpx.codes.ACCEPTED:
                return HostReply(is_served=True)
            case httpx.codes.NO_CONTENT:
                return HostReply(is_served=False)
        self._hosts.pop(run_id, None)
        return HostReply(is_served=False)

    def pause_s(self, run_id: str) -> float:
        """Return how long to wait before a session without a host is asked again."""
        times, _ = self._in_vain.get(run_id, (0, 0.0))
        return float(min(_LOOK_SLOWLY_S, _LOOK_AGAIN_S * 2 ** min(times, 10)))

    async def _host(self, run_id: str) -> HostAddress | None:
        """Return the address of a session's host, if it is known or may be looked up again by now."""
        if run_id not in self._hosts and time.monotonic() >= self._in_vain.get(run_id, (0, 0.0))[1]:
            for known in (self._hosts, self._in_vain):
                if len(known) >= _MOST_KNOWN:
                    known.clear()
            self._in_vain[run_id] = self._in_vain.get(run_id, (0, 0.0))[0] + 1, time.monotonic() + self.pause_s(run_id)
            if (host := await asyncio.to_thread(self._read, run_id)) is not None:
                self._hosts[run_id] = host
        return self._hosts.get(run_id)

    def _read(self, run_id: str) -> HostAddress | None:
        with suppress(NotFound, ValidationError):
            return HostAddress.model_validate_json(self._store.get_bytes(RunKeys(run_id).host))
        return None
