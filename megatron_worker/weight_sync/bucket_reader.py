"""A sampler's end of a sync: buckets in their order, each read while the next one travels."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    Announcement,
    Bucket,
    Commit,
    Connect,
    SyncBroken,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import SyncConnection
from megatron_worker.weight_sync.transports.table import ends_of, why_not
from shared.errors import InvalidInput

_WAITS_S = 10.0


class Receiving:
    """One version on its way from a trainer. Everything that comes is checked against its schema."""

    def __init__(self, connection: SyncConnection, announcement: Announcement, device: torch.device) -> None:
        """Raises InvalidInput: the transport does not work on this device."""
        self.announcement = announcement
        self.digest = ""
        self._connection = connection
        self._device = device
        if (reason := why_not(announcement.transport, device)) is not None:
            raise InvalidInput(f"the sampler does not take it: {reason}", "weight_sync.backend")
        self._inbound = ends_of(announcement.transport).inbound(device, announcement.buffer_bytes)
        self._read: SimpleQueue[tuple[Bucket, Tensor] | str | SyncBroken] = SimpleQueue()
        self._has_come = threading.Event()  # set when `_read` gets its first entry
        self._broken: SyncBroken | None = None
        self._thread = threading.Thread(target=self._read_all, name="weights-read", daemon=True)
        self._goes_on = threading.Event()

    def begin(self, needs_all: bool) -> None:
        """Accept the announced sync, and wait for the first bucket: until then nothing must be given up.

        Raises SyncBroken.
        """
        self.reply(SyncReply(needs_all=needs_all))
        self._thread.start()
        self._has_come.wait()
        if self._broken is not None:
            raise self._broken

    def reply(self, reply: SyncReply) -> None:
        """Answer a message. Raises SyncBroken."""
        self._connection.write(reply)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the trainer from time to time that it has to wait, until `go_on` is called or the block ends."""

        def tell() -> None:
            with suppress(SyncBroken):
                while not self._goes_on.wait(_WAITS_S):
                    self.reply(SyncReply(waits=True))

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
        """Yield buckets until the commit. A buffer is the trainer's again when the next one is asked for.

        Raises SyncBroken: the trainer is gone or silent before the commit, or sends what is no message.
        """
        while True:
            match self._read.get():
                case str(digest):
                    self.digest = digest
                    return
                case SyncBroken() as broken:
                    raise broken
                case bucket, buffer:
                    yield bucket, buffer
                    if self._device.type == "cuda":
                        torch.cuda.synchronize(self._device)
                    self.reply(SyncReply())

    def _read_all(self) -> None:
        try:
            with torch.inference_mode():
                self._read_messages()
        except SyncBroken as broken:
            self._broken = broken
        except OSError as error:  # no memory for buffers, or a group that broke
            self._broken = SyncBroken(str(error))
            with suppress(SyncBroken):
                self.reply(SyncReply(refused=str(error)))
        except Exception as error:  # the sampler's other threads must not wait for this one
            self._broken = SyncBroken(f"{type(error).__name__}: {error}")
        if self._broken is not None:
            self._put(self._broken)

    def _put(self, one: tuple[Bucket, Tensor] | str | SyncBroken) -> None:
        self._read.put(one)
        self._has_come.set()

    def _read_messages(self) -> None:
        due = 0
        while True:
            match self._connection.read(SyncMessage):
                case SyncMessage(connect=Connect() as connect, bucket=None, commit=None):
                    self._inbound.connect(self._connection, connect)
                case SyncMessage(connect=None, bucket=None, commit=Commit(digest=digest)):
                    self._put(digest)
                    return
                case SyncMessage(connect=None, bucket=Bucket() as bucket, commit=None):
                    if bucket.num_bytes > self.announcement.buffer_bytes or bucket.number != due:
                        raise SyncBroken(f"bucket {bucket.number} of {bucket.num_bytes} bytes, where {due} is due")
                    self._put((bucket, self._inbound.receive(bucket)))
                    due += 1
                case _:
                    raise SyncBroken("an empty message")

    def close(self) -> None:
        """End the sync: the trainer notices by the reply, or by the end of the connection."""
        self._connection.shut()
        if self._thread.ident is not None:
            self._thread.join()
        self._inbound.finalize()
