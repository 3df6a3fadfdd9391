"""Clients of hosts' HTTP servers: questions to samplers, news of sessions' commands."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
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


# --- Notifies sessions' hosts of commands, and receives results from them, instead of polling the store ---

# Intervals of looking for the host of a session without one: at first, and after some failed attempts.
_LOOK_AGAIN_S, _LOOK_SLOWLY_S = 0.05, 1.0
_UNUSED_S = 30.0
_MOST_HELD = 16  # results of a session that a host has sent and nobody has asked for yet
_MOST_KNOWN = 4096
_LOST = (httpx.HTTPError, OSError, StoreUnavailable, HostUnreachable)


class _Listening:
    """Results of one session as its host sent them. Those before `next` are stored; `is_over`: no more will come.

    `results`: the newest small ones, by number.
    """

    def __init__(self) -> None:
        self.next = 0
        self.is_over = False
        self.used_at = time.monotonic()
        self.changed = asyncio.Event()
        self.results: dict[int, bytes] = {}

    def put(self, next: int | None, result: bytes = b"") -> None:
        self.next, self.is_over = next or self.next, next is None
        if result:
            self.results[self.next - 1] = result
            if len(self.results) > _MOST_HELD:
                del self.results[min(self.results)]
        self.changed.set()
        self.changed = asyncio.Event()


class SessionBells:
    """Connections to the hosts of sessions that are being waited for."""

    def __init__(self, store: ObjectStore, clients: HostClients) -> None:
        self._store = store
        self._clients = clients
        self._hosts: dict[str, HostAddress] = {}
        self._in_vain: dict[str, tuple[int, float]] = {}  # how often a host was looked for, and when it may be again
        self._listening: dict[str, _Listening] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ring(self, run_id: str, number: int | None = None, command: bytes = b"") -> None:
        """Tell the host of a session's worker that there is something new in the store, if there is such a host.

        `command`: the object in the store under that number.
        """
        brought = {"number": number} if number is not None and len(command) <= MOST_TOLD_BYTES else None
        try:
            if (host := await self._host(run_id)) is None:
                return
            client, content = await self._clients.to(host), command if brought else b""
            answer = await client.post(f"/sessions/{run_id}/bell", params=brought, content=content)
            if answer.status_code != httpx.codes.NO_CONTENT:
                self._forget(run_id)
        except _LOST:
            self._forget(run_id)

    def result(self, run_id: str, number: int) -> bytes | None:
        """Return a stored result, once, if a host has sent it with its notice."""
        heard = self._listening.get(run_id)
        return None if heard is None else heard.results.pop(number, None)

    async def wait(self, run_id: str, number: int, wait_s: float) -> None:
        """Wait until a command's result seems to be in the store, or it is time to look by oneself."""
        heard = self._listening.get(run_id)
        if heard is None:
            heard = self._listening[run_id] = _Listening()
            task = asyncio.create_task(self._listen(run_id, heard))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        heard.used_at = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while heard.next <= number:
                    if heard.is_over:  # and the session's next host is not known yet
                        await asyncio.sleep(self._pause_s(run_id))
                        return
                    await heard.changed.wait()

    async def _listen(self, run_id: str, heard: _Listening) -> None:
        try:
            if (host := await self._host(run_id)) is None:
                return
            client = await self._clients.to(host)
            async with client.stream("GET", f"/sessions/{run_id}/results") as response:
                if response.status_code != httpx.codes.OK:
                    self._forget(run_id)
                    return
                async for line in _lines(response.aiter_raw()):
                    if line:
                        self._in_vain.pop(run_id, None)
                        next, _, result = line.partition(b" ")
                        heard.put(int(next), result)
                    elif heard.used_at < time.monotonic() - _UNUSED_S:
                        return
        except _LOST:
            self._forget(run_id)
        finally:
            del self._listening[run_id]
            heard.put(None)

    async def _host(self, run_id: str) -> HostAddress | None:
        """Return the address of a session's host, if it is known or may be looked up again by now."""
        if run_id not in self._hosts and time.monotonic() >= self._in_vain.get(run_id, (0, 0.0))[1]:
            for known in (self._hosts, self._in_vain):
                if len(known) >= _MOST_KNOWN:
                    known.clear()
            self._in_vain[run_id] = self._in_vain.get(run_id, (0, 0.0))[0] + 1, time.monotonic() + self._pause_s(run_id)
            if (host := await asyncio.to_thread(self._read, run_id)) is not None:
                self._hosts[run_id] = host
        return self._hosts.get(run_id)

    def _pause_s(self, run_id: str) -> float:
        times, _ = self._in_vain.get(run_id, (0, 0.0))
        return float(min(_LOOK_SLOWLY_S, _LOOK_AGAIN_S * 2 ** min(times, 10)))

    def _forget(self, run_id: str) -> None:
        self._hosts.pop(run_id, None)

    def _read(self, run_id: str) -> HostAddress | None:
        with suppress(NotFound, ValidationError):
            return HostAddress.model_validate_json(self._store.get_bytes(RunKeys(run_id).host))
        return None


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines, each a result. httpx's own line iterator would also split at U+2028 within texts."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
