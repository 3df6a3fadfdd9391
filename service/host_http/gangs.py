"""Hosts of several machines whose ranks form one group: their rendezvous is at the first machine's host.

    a rank ──loopback──► its host ══mutual TLS══► the first machine's host ──loopback──► torch's store, in rank 0

Ranks reach torch's store at a port of their own machine. Only the first host listens to other machines: at a Unix
socket and, if the operator names an address, there by mutual TLS. It serves whoever shows the gang's one-time token.
Each other host also keeps a heartbeat connection: when it breaks, or is silent for too long, both ends know that the
gang is lost. After the rendezvous gloo and NCCL send the ranks' data from machine to machine directly, neither
encrypted nor sealed.
"""

import asyncio
import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from longshore.fields import Frozen
from service.host_http.connections import BoundedListener, Trust, listen_at, place_of
from service.sealing import sync_key
from shared.jobs.job import GangLeader
from shared.settings import Settings
from shared.storage.files import listen_privately, private_folder, reachable, write_atomically
from shared.storage.host_states import HostAddress
from shared.storage.paths import HostPaths, WorkerPaths

_HELLO_S, _HELLO_BYTES = 10.0, 1024
_BEAT_S, _SILENT_S = 1.0, 20.0
_LIVES, _LEAVES = b".", b"l"
_MOST_CONNECTIONS = 8192  # one a rank of the other machines
_PIECE_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class _Hello(Frozen):
    """The first line of a connection. `node`: whose. `rank`: a rank's, to torch's store; else the host's own."""

    token: str = Field(max_length=64)
    node: int = Field(ge=1)
    rank: bool


class Gangs:
    """How this host meets those of other machines."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._key = sync_key(settings)

    @contextmanager
    def leading(self, paths: WorkerPaths, num_nodes: int) -> Iterator["GangMeeting"]:
        """Let the hosts of the other machines of a worker meet here. The worker's id is that of `paths`."""
        worker_id = paths.root.name
        path, address = HostPaths(self._settings.root_path).socket(f"gang-{worker_id}"), self._settings.host_address
        private_folder(path.parent)
        meeting = GangMeeting(paths, self._token(worker_id), num_nodes, HostAddress(socket=str(path)))
        with meeting.running():
            try:
                meeting.do(meeting.lead(BoundedListener(listen_privately(path, num_nodes), _MOST_CONNECTIONS), None))
                if address is not None:
                    listener = listen_at(address, most=_MOST_CONNECTIONS)
                    meeting.do(meeting.lead(listener, Trust.of(self._settings).server_context()))
                    meeting.at = HostAddress(socket=str(path), address=place_of(listener))
                yield meeting
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def following(self, paths: WorkerPaths, node: int, leader: GangLeader) -> Iterator["GangMeeting"]:
        """Meet at the first machine's host. Raises OSError: it is not reached."""
        token, tls = self._token(leader.worker_id), None
        if leader.at.address is not None and self._settings.host_address is not None:
            tls = Trust.of(self._settings).client_context()
        elif not Path(leader.at.socket).exists():
            unset = "first" if leader.at.address is None else "other"
            raise OSError(f"hosts of several machines meet by LONGSHORE_HOST_ADDRESS, which the {unset} one lacks")
        meeting = GangMeeting(paths, token, 1, leader.at)
        with meeting.running():
            meeting.do(meeting.follow(_Way(leader.at, tls), node))
            yield meeting

    def _token(self, worker_id: str) -> str:
        """The token of one gang: good for as long as its first worker lives."""
        return hmac.digest(self._key, f"gang of worker {worker_id}".encode(), "sha256").hex()


@dataclass(frozen=True)
class _Way:
    """How the first machine's host is reached: by TLS, or at its Unix socket."""

    at: HostAddress
    tls: ssl.SSLContext | None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_HELLO_S):
            if self.tls is not None and self.at.address is not None:
                host, _, port = self.at.address.rpartition(":")
                return await asyncio.open_connection(host.strip("[]"), int(port), ssl=self.tls)
            with reachable(Path(self.at.socket)) as short:
                return await asyncio.open_unix_connection(short)


