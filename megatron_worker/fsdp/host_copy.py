"""The host's copy of some tensors of the device: one flat buffer, pinned where there is a device to copy to."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Tensors of one dtype, each with a storage of its own, and the buffer that stands for them while those are empty.

    The buffer is allocated the first time that it is needed, and kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Whole storages: a shard's is longer than the shard where the ranks' are not equal.
        self._sizes = [t.untyped_storage().nbytes() for t in tensors]
        self._tensors = [t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in tensors]
        self._host: Tensor | None = None

    @property
    def device_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._tensors)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def write(self) -> None:
        """Copy the tensors to the host."""
        if self._host is None:
            first = self._tensors[0]
            size, pinned = sum(len(t) for t in self._tensors), first.device.type == "cuda"
            self._host = torch.empty(size, dtype=first.dtype, pin_memory=pinned)
        for host, tensor in self._pairs():
            host.copy_(tensor, non_blocking=True)
        if self._tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def read(self) -> None:
        """Fill the tensors from the host."""
        assert self._host is not None
        self.restore()
        for host, tensor in self._pairs():
            tensor.copy_(host, non_blocking=True)

    def release(self) -> None:
        """Give the device's storages back. Every view of them stays valid, but empty, until `restore` or `read`."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take storage again, its contents undefined."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        assert self._host is not None
        return list(zip(self._host.split([len(t) for t in self._tensors]), self._tensors, strict=True))
