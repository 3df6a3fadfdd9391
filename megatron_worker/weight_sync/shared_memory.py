"""Buckets through memory that a trainer and samplers of one machine share, and a Unix socket between each pair.

The sender makes two anonymous files in memory and passes them over the socket, so that no name is left behind and the
kernel frees them when both ends are gone. Messages are JSON behind their length (4 bytes, big-endian):

    sender: Announcement (with both files)    receiver: Reply
    sender: Bucket, in file number % 2        receiver: Reply, when it has read it
    sender: Commit                            receiver: Reply, when samples are drawn from the version

Whoever may open the socket may send weights: it lies in a folder that only the host's user can enter.
"""

import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from megatron_worker.weight_sync.buckets import MAX_BUCKET_BYTES, Bucket
from shared.contract import Frozen, Sha256
from shared.jobs.job import Lora

NUM_BUFFERS = 2
_WAITS_S = 10.0
PATIENCE_S = 120.0  # for the other end's next message; it lives but is stuck
_MAX_MESSAGE_BYTES = 64 << 20
M = TypeVar("M", bound=Frozen)


class SyncBroken(Exception):
    """The other end is gone, is silent for too long, or refuses. The message says which."""


class Announcement(Frozen):
    """A sync's first message: the version that will be sent. `shapes_sha256`: of all names and shapes (buckets.py).

    `lora`: the weights are an adapter's; absent: they are the model's own. `base_digest`: changes are to this version.
    `name`: the version takes the place of what stands under this name, and samples under way go on under it. `waits`:
    without a name, until whoever holds the version before lets it go; else the sync is refused then.
    """

    schema_version: Literal[1] = 1
    run_id: str = Field(max_length=256)
    version: int = Field(ge=0)
    shapes_sha256: Sha256
    lora: Lora | None = None
    base_digest: Sha256 | None = None
    buffer_bytes: int = Field(gt=0, le=MAX_BUCKET_BYTES)
    name: str | None = Field(default=None, min_length=1, max_length=512)
    waits: bool = True


class Commit(Frozen):
    digest: Sha256


class Message(Frozen):
    """One message of the sender, but for the first."""

    bucket: Bucket | None = None
    commit: Commit | None = None


class Reply(Frozen):
    """`refused`: why the receiver takes no more. `needs_all`: it does not have the version that changes are to.

    `waits`: the reply is yet to come, as samples are still drawn from the version before.
    """

    refused: str | None = None
    needs_all: bool = False
    waits: bool = False


class Buffers:
    """Two buffers of shared memory, uint8 [num_bytes], and the descriptors of their files."""

    def __init__(self, num_bytes: int, descriptors: list[int] | None = None) -> None:
        """Make them, or map those that were received.

        Raises:
            OSError: there is not so much memory, or the files are shorter.
        """
        self.descriptors = descriptors if descriptors is not None else []
        self.tensors: list[Tensor] = []
        self._maps: list[mmap.mmap] = []
        try:
            if descriptors is None:
                for number in range(NUM_BUFFERS):
                    self.descriptors.append(os.memfd_create(f"longshore-weights-{number}", os.MFD_CLOEXEC))
                    os.posix_fallocate(self.descriptors[-1], 0, num_bytes)
            self._maps = [mmap.mmap(descriptor, num_bytes) for descriptor in self.descriptors]
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"no {NUM_BUFFERS} shared buffers of {num_bytes} bytes: {error}") from error
        self.tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in self._maps]

    def close(self) -> None:
        """Give the memory back once no tensor refers to it."""
        self.tensors = []
        self._maps = []
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class Receiving:
    """A sampler's end of one connection. Everything that comes is checked against its schema."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the announcement and map the buffers. Raises SyncBroken."""
        self._connection = connection
        self._lock = threading.Lock()
        connection.settimeout(PATIENCE_S)
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, NUM_BUFFERS)
        except OSError as error:
            raise SyncBroken(f"the sender is gone: {error}") from error
        try:
            head += _exactly(connection, 4 - len(head))
            self.announcement = _parsed(Announcement, _exactly(connection, _length(head)))
            if len(descriptors) != NUM_BUFFERS:
                raise SyncBroken(f"{len(descriptors)} buffers came, {NUM_BUFFERS} are due")
            self._buffers = Buffers(self.announcement.buffer_bytes, descriptors)
        except OSError as error:
            raise SyncBroken(f"the buffers cannot be mapped: {error}") from error
        except SyncBroken:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def reply(self, reply: Reply) -> None:
        """Answer the last message. Raises SyncBroken."""
        with self._lock:
            write_message(self._connection, reply)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the sender from time to time that it has to wait, until `go_on` is called or the block ends."""
        self._goes_on = threading.Event()

        def tell() -> None:
            with suppress(SyncBroken):
                while not self._goes_on.wait(_WAITS_S):
                    self.reply(Reply(waits=True))

        thread = threading.Thread(target=tell, name="weights-wait", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._goes_on.set()
            thread.join()

    def go_on(self) -> None:
        self._goes_on.set()

    def buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield buckets with their buffers until the commit. A buffer is the sender's again when the next is asked for.

        Raises:
            SyncBroken: the sender is gone or silent before the commit, or sends what is no message.
        """
        while True:
            message = _read_message(self._connection, Message)
            if message.commit is not None:
                self.digest = message.commit.digest
                return
            if message.bucket is None:
                raise SyncBroken("an empty message")
            bucket = message.bucket
            if bucket.num_bytes > self.announcement.buffer_bytes:
                raise SyncBroken(f"bucket {bucket.number} has more bytes than its buffer")
            yield bucket, self._buffers.tensors[bucket.number % NUM_BUFFERS]
            self.reply(Reply())

    def close(self) -> None:
        self._buffers.close()
        self._connection.close()


