"""Connections between a trainer and a sampler: a Unix socket on one machine, TCP between machines.

A message is its length (4 bytes, big-endian), then JSON. Anyone who can open the Unix socket may send weights: it lies
in a folder that only the host's user can enter. Over TCP both ends prove that they know the run's secret, and every
message comes after an HMAC-SHA256 over its number and its bytes:

    sampler: 32 random bytes        trainer: Hello, with 32 more
    key = HMAC(secret of the run, both)

So data from an unauthenticated peer is read only as a Hello, and messages of an earlier connection cannot be replayed.
The messages are not encrypted; no weights are in them.
"""

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from longshore.fields import Frozen, Sha256
from longshore.training import OVER_TCP
from megatron_worker.weight_sync.buckets import Announcement, SyncBroken
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.jobs.job import SyncPlace, secret_of_run
from shared.storage.files import listen_privately, reachable

PATIENCE_S = 120.0  # for the other end's next message; it lives but is stuck
_LINK_S = 30  # for the other machine to answer the kernel; a link was cut without a word
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 8
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_FIRST_BYTES = 1 << 16
_SENT_BYTES = 1 << 24  # of a buffer within PATIENCE_S
M = TypeVar("M", bound=Frozen)


class Hello(Frozen):
    """A trainer's first words over TCP: whose weights it sends, and its random bytes in hexadecimal."""

    run_id: str = Field(max_length=256)
    nonce: Sha256


class SyncConnection:
    """One end of a connection. Threads may write at the same time.

    `key`: of a connection over TCP; what is written is sealed with it, and what is read is checked.
    """

    def __init__(self, own: socket.socket, key: bytes | None = None, is_trainer: bool = False) -> None:
        own.settimeout(PATIENCE_S)
        self.socket = own
        self.key = key
        self._names = (b"trainer", b"sampler") if is_trainer else (b"sampler", b"trainer")
        self._num_written = self._num_read = 0
        self._lock = threading.Lock()

    @property
    def local_host(self) -> str:
        """The address of this machine that the other end talks to."""
        return str(self.socket.getsockname()[0])

    def write(self, message: Frozen, buffer: memoryview | None = None) -> None:
        """Write a message, and the bytes of a buffer after it. Raises SyncBroken when the other end is gone."""
        data = message.model_dump_json(exclude_defaults=True).encode()
        with self._lock:
            sealed = self._seal(self._names[0], self._num_written, data) + data
            self._num_written += 1
            try:
                self.socket.sendall(struct.pack(">I", len(data)) + sealed)
                for first in range(0, len(buffer or ()), _SENT_BYTES):
                    assert buffer is not None
                    self.socket.sendall(buffer[first : first + _SENT_BYTES])
            except OSError as error:
                raise SyncBroken(f"the other end is gone: {error}") from error

    def read(self, kind: type[M], most_bytes: int = _MAX_MESSAGE_BYTES, until: float | None = None) -> M:
        """Read one message. Raises SyncBroken: the other end is gone or silent, or this is no such message.

        `until`: the monotonic time at which it must have come; else no part of it may take longer than PATIENCE_S.
        """
        (length,) = struct.unpack(">I", exactly(self.socket, 4, until))
        if length > most_bytes:
            raise SyncBroken(f"a message of {length} bytes")
        seal = exactly(self.socket, _MAC_BYTES, until) if self.key is not None else b""
        data = exactly(self.socket, length, until)
        if not hmac.compare_digest(seal, self._seal(self._names[1], self._num_read, data)):
            raise SyncBroken("a message is not the other end's: its seal is wrong")
        self._num_read += 1
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise SyncBroken(f"no message of this schema: {first_rule(error)}") from error

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the bytes that follow a message. Raises SyncBroken."""
        fill(self.socket, buffer)

    def _seal(self, writer: bytes, number: int, data: bytes) -> bytes:
        if self.key is None:
            return b""
        return hmac.digest(self.key, writer + struct.pack(">Q", number) + data, "sha256")

    def proof(self, of: str, name: str) -> bytes:
        """Return either end's proof for a group's name: only the two ends of this connection can compute it."""
        assert self.key is not None
        return hmac.digest(self.key, f"{of} in {name}".encode(), "sha256")

    def is_gone(self) -> bool:
        """Return True if the other end is gone, whatever of it is still to be read."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End the connection for both ends; a thread that waits in it wakes."""
        with suppress(OSError):  # it is gone already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


# A trainer's end.


def connect(place: SyncPlace, announcement: Announcement, secret: bytes | None) -> SyncConnection:
    """Connect to a sampler in the way that the announcement's transport takes. Raises SyncBroken.

    `secret`: the run's, for samplers that are reached over TCP.
    """
    if announcement.transport not in OVER_TCP:
        return connect_locally(place.socket)
    if place.address is None:
        raise SyncBroken("the sampler's host has no address for weights (LONGSHORE_SAMPLING__WEIGHTS_ADDRESS)")
    if secret is None:
        raise SyncBroken("this host has no key by which samplers of other machines would know it")
    return connect_sampler(place.address, announcement.run_id, secret)


