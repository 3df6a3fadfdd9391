"""A sampler's end of a sync: buckets in their order, each read while the one before it is used."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from longshore.fields import Sha256
from megatron_worker.process.ranks import BackgroundCall
from megatron_worker.weight_sync.buckets import (
    Announcement,
    Assembly,
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
        self._connection = connection
        self._device = device
        if (reason := why_not(announcement.transport, device)) is not None:
            raise InvalidInput(f"the sampler does not take it: {reason}", "weight_sync.backend")
        self._inbound = ends_of(announcement.transport).inbound(device, announcement.buffer_bytes)
        self._next: BackgroundCall[tuple[Bucket, Tensor] | Sha256] | None = None
        self._num_read = 0
        self._goes_on = threading.Event()

    def begin(self, needs_all: bool) -> None:
        """Accept the announced sync, and wait for the first bucket: until then nothing must be given up.

        Raises SyncBroken.
        """
        self.reply(SyncReply(needs_all=needs_all))
        self._read_on().result()

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

    def put_into(self, assembly: Assembly) -> Sha256:
        """Put all buckets together. Returns the version's digest.

        Raises:
            InvalidInput: a tensor is wrong or missing, or this is not what was sent.
            SyncBroken: the trainer is gone or silent before the commit, or sends what is no message.
        """
        assert self._next is not None, "begin comes first"
        while not isinstance(came := self._next.result(), str):
            self._read_on()
            assembly.put(*came)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.reply(SyncReply())  # its buffer is the trainer's again
        if (digest := assembly.finish()) != came:
            raise InvalidInput("the digest of what came is not the sender's", "weight_sync")
        return digest

    def _read_on(self) -> BackgroundCall[tuple[Bucket, Tensor] | Sha256]:
        self._next = BackgroundCall(lambda _: self._read(), "weights-read")
        return self._next

    @torch.inference_mode()
    def _read(self) -> tuple[Bucket, Tensor] | Sha256:
        """Read up to the next bucket or the commit's digest. Raises SyncBroken."""
        try:
            while True:
                match self._connection.read(SyncMessage):
                    case SyncMessage(connect=Connect() as connect, bucket=None, commit=None):
                        self._inbound.connect(self._connection, connect)
                    case SyncMessage(connect=None, bucket=None, commit=Commit(digest=digest)):
                        return digest
                    case SyncMessage(connect=None, bucket=Bucket() as bucket, commit=None):
                        if bucket.num_bytes > self.announcement.buffer_bytes or bucket.number != self._num_read:
                            what = f"bucket {bucket.number} of {bucket.num_bytes} bytes"
                            raise SyncBroken(f"{what}, where {self._num_read} is due")
                        self._num_read += 1
                        return bucket, self._inbound.receive(bucket)
                    case _:
                        raise SyncBroken("an empty message")
        except OSError as error:  # no memory for buffers, or a group that broke
            with suppress(SyncBroken):
                self.reply(SyncReply(refused=str(error)))
            raise SyncBroken(str(error)) from error
        except SyncBroken:
            raise
        except Exception as error:  # of the transport: to the sampler it is the end of the sync
            raise SyncBroken(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the sync: the trainer notices by the reply, or by the end of the connection."""
        self._connection.shut()
        if self._next is not None:
            with suppress(SyncBroken):
                self._next.result()
        self._inbound.finalize()
