"""Host memory for offloaded tensors, and the copies there and back.

Copies go chunk by chunk, on a separate stream. Host memory is allocated by chunks, too, since torch rounds every
request for pinned memory up to a power of two: one of 9 GB would take 16 GB.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20


class HostCopy:
    """Tensors, each with its own storage, and host buffers for their values while they are offloaded.

    Buffers are pinned if there is a device to copy to. They are allocated the first time that they are needed, and
    kept until `forget`: page-locking, or a page's first touch, costs more than the copy.
    """

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = tensors[0].device
        self._storages = [t.untyped_storage() for t in tensors]
        # Whole storages: a shard's is longer than the shard if shards are not equal.
        self._sizes = [storage.nbytes() for storage in self._storages]
        whole = [t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in tensors]
        self._slices = _cut([t.view(torch.uint8) for t in whole], chunk_bytes)
        self._host: list[Tensor] = []

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def host_bytes(self) -> int:
        return sum(chunk.untyped_storage().nbytes() for chunk in self._host)

    def offload(self, frozen: bool = False) -> None:
        """Copy to the host and give the device's storages back, unless that was done.

        `frozen`: the tensors never change, so that one copy is for good.
        """
        if self.device_bytes:
            if not (frozen and self._host):
                self._write()
            self.release()

    def reload(self) -> None:
        """Undo `offload`, if necessary. Copies may still run after the return; work on the device waits for them."""
        if not self.device_bytes:
            self.restore()
            with _beside(self._device):
                for slices, chunk in zip(self._slices, self._host, strict=True):
                    _copy_each(slices, chunk.split([len(s) for s in slices]))

    def release(self) -> None:
        """Give the device's storages back. Every view of them stays valid, but empty, until they are there again."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take storage again, its contents undefined."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _prefer_huge_pages(storage)

    def forget(self) -> None:
        """Give the host's buffers back."""
        self._host = []

    def _write(self) -> None:
        with _beside(self._device):
            for number, slices in enumerate(self._slices):
                if number == len(self._host):  # the next chunk is page-locked while this one travels
                    self._host.append(self._new_chunk(sum(map(len, slices))))
                _copy_each(self._host[number].split([len(s) for s in slices]), slices)
        torch.get_device_module(self._device).synchronize()

    def _new_chunk(self, num_bytes: int) -> Tensor:
        pinned = self._device.type != "cpu"
        chunk = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            _prefer_huge_pages(chunk.untyped_storage())
        return chunk


def _cut(tensors: Sequence[Tensor], chunk: int) -> list[list[Tensor]]:
    """Cut the concatenation of flat tensors into chunks of `chunk` elements: the slices that make up each chunk."""
    chunks: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        while len(tensor):
            if not room:
                chunks.append([])
                room = chunk
            chunks[-1].append(tensor[:room])
            tensor, room = tensor[room:], room - len(chunks[-1][-1])
    return chunks


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run the block's work on a separate stream, after the work before it and before the work after it.

    On the CPU torch's streams do nothing.
    """
    streams: Any = torch.get_device_module(device)
    own, side = streams.current_stream(device), streams.Stream()
    side.wait_stream(own)
    with streams.stream(side):
        yield
    own.wait_stream(side)


def _prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask the kernel for huge pages (2 MB) for fresh memory, as the first access to a page costs more than the copy.

    If the kernel does not follow (`transparent_hugepage` is `never`), copies are slower.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if storage.device.type != "cpu" or advice is None or storage.nbytes() < 2 * _HUGE_PAGE_BYTES:
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