class GangMeeting:
    """One machine's side of a gang, in a thread with its own event loop.

    Attributes:
        at: where the others come to the first.
        broken: why the gang is lost, once it is.
        is_leaving: this host is about to leave; the others are notified, so that the job saves its state.
        leaves: another machine's host is about to leave.
        has_met: a rank of this machine has reached torch's store.
    """

    def __init__(self, paths: WorkerPaths, token: str, num_nodes: int, at: HostAddress) -> None:
        self.at = at
        self.broken: str | None = None
        self.is_leaving = self.leaves = self.has_met = False
        self._paths = paths
        self._token = token
        self._nodes = frozenset(range(1, num_nodes))
        self._present: set[int] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_forever, name="gang", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def do(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the loop, and wait for it. Raises its errors."""
        asyncio.run_coroutine_threadsafe(part, self._loop).result()

    @property
    def is_whole(self) -> bool:
        """True once the hosts of all other machines have come."""
        return self._present == self._nodes

    async def lead(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve the other machines' hosts."""
        patience_s = _HELLO_S if tls is not None else None
        server = await asyncio.start_server(self._admit, sock=listener, ssl=tls, ssl_handshake_timeout=patience_s)
        self._servers.append(server)

    async def follow(self, way: _Way, node: int) -> None:
        """Connect to the first machine's host, and be torch's store for the ranks here."""
        link = await self._introduced(way, node, rank=False)
        self._spawn(self._keep(*link, "the first machine's host"))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.has_met = True
            try:
                await join_streams((reader, writer), await self._introduced(way, node, rank=True))
            except (OSError, TimeoutError) as error:
                _log.warning("a rank does not reach torch's store: %s", error)
            except asyncio.CancelledError:  # by `_end`; asyncio's streams would log an error
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        write_atomically(self._paths.meeting, str(server.sockets[0].getsockname()[1]).encode(), is_durable=False)

    async def _introduced(self, way: _Way, node: int, rank: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await way.connect()
        writer.write(_Hello(token=self._token, node=node, rank=rank).model_dump_json().encode() + b"\n")
        return reader, writer

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, if it has the token."""
        try:
            async with asyncio.timeout(_HELLO_S):
                line = await reader.readuntil(b"\n")
            hello = _Hello.model_validate_json(line[:_HELLO_BYTES])
            is_known = hmac.compare_digest(hello.token.encode(), self._token.encode())
            if not is_known or hello.node not in self._nodes:
                return
            if hello.rank:
                await join_streams((reader, writer), await asyncio.open_connection("127.0.0.1", await self._port()))
            elif hello.node not in self._present:
                self._present.add(hello.node)
                await self._keep(reader, writer, f"the host of machine {hello.node}")
        except (OSError, ValidationError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.warning("a connection to a gang ended: %r", error)
        except asyncio.CancelledError:  # by `_end`, as above
            pass
        finally:
            writer.close()

    async def _port(self) -> int:
        """Return the port of torch's store, once rank 0 has one."""
        while not self._paths.meeting.exists():  # noqa: ASYNC110 (another process writes it)
            await asyncio.sleep(0.02)
        self.has_met = True
        return int(self._paths.meeting.read_bytes())

    async def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whom: str) -> None:
        """Send heartbeats to the other machine and read its own, until either machine is gone."""

        async def say() -> None:
            while True:
                writer.write(_LEAVES if self.is_leaving else _LIVES)
                await asyncio.sleep(_BEAT_S)

        saying = self._spawn(say())
        try:
            while True:
                async with asyncio.timeout(_SILENT_S):
                    said = await reader.read(64)
                if not said:
                    raise ConnectionResetError("it has ended")
                self.leaves = self.leaves or _LEAVES in said
        except TimeoutError:
            self.broken = self.broken or f"{whom} was silent for {_SILENT_S:g} s"
        except OSError as error:
            self.broken = self.broken or f"{whom} is gone: {error}"
        finally:
            saying.cancel()
            writer.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _spawn(self, part: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(part)
        self._tasks.add(task)  # else it could be collected while it runs
        task.add_done_callback(self._tasks.discard)
        return task


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join_streams(one: Stream, other: Stream) -> None:
    """Copy bytes in both directions until one end closes."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()

    passing = [asyncio.ensure_future(pump(one[0], other[1])), asyncio.ensure_future(pump(other[0], one[1]))]
    try:
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in passing:
            task.cancel()
        for _, writer in (one, other):
            writer.close()
