"""How buckets get from a trainer's buffers into samplers': prepare, connect, send or receive, finalize; and by TCP.

A transport is a subclass of `Outbound` and one of `Inbound`. By themselves these have two buffers in memory, and the
messages say when a buffer is full and when it has been read; what is in a buffer has to be brought to the other end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import NUM_BUFFERS, Bucket, Connect, SyncBroken, SyncMessage, SyncReply
from megatron_worker.weight_sync.connections import Receiver, Receivers, SyncConnection

_CPU = torch.device("cpu")


class Outbound:
    """The trainer's end, for all samplers of a sync. `buffers`: uint8, filled in turn."""

    buffers: Sequence[Tensor] = ()
    receivers: Receivers

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, num_bytes: int) -> None:
        """Make the buffers. Raises OSError: there is not enough memory."""
        self.buffers = make_buffers(num_bytes, self.device)

    def connect(self, receivers: Receivers) -> None:
        """Give the living samplers what they need to get at the buffers' contents. Some may be lost by it."""
        self.receivers = receivers
        receivers.each(self.hand_over)
        receivers.settle(0)

    def hand_over(self, receiver: Receiver) -> None:
        """Give one sampler what it needs. Raises SyncBroken."""
        receiver.send(SyncMessage(connect=Connect()))

    def send(self, bucket: Bucket) -> None:
        """Set a bucket, in buffer `number % len(buffers)`, on its way to all who live. Raises OSError: to nobody."""
        self.receivers.send(SyncMessage(bucket=bucket))

    def settle(self, num_under_way: int) -> None:
        """Wait until every live sampler has read all but the last `num_under_way` buckets. Raises OSError as `send`."""
        self.receivers.settle(num_under_way)

    def finalize(self) -> None:
        """Give everything back. Called once, after errors too."""
        self.buffers = ()


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
        self.receivers.each(lambda receiver: receiver.send(SyncMessage(bucket=bucket), data))


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
