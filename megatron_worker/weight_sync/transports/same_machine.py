"""Transports between processes of one machine: shared memory, and CUDA's IPC."""

import mmap
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    NUM_BUFFERS,
    Bucket,
    Connect,
    CudaHandle,
    SyncBroken,
    SyncMessage,
)
from megatron_worker.weight_sync.transports.protocol import Inbound, Outbound, Receiver

# --- `shared_memory`: two buffers that trainer and samplers of one machine share ---
#
# The trainer makes two anonymous files in memory and passes them over the Unix socket, so that no name is left behind
# and the kernel frees them when both ends are gone.


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


class SharedMemoryOutbound(Outbound):
    _shared: Buffers | None = None

    def prepare(self, num_bytes: int) -> None:
        self._shared = Buffers(num_bytes)
        self.buffers = self._shared.tensors

    def hand_over(self, receiver: Receiver) -> None:
        assert self._shared is not None
        super().hand_over(receiver)
        try:
            socket.send_fds(receiver.connection.socket, [b"\0"], self._shared.descriptors)
        except OSError as error:
            raise SyncBroken(f"the sampler is gone: {error}") from error

    def finalize(self) -> None:
        super().finalize()
        if self._shared is not None:
            self._shared.close()


class SharedMemoryInbound(Inbound):
    _shared: Buffers | None = None

    def opened(self, given: Connect) -> list[Tensor]:
        try:
            _, descriptors, _, _ = socket.recv_fds(self.connection.socket, 1, NUM_BUFFERS)
        except OSError as error:
            raise SyncBroken(f"the trainer is gone: {error}") from error
        if len(descriptors) != NUM_BUFFERS:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SyncBroken(f"{len(descriptors)} buffers came, {NUM_BUFFERS} are due")
        try:
            self._shared = Buffers(self.num_bytes, descriptors)
        except OSError as error:
            raise SyncBroken(f"the buffers cannot be mapped: {error}") from error
        return self._shared.tensors

    def finalize(self) -> None:
        super().finalize()
        if self._shared is not None:
            self._shared.close()


# --- `cuda_ipc` ---
# Two buffers on the trainer's CUDA device, which samplers of the same machine open by CUDA's handles.
#
# It has never run on a GPU (tests/gpu/test_weight_sync.py waits for one): `auto` does not choose it before that.


class CudaOutbound(Outbound):
    def hand_over(self, receiver: Receiver) -> None:
        # A handle counts how often it is opened: each sampler gets a separate one.
        handles = tuple(_handle_of(buffer) for buffer in self.buffers)
        receiver.send(SyncMessage(connect=Connect(handles=handles)))

    def send(self, bucket: Bucket) -> None:
        torch.cuda.synchronize(self.device)  # samplers read on streams of their own
        super().send(bucket)

    def finalize(self) -> None:
        super().finalize()
        torch.cuda.ipc_collect()  # else torch keeps what samplers have released until it shares something again


class CudaInbound(Inbound):
    def opened(self, given: Connect) -> list[Tensor]:
        if len(given.handles) != NUM_BUFFERS:
            raise SyncBroken(f"{len(given.handles)} buffers came, {NUM_BUFFERS} are due")
        try:
            return [_opened(handle, self.num_bytes) for handle in given.handles]
        except RuntimeError as error:
            raise SyncBroken(f"the trainer's buffers cannot be opened: {str(error).splitlines()[0]}") from error


def _handle_of(buffer: Tensor) -> CudaHandle:
    """Describe a buffer as torch's own sharing of tensors between processes does, in the order of `_share_cuda_`."""
    device, handle, size, offset, counter, counter_offset, event, needs_event = buffer.untyped_storage()._share_cuda_()
    return CudaHandle(
        device=device,
        handle=handle.hex(),
        storage_bytes=size,
        storage_offset_bytes=offset,
        counter_handle=counter.hex(),
        counter_offset=counter_offset,
        event_handle=event.hex(),
        needs_event=needs_event,
    )


def _opened(given: CudaHandle, num_bytes: int) -> Tensor:
    """Open a buffer, uint8 [num_bytes]. Raises SyncBroken, or RuntimeError of CUDA."""
    if given.device >= torch.cuda.device_count() or given.storage_bytes < num_bytes:
        raise SyncBroken(f"no buffer of {num_bytes} bytes on CUDA device {given.device}")
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(
        given.device,
        bytes.fromhex(given.handle),
        given.storage_bytes,
        given.storage_offset_bytes,
        bytes.fromhex(given.counter_handle),
        given.counter_offset,
        bytes.fromhex(given.event_handle),
        given.needs_event,
    )
    whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{given.device}")
    return whole.set_(storage, 0, (num_bytes,), (1,))
