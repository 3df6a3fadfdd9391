"""How buckets get from a trainer's buffers into samplers': prepare, connect, send or receive, finalize; and by TCP.

A transport is a subclass of `Outbound` and one of `Inbound`. By themselves these have two buffers in memory, and the
messages say when a buffer is full and when it has been read; what is in a buffer has to be brought to the other end.
"""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    NUM_BUFFERS,
    Announcement,
    Bucket,
    Connect,
    SyncBroken,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import PATIENCE_S, SyncConnection, connect
from shared.jobs.job import SyncPlace

_CPU = torch.device("cpu")


@dataclass
class Receiver:
    """A connection to one sampler. `num_owed`: messages that it has not answered."""

    place: SyncPlace
    connection: SyncConnection
    num_owed: int = 0

    def send(self, message: SyncMessage, buffer: memoryview | None = None) -> None:
        """Send a message, and bytes after it, without waiting for its reply. Raises SyncBroken."""
        self.connection.write(message, buffer)
        self.num_owed += 1

    def take_reply(self) -> SyncReply:
        """Read one reply or call. Raises SyncBroken, also if it is a refusal."""
        reply = self.connection.read(SyncReply)
        if reply.refused is not None:
            raise SyncBroken(reply.refused)
        if not reply.waits and reply.call is None:
            self.num_owed -= 1
        return reply


class Outbound:
    """The trainer's end, for all samplers of a sync. A sampler that is lost, or refuses, is left out from then on.

    Attributes:
        buffers: uint8, filled in turn.
        living: the samplers that still take part. `problems`: by socket, why others do not.
    """

    buffers: Sequence[Tensor] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.living: list[Receiver] = []
        self.problems: dict[str, str] = {}

    # What a transport may do in another way.

    def prepare(self, num_bytes: int) -> None:
        """Make the buffers. Raises OSError: there is not enough memory."""
        self.buffers = make_buffers(num_bytes, self.device)

    def connect(self) -> None:
        """Give the living samplers what they need to get at the buffers' contents. Some may be lost by it."""
        self.each(self.hand_over)
        self.take_replies()

    def hand_over(self, receiver: Receiver) -> None:
        """Give one sampler what it needs. Raises SyncBroken."""
        receiver.send(SyncMessage(connect=Connect()))

    def send(self, bucket: Bucket) -> None:
        """Set a bucket, in buffer `number % len(buffers)`, on its way to all who live. Raises OSError: to nobody."""
        self.tell(SyncMessage(bucket=bucket))

    def settle(self, num_under_way: int) -> None:
        """Wait until every live sampler has read all but the last `num_under_way` buckets. Raises OSError as `send`."""
        self.take_replies(num_under_way)

    def finalize(self) -> None:
        """Give everything back. Called once, after errors too."""
        self.buffers = ()
        for receiver in self.living:
            receiver.connection.close()

    # Its samplers.

    def announce(self, places: tuple[SyncPlace, ...], announcement: Announcement, secret: bytes | None) -> bool:
        """Connect to all samplers and announce a version. Returns True if one of them needs all elements."""
        needs_all = announcement.base_digest is None
        for place in places:
            connection: SyncConnection | None = None
            try:
                connection = connect(place, announcement, secret)
                connection.write(announcement)
                receiver = Receiver(place, connection, num_owed=1)
                while receiver.num_owed:
                    needs_all |= receiver.take_reply().needs_all
                self.living.append(receiver)
            except SyncBroken as broken:
                self.problems[place.socket] = str(broken)
                if connection is not None:
                    connection.close()
        return needs_all

    def each(self, action: Callable[[Receiver], object]) -> None:
        """Call an action with every sampler; a sampler is lost if the action fails with it."""
        for receiver in list(self.living):
            self.do(action, receiver)

    def do(self, action: Callable[[Receiver], object], receiver: Receiver) -> None:
        try:
            action(receiver)
        except SyncBroken as broken:
            self.lose(receiver, str(broken))

    def tell(self, message: SyncMessage) -> None:
        self.each(lambda receiver: receiver.send(message))

    def take_replies(self, num_owed: int = 0) -> None:
        """Read replies until no sampler owes more than `num_owed`. Samplers that are lost do not disturb the others."""
        while owing := [receiver for receiver in self.living if receiver.num_owed > num_owed]:
            readable, _, _ = select.select([one.connection.socket for one in owing], [], [], PATIENCE_S)
            for one in owing:
                if one.connection.socket in readable:
                    self.do(Receiver.take_reply, one)
                elif not readable:
                    self.lose(one, f"the sampler was silent for {PATIENCE_S:g} s")

    def lose(self, receiver: Receiver, why: str) -> None:
        self.problems[receiver.place.socket] = why
        self.living.remove(receiver)
        receiver.connection.close()

    def fail(self, places: tuple[SyncPlace, ...], why: str) -> None:
        """End the sync for all samplers."""
        for receiver in list(self.living):
            self.lose(receiver, why)
        self.problems = {place.socket: why for place in places} | self.problems


class Inbound:
    """A sampler's end of one sync. Nothing is allocated before `connect`."""

    buffers: Sequence[Tensor] = ()
    connection: SyncConnection

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes

    def connect(self, connection: SyncConnection, given: Connect) -> None:
        """Get access to the buffers, and tell the trainer. Raises SyncBroken; OSError: there is not enough memory."""
        if self.buffers:
            raise SyncBroken("buffers came twice")
        self.connection = connection
        self.buffers = self.opened(given)
        connection.write(SyncReply())

    def opened(self, given: Connect) -> Sequence[Tensor]:
        """Return the buffers, uint8 [num_bytes]. Raises as `connect` does."""
        return make_buffers(self.num_bytes, self.device)

    def receive(self, bucket: Bucket) -> Tensor:
        """Return the buffer that holds a bucket; it is the trainer's again after the reply.

        Raises SyncBroken; OSError: the bucket cannot come.
        """
        if not self.buffers:
            raise SyncBroken("a bucket came before its buffer")
        return self.buffers[bucket.number % NUM_BUFFERS]

    def finalize(self) -> None:
        """Give everything back. Called once, after errors too."""
        self.buffers = ()


# --- `tcp`: each bucket follows its message over the connection, to one sampler after the other ---


class TcpOutbound(Outbound):
    def __init__(self, device: torch.device) -> None:
        super().__init__(_CPU)

    def send(self, bucket: Bucket) -> None:
        data = _bytes_of(self.buffers[bucket.number % NUM_BUFFERS], bucket)
        self.each(lambda receiver: receiver.send(SyncMessage(bucket=bucket), data))


class TcpInbound(Inbound):
    def __init__(self, device: torch.device, num_bytes: int) -> None:
        super().__init__(_CPU, num_bytes)

    def receive(self, bucket: Bucket) -> Tensor:
        buffer = super().receive(bucket)
        self.connection.read_into(_bytes_of(buffer, bucket))
        return buffer


def _bytes_of(buffer: Tensor, bucket: Bucket) -> memoryview:
    return buffer[: bucket.num_bytes].numpy().data


def make_buffers(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Make two buffers, uint8 [num_bytes]. Raises OSError."""
    try:
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0]
        raise OSError(f"no {NUM_BUFFERS} buffers of {num_bytes} bytes: {why}") from error
