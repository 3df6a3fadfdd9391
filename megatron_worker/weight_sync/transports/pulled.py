"""The common part of `nixl` and `mooncake`: samplers read the trainer's buffers into their own, with another project's
engine, which listens at the address over which trainer and sampler reached each other.

These engines do not authenticate readers and writers. So a sampler compares what it reads with checksums that come over
the authenticated connection; and a host takes part only if its operator has allowed it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import Bucket
from megatron_worker.weight_sync.connections import PATIENCE_S
from megatron_worker.weight_sync.messages import NUM_BUFFERS, Connect, RemoteBuffers, SyncBroken, SyncMessage, SyncReply
from megatron_worker.weight_sync.sampler_connections import Receiver
from megatron_worker.weight_sync.transports.protocol import LocalOutbound, Messages, make_buffers

_POLL_S = 0.0005
_LOOK_S = 0.02  # between looks whether the trainer is there
_CPU = torch.device("cpu")


class PullEngine(Protocol):
    """One end of an engine, with buffers that it may read and write. `endpoint`: as RemoteBuffers has it.

    Every method raises SyncBroken in the engine's own words.
    """

    endpoint: str

    def begin(self, endpoint: str, address: int, into: Tensor) -> None:
        """Begin to read from another end's memory into a part of one of the buffers, uint8 [num_bytes]."""
        ...

    def is_done(self) -> bool:
        """Return True once what was begun has been read."""
        ...

    def close(self) -> None:
        """Release everything, even during a read."""
        ...


MakeEngine = Callable[[str, Sequence[Tensor]], PullEngine]
"""Makes an end at an address of this machine. Raises SyncBroken."""


class PulledOutbound(LocalOutbound):
    """The trainer's end: it only fills buffers."""

    def __init__(self, make: MakeEngine, device: torch.device) -> None:
        self._make = make
        self._engines: dict[str, PullEngine] = {}  # by the address at which samplers reach this machine

    def prepare(self, num_bytes: int) -> None:
        self.buffers = make_buffers(num_bytes, _CPU)

    def _hand_over(self, receiver: Receiver) -> None:
        host = receiver.connection.local_host
        if host not in self._engines:
            self._engines[host] = self._make(host, self.buffers)
        addresses = tuple(buffer.data_ptr() for buffer in self.buffers)
        remote = RemoteBuffers(endpoint=self._engines[host].endpoint, addresses=addresses)
        receiver.send(SyncMessage(connect=Connect(remote=remote)))

    def finalize(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines = {}
        self.buffers = ()


class PulledInbound:
    """A sampler's end, which reads each bucket when the trainer says that it is ready."""

    def __init__(self, make: MakeEngine, device: torch.device) -> None:
        self._make = make
        self._engine: PullEngine | None = None

    def prepare(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def connect(self, messages: Messages, given: Connect) -> None:
        if given.remote is None or self._engine is not None:
            raise SyncBroken("the trainer's buffers are due, once")
        self._messages, self._remote = messages, given.remote
        self._buffers = make_buffers(self._num_bytes, _CPU)
        self._engine = self._make(messages.connection.local_host, self._buffers)
        messages.connection.write(SyncReply())

    def receive(self, bucket: Bucket) -> Tensor | None:
        if self._engine is None:
            raise SyncBroken("a bucket came before its buffer")
        place = bucket.number % NUM_BUFFERS
        buffer = self._buffers[place]
        if bucket.num_bytes:
            self._engine.begin(self._remote.endpoint, self._remote.addresses[place], buffer[: bucket.num_bytes])
            self._wait(self._engine)
        return buffer

    def _wait(self, engine: PullEngine) -> None:
        """Wait for the read. Raises SyncBroken: it failed, the trainer is gone, or it takes too long."""
        until, look = time.monotonic() + PATIENCE_S, time.monotonic() + _LOOK_S
        while not engine.is_done():
            if (now := time.monotonic()) > until:
                raise SyncBroken(f"the trainer's buffer could not be read within {PATIENCE_S:g} s")
            if now > look:
                if self._messages.is_interrupted():
                    raise SyncBroken("the trainer has begun anew")
                look = now + _LOOK_S
            time.sleep(_POLL_S)

    def finalize(self) -> None:
        if self._engine is not None:
            self._engine.close()
