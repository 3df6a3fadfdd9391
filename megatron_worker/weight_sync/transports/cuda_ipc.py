"""`cuda_ipc`: two buffers on the trainer's CUDA device, which samplers of the same machine open by CUDA's handles.

It has never run on a GPU (tests/gpu/test_weight_sync.py waits for one): `auto` does not choose it before that.
"""

import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import Bucket
from megatron_worker.weight_sync.messages import NUM_BUFFERS, Connect, CudaHandle, SyncBroken, SyncMessage, SyncReply
from megatron_worker.weight_sync.sampler_connections import Receiver
from megatron_worker.weight_sync.transports.protocol import LocalOutbound, Messages, make_buffers


class CudaOutbound(LocalOutbound):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, num_bytes: int) -> None:
        self.buffers = make_buffers(num_bytes, self._device)

    def _hand_over(self, receiver: Receiver) -> None:
        # A handle counts how often it is opened: each sampler gets a separate one.
        handles = tuple(_handle_of(buffer) for buffer in self.buffers)
        receiver.send(SyncMessage(connect=Connect(handles=handles)))

    def send(self, bucket: Bucket) -> None:
        torch.cuda.synchronize(self._device)  # samplers read on streams of their own
        super().send(bucket)

    def finalize(self) -> None:
        self.buffers = ()
        torch.cuda.ipc_collect()  # else torch keeps what samplers have released until it shares something again


class CudaInbound:
    def __init__(self, device: torch.device) -> None:
        self._buffers: list[Tensor] = []

    def prepare(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def connect(self, messages: Messages, given: Connect) -> None:
        if len(given.handles) != NUM_BUFFERS or self._buffers:
            raise SyncBroken(f"{len(given.handles)} buffers came, {NUM_BUFFERS} are due, once")
        try:
            self._buffers = [_opened(handle, self._num_bytes) for handle in given.handles]
        except RuntimeError as error:
            raise SyncBroken(f"the trainer's buffers cannot be opened: {str(error).splitlines()[0]}") from error
        messages.connection.write(SyncReply())

    def receive(self, bucket: Bucket) -> Tensor | None:
        if not self._buffers:
            raise SyncBroken("a bucket came before its buffer")
        return self._buffers[bucket.number % NUM_BUFFERS]

    def finalize(self) -> None:
        self._buffers = []


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
