"""A sampler's end of a sync: buckets in their order, each read while the next one travels."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megatron_worker.process.ranks import BackgroundCall
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
        self._next: BackgroundCall[tuple[Bucket, Tensor] | Commit] | None = None
        self._num_read = 0
        self._goes_on = threading.Event()

    def begin(self, needs_all: bool) -> None:
        """Accept the announced sync, and wait for the first bucket: until then nothing must be given up.

        Raises SyncBroken.
        """
        self.reply(SyncReply(needs_all=needs_all))
        self._read_next().result()

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
        assert self._next is not None, "nothing has begun"
        while not isinstance(found := self._next.result(), Commit):
            self._read_next()
            yield found
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.reply(SyncReply())
        self.digest = found.digest

    def _read_next(self) -> BackgroundCall[tuple[Bucket, Tensor] | Commit]:
        """Begin to read the next bucket, or the commit, while the last bucket is used."""
        self._next = BackgroundCall(lambda _: self._read())
        return self._next

    def _read(self) -> tuple[Bucket, Tensor] | Commit:
        """Read up to the next bucket, or the commit. Raises SyncBroken."""
        try:
            with torch.inference_mode():
                while True:
                    match self._connection.read(SyncMessage):
                        case SyncMessage(connect=Connect() as connect, bucket=None, commit=None):
                            self._inbound.connect(self._connection, connect)
                        case SyncMessage(connect=None, bucket=None, commit=Commit() as commit):
                            return commit
                        case SyncMessage(connect=None, bucket=Bucket() as bucket, commit=None):
                            due, self._num_read = self._num_read, self._num_read + 1
                            if bucket.num_bytes > self.announcement.buffer_bytes or bucket.number != due:
                                what = f"bucket {bucket.number} of {bucket.num_bytes} bytes"
                                raise SyncBroken(f"{what}, where {due} is due")
                            return bucket, self._inbound.receive(bucket)
                        case _:
                            raise SyncBroken("an empty message")
        except SyncBroken:
            raise
        except OSError as error:  # no memory for buffers, or a group that broke
            with suppress(SyncBroken):
                self.reply(SyncReply(refused=str(error)))
            raise SyncBroken(str(error)) from error
        except Exception as error:
            raise SyncBroken(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the sync: the trainer notices by the reply, or by the end of the connection."""
        self._connection.shut()
        if self._next is not None:
            with suppress(SyncBroken):
                self._next.result()
        self._inbound.finalize()
