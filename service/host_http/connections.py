"""HTTP between the web service and hosts: listening sockets, mutual TLS, servers and their clients; metrics."""

import asyncio
import datetime
import logging
import os
import resource
import socket
import ssl
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import httpx
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest
from pydantic import IPvAnyAddress, IPvAnyNetwork, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.sealing import seal_keys
from service.telemetry import current_ids, start_sdk_metrics, start_tracing, stop_tracing
from shared.errors import NotFound, StoreUnavailable
from shared.log_lines import start_logging
from shared.runs.start import MOST_TOLD_BYTES
from shared.settings import Settings
from shared.storage.files import listen_privately, private_folder, reachable
from shared.storage.host_states import HostAddress
from shared.storage.paths import HostPaths, RunKeys
from shared.storage.store import ObjectStore

# --- Listening sockets for untrusted clients ---
# A limit of open connections, and a deadline for a request's headers.

HEADERS_S = 20.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers."""
_MOST_HEADER_BYTES = 16 << 10
# Longer than clients keep an unused connection (httpx, and all SDKs on it: 5 s, as uvicorn does unless it is told
# otherwise). Else some requests meet a connection that the service is closing.
_KEEP_ALIVE_S = 20
_MOST_IN_A_ROW = 32
_MOST = 2048  # at a TLS port each takes some 310 KiB before its client has proved anything: asyncio's buffer


class BoundedListener(socket.socket):
    """A listening socket that closes each new connection while `most` others are open. It takes over `listener`.

    `most` is at most a third of the files that this process may open. Clients that connect and send nothing, not even
    a TLS handshake, could otherwise use up its memory and its file descriptors: asyncio and uvicorn have no such bound.
    """

    def __init__(self, listener: socket.socket, most: int = _MOST) -> None:
        super().__init__(fileno=listener.detach())
        self._in_a_row = 0
        may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most if may_open == resource.RLIM_INFINITY else min(most, may_open // 3)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError: no connection is waiting, or the one that was had to be closed.

        Or it is the turn of others: asyncio accepts until then, and a thousand would hold its loop for a second.
        """
        self._in_a_row = (self._in_a_row + 1) % _MOST_IN_A_ROW
        if not self._in_a_row:
            raise BlockingIOError
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
        timeout_keep_alive=_KEEP_ALIVE_S,
        **options,
    )


# --- Mutual TLS between processes of one installation on different machines ---
#
# All of them hold the installation's keys (service/sealing.py). Each process derives the same certificate
# authority from each key, and signs its own certificate with the authority of the sealing key. A certificate of one of
# these authorities thus proves that its holder has a key; nobody else is served.

# Fixed, so that all derive the same authority. Trust depends on its key, not on its age.
_SINCE, _UNTIL = datetime.datetime(2026, 1, 1), datetime.datetime(2126, 1, 1)


@dataclass(frozen=True)
class Trust:
    """An installation's authorities, by their private keys. The first signs, all are trusted."""

    authorities: tuple[Ed25519PrivateKey, ...]

    @classmethod
    def of(cls, settings: Settings) -> "Trust":
        seeds = (key.derived(b"certificate authority") for key in seal_keys(settings))
        return cls(tuple(map(Ed25519PrivateKey.from_private_bytes, seeds)))

    def server_context(self) -> ssl.SSLContext:
        """Return a server's context: it serves whoever has a certificate of one of the authorities."""
        return self._context(ssl.Purpose.CLIENT_AUTH)

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context: it asks whoever has such a certificate, by whatever name."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        trusted = (_certificate("longshore", each, each, number=1) for each in self.authorities)
        pem = "".join(each.public_bytes(Encoding.PEM).decode() for each in trusted)
        context = ssl.create_default_context(purpose, cadata=pem)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        own = Ed25519PrivateKey.generate()
        certificate = _certificate("longshore process", own, self.authorities[0], x509.random_serial_number())
        key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with tempfile.NamedTemporaryFile() as file:  # mode 600; the context takes no bytes
            os.write(file.fileno(), certificate.public_bytes(Encoding.PEM) + key)
            context.load_cert_chain(Path(file.name))
        return context


def _certificate(name: str, of: Ed25519PrivateKey, by: Ed25519PrivateKey, number: int) -> x509.Certificate:
    is_authority = of is by
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "longshore")])
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False),
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, of.public_key(), number, _SINCE, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(of.public_key()), critical=False)
        .add_extension(key_id, critical=False)
    )
    return builder.sign(by, None)


# --- A host's HTTP server, for requests from the web service ---
#
# It listens at a Unix socket that only this user can open and, if the operator names an address, there by mutual TLS.
# Questions, answers and notices of commands do not go through Temporal.

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


# --- The web service's connections to hosts ---

_CONNECT_S, _REPLY_PATIENCE_S = 5.0, 5.0


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
            timeout = httpx.Timeout(wait_s + _REPLY_PATIENCE_S, connect=_CONNECT_S)
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


# --- A process's log, traces and metrics for operators ---
# Metrics have a separate port, which tenants cannot reach.

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
    sdk = start_sdk_metrics()

    def metrics(request: Request) -> Response:
        of_temporal = httpx.get(sdk, trust_env=False).content
        return Response(generate_latest() + of_temporal, headers={"content-type": CONTENT_TYPE_LATEST})

    with served(Starlette(routes=[Route("/metrics", metrics)]), listener):
        _log.info("metrics at port %d of %s", port, address)
        yield