class Receiver:
    """A trainer's connection to one sampler."""

    def __init__(self, path: str) -> None:
        """Connect to a sampler's socket. Raises SyncBroken."""
        self.path = path
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(PATIENCE_S)
        self._num_owed = 0
        try:
            with reachable(Path(path)) as short:
                self._connection.connect(short)
        except OSError as error:
            self._connection.close()
            raise SyncBroken(f"no sampler of this machine listens: {error.strerror or error}") from error

    def announce(self, announcement: Announcement, buffers: Buffers) -> Reply:
        """Send the announcement and the buffers' descriptors; return the reply. Raises SyncBroken, also if refused."""
        data = announcement.model_dump_json().encode()
        try:
            socket.send_fds(self._connection, [struct.pack(">I", len(data))], buffers.descriptors)
            self._connection.sendall(data)
        except OSError as error:
            raise SyncBroken(f"the sampler is gone: {error}") from error
        return self._reply()

    def send(self, message: Message) -> None:
        """Send a message without waiting for its reply, which `settle` reads. Raises SyncBroken."""
        write_message(self._connection, message)
        self._num_owed += 1

    def settle(self, num_owed: int) -> None:
        """Read replies until at most `num_owed` messages are unanswered. Raises SyncBroken."""
        while self._num_owed > num_owed:
            self._reply()
            self._num_owed -= 1

    def _reply(self) -> Reply:
        reply = _read_message(self._connection, Reply)
        while reply.waits:
            reply = _read_message(self._connection, Reply)
        if reply.refused is not None:
            raise SyncBroken(reply.refused)
        return reply

    def close(self) -> None:
        self._connection.close()


def listen(path: Path) -> socket.socket:
    """Listen at a Unix socket that only this user can connect to. A socket that an earlier process left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with reachable(path) as short:
        path.unlink(missing_ok=True)
        listener.bind(short)
        path.chmod(0o600)
    listener.listen(8)
    return listener


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name of a socket for a `with` block: addresses have at most 107 bytes, and paths may have more."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def write_message(connection: socket.socket, message: Frozen) -> None:
    """Write a message as JSON behind its length. Raises SyncBroken when the other end is gone."""
    data = message.model_dump_json(exclude_defaults=True).encode()
    try:
        connection.sendall(struct.pack(">I", len(data)) + data)
    except OSError as error:
        raise SyncBroken(f"the other end is gone: {error}") from error


def _read_message(connection: socket.socket, kind: type[M]) -> M:
    return _parsed(kind, _exactly(connection, _length(_exactly(connection, 4))))


def _length(head: bytes) -> int:
    length = int(struct.unpack(">I", head)[0])
    if length > _MAX_MESSAGE_BYTES:
        raise SyncBroken(f"a message of {length} bytes")
    return length


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = connection.recv(min(1 << 20, num_bytes - len(data)))
        except TimeoutError as error:
            raise SyncBroken(f"the other end was silent for {PATIENCE_S:g} s") from error
        except OSError as error:
            raise SyncBroken(f"the other end is gone: {error}") from error
        if not chunk:
            raise SyncBroken("the other end is gone")
        data += chunk
    return bytes(data)


def _parsed(kind: type[M], data: bytes) -> M:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SyncBroken(f"no message of this schema: {place}: {first['msg']}") from error