def connect_locally(path: str) -> SyncConnection:
    """Connect to a sampler's Unix socket. Raises SyncBroken."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own.settimeout(PATIENCE_S)
    try:
        with reachable(Path(path)) as short:
            own.connect(short)
    except OSError as error:
        own.close()
        raise SyncBroken(f"no sampler of this machine listens: {error.strerror or error}") from error
    return SyncConnection(own, is_trainer=True)


def connect_sampler(address: str, run_id: str, secret: bytes) -> SyncConnection:
    """Connect to a sampler at `host:port`, and agree on a key. Raises SyncBroken.

    The sampler has proved that it knows the secret once a reply of it was read.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _HANDSHAKE_S
    try:
        own = socket.create_connection((host.strip("[]"), int(port)), _HANDSHAKE_S)
    except (OSError, ValueError) as error:
        raise SyncBroken(f"no sampler listens at {address}: {error}") from error
    try:
        _watch_link(own)
        theirs, hello = exactly(own, _NONCE_BYTES, until), Hello(run_id=run_id, nonce=secrets.token_hex(_NONCE_BYTES))
        SyncConnection(own).write(hello)
        return SyncConnection(own, _key(secret, theirs, hello), is_trainer=True)
    except SyncBroken:
        own.close()
        raise


# A sampler's end.

Serve = Callable[[SyncConnection, Announcement], None]


def accept_locally(path: Path, serve: Serve) -> None:
    """Serve trainers at a Unix socket, in threads. Only this user can connect."""
    listener = listen_privately(path, backlog=_MAX_HANDSHAKES)
    threading.Thread(target=_accept, args=(listener, None, serve), name="weights", daemon=True).start()


def accept_remotely(host: str, key: bytes, serve: Serve) -> str:
    """Serve trainers that know their run's secret, at a free port of one address; returns `host:port`.

    `key`: the samplers' key; each run's secret is derived from it.

    Raises InvalidInput: the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=_MAX_HANDSHAKES)
    except OSError as error:
        raise InvalidInput(f"no weights can be taken at {host}: {error.strerror}", "weights_address") from error
    threading.Thread(target=_accept, args=(listener, key, serve), name="weights", daemon=True).start()
    port = listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _accept(listener: socket.socket, key: bytes | None, serve: Serve) -> None:
    """Serve trainers until the listener is closed, each in a thread.

    At most 8 connections at a time are unauthenticated, each for at most 10 seconds. The next one replaces the oldest.
    A trainer authenticates within milliseconds, so silent connections keep nobody away.

    Args:
        key: the sampler's key; each run's secret is derived from it. None for a Unix socket, whose users are trusted.
        serve: takes an authenticated trainer's connection, and its announcement.
    """
    unknown: dict[socket.socket, None] = {}  # the oldest first
    lock = threading.Lock()

    def admit(own: socket.socket) -> None:
        with own:
            try:
                try:
                    connection, announcement = _admitted(own, key)
                finally:
                    with lock:
                        unknown.pop(own, None)
                serve(connection, announcement)
            except SyncBroken as broken:
                print(f"weight sync: {broken}", flush=True)

    while True:
        try:
            own, _ = listener.accept()
        except OSError:
            return
        with lock:
            unknown[own] = None
            if len(unknown) > _MAX_HANDSHAKES:
                oldest = next(iter(unknown))
                del unknown[oldest]
                with suppress(OSError):  # it is gone already
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it
        threading.Thread(target=admit, args=(own,), name="weights", daemon=True).start()


def _admitted(own: socket.socket, key: bytes | None) -> tuple[SyncConnection, Announcement]:
    """Return a trainer's connection and announcement. Raises SyncBroken: it does not know its run's secret."""
    until = time.monotonic() + _HANDSHAKE_S
    own.settimeout(_HANDSHAKE_S)
    run_key, run_id = None, None
    if key is not None:
        _watch_link(own)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            own.sendall(nonce)
        except OSError as error:
            raise SyncBroken(f"the other end is gone: {error}") from error
        hello = SyncConnection(own).read(Hello, 1024, until)
        run_key, run_id = _key(secret_of_run(key, hello.run_id), nonce, hello), hello.run_id
    connection = SyncConnection(own, run_key)
    announcement = connection.read(Announcement, _MAX_FIRST_BYTES, until)
    if run_id is not None and announcement.run_id != run_id:
        raise SyncBroken("the announcement is of another run")
    return connection, announcement


def _watch_link(own: socket.socket) -> None:
    """Send at once, and have the kernel end the connection when the other machine cannot be reached for a while."""
    settings = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: max(1, _LINK_S // 3),
        socket.TCP_KEEPINTVL: max(1, _LINK_S // 3),
        socket.TCP_KEEPCNT: 2,
        socket.TCP_USER_TIMEOUT: _LINK_S * 1000,
    }
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in settings.items():
        own.setsockopt(socket.IPPROTO_TCP, name, value)


def _key(secret: bytes, nonce: bytes, hello: Hello) -> bytes:
    return hmac.digest(secret, nonce + bytes.fromhex(hello.nonce) + hello.run_id.encode(), "sha256")


# Bytes.


def exactly(own: socket.socket, num_bytes: int, until: float | None = None) -> bytes:
    """Read exactly `num_bytes` bytes. Raises SyncBroken."""
    data = bytearray(num_bytes)
    fill(own, memoryview(data), until)
    return bytes(data)


def fill(own: socket.socket, buffer: memoryview, until: float | None = None) -> None:
    """Read as many bytes as a buffer has. Raises SyncBroken."""
    while buffer:
        try:
            own.settimeout(PATIENCE_S if until is None else max(0.001, until - time.monotonic()))
            num_read = own.recv_into(buffer)
        except TimeoutError as error:
            raise SyncBroken(f"the other end was silent for {own.gettimeout():.3g} s") from error
        except OSError as error:
            raise SyncBroken(f"the other end is gone: {error}") from error
        if not num_read:
            raise SyncBroken("the other end is gone")
        buffer = buffer[num_read:]
