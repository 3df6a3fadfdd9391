"""`shared_memory`: two buffers that trainer and samplers of one machine share.

The trainer makes two anonymous files in memory and passes them over the Unix socket, so that no name is left behind and
the kernel frees them when both ends are gone.
"""

import mmap
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import Bucket
from megatron_worker.weight_sync.messages import NUM_BUFFERS, Connect, SyncBroken, SyncMessage, SyncReply
from megatron_worker.weight_sync.sampler_connections import Receiver
from megatron_worker.weight_sync.transports.protocol import LocalOutbound, Messages


class Buffers:
    """Two buffers of shared memory, uint8 [num_bytes], and the descriptors of their files."""

    def __init__(self, num_bytes: int, descriptors: list[int] | None = None) -> None:
        """Make them, or map those that were received.

        Raises OSError: there is not enough memory, or the files are shorter.
        """
        self.descriptors = descriptors if descriptors is not None else []
        self.tensors: list[Tensor] = []
        self._maps: list[mmap.mmap] = []
        try:
            if descriptors is None:
                _check_available(NUM_BUFFERS * num_bytes)
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


def _check_available(num_bytes: int) -> None:
    """Raise OSError if this machine or container does not have enough memory left.

    The kernel does not refuse such a mapping: it would free memory until it has to kill a process.
    """
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such container, or "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - used)
    if num_bytes > available:
        raise OSError(f"{available} bytes of memory are left")


class SharedMemoryOutbound(LocalOutbound):
    def __init__(self, device: torch.device) -> None:
        self._shared: Buffers | None = None

    def prepare(self, num_bytes: int) -> None:
        self._shared = Buffers(num_bytes)
        self.buffers = self._shared.tensors

    def _hand_over(self, receiver: Receiver) -> None:
        assert self._shared is not None
        receiver.send(SyncMessage(connect=Connect()))
        try:
            socket.send_fds(receiver.connection.socket, [b"\0"], self._shared.descriptors)
        except OSError as error:
            raise SyncBroken(f"the sampler is gone: {error}") from error

    def finalize(self) -> None:
        self.buffers = ()
        if self._shared is not None:
            self._shared.close()


class SharedMemoryInbound:
    def __init__(self, device: torch.device) -> None:
        self._shared: Buffers | None = None

    def prepare(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def connect(self, messages: Messages, given: Connect) -> None:
        try:
            _, descriptors, _, _ = socket.recv_fds(messages.connection.socket, 1, NUM_BUFFERS)
        except OSError as error:
            raise SyncBroken(f"the trainer is gone: {error}") from error
        if len(descriptors) != NUM_BUFFERS or self._shared is not None:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SyncBroken(f"{len(descriptors)} buffers came, {NUM_BUFFERS} are due, once")
        try:
            self._shared = Buffers(self._num_bytes, descriptors)
        except OSError as error:
            raise SyncBroken(f"the buffers cannot be mapped: {error}") from error
        messages.connection.write(SyncReply())

    def receive(self, bucket: Bucket) -> Tensor | None:
        if self._shared is None:
            raise SyncBroken("a bucket came before its buffer")
        return self._shared.tensors[bucket.number % NUM_BUFFERS]

    def finalize(self) -> None:
        if self._shared is not None:
            self._shared.close()
