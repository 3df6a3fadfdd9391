"""How buckets get from a trainer's buffers into samplers': prepare, connect, send or receive, finalize."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import NUM_BUFFERS, Bucket, Connect, SyncMessage
from megatron_worker.weight_sync.connections import Receiver, Receivers, SyncConnection


class Outbound(Protocol):
    """The trainer's end, for all samplers of a sync. `buffers`: uint8, filled in turn."""

    buffers: Sequence[Tensor]

    def prepare(self, num_bytes: int) -> None:
        """Make the buffers. Raises OSError: there is not enough memory."""
        ...

    def connect(self, receivers: Receivers) -> None:
        """Give the living samplers what they need to get at the buffers' contents. Some may be lost by it."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Set a bucket, in buffer `number % len(buffers)`, on its way to all who live, and return."""
        ...

    def settle(self, num_under_way: int) -> None:
        """Wait until every live sampler has read all but the last `num_under_way` buckets."""
        ...

    def finalize(self) -> None:
        """Give everything back. Called once, after errors too."""
        ...


class Messages(Protocol):
    """A sampler's connection to the trainer, as its transport sees it."""

    connection: SyncConnection

    def is_interrupted(self) -> bool:
        """Return True if the trainer has given up what it sent before. Raises SyncBroken: it is gone."""
        ...


class Inbound(Protocol):
    """A sampler's end of one sync."""

    def prepare(self, num_bytes: int) -> None:
        """Note how large a buffer is. Nothing is allocated before `connect`."""
        ...

    def connect(self, messages: Messages, given: Connect) -> None:
        """Get access to the buffers, and tell the trainer. Raises SyncBroken; OSError: there is not enough memory."""
        ...

    def receive(self, bucket: Bucket) -> Tensor | None:
        """Return the buffer that holds a bucket; it is the trainer's again after the reply. None: the group broke."""
        ...

    def finalize(self) -> None:
        """Give everything back. Called once, after errors too."""
        ...


class LocalOutbound:
    """The trainer's end of transports whose buffers both ends can access: a message says that a buffer is full."""

    buffers: Sequence[Tensor] = ()
    _receivers: Receivers

    def connect(self, receivers: Receivers) -> None:
        self._receivers = receivers
        receivers.each(self._hand_over)
        receivers.settle(0)

    def _hand_over(self, receiver: Receiver) -> None:
        """Give a sampler what it needs to get at the buffers' contents. Raises SyncBroken."""
        raise NotImplementedError

    def send(self, bucket: Bucket) -> None:
        self._receivers.send(SyncMessage(bucket=bucket))

    def settle(self, num_under_way: int) -> None:
        self._receivers.settle(num_under_way)


def make_buffers(num_bytes: int, device: torch.device) -> list[Tensor]:
    """Make two buffers, uint8 [num_bytes]. Raises OSError."""
    try:
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0]
        raise OSError(f"no {NUM_BUFFERS} buffers of {num_bytes} bytes: {why}") from error
