"""Named tensors one after another in one buffer: one copy offloads them, one collective reduces them."""

import math

import torch
from torch import Tensor

_ALIGNMENT = 64  # elements: keeps every tensor on a cache line, and vectorised kernels on their fast path


class Flat:
    """`views[name]` are the tensors, in the order given; the gaps between them hold zeros."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.offsets: dict[str, int] = {}
        self.num_elements = 0
        for name, shape in shapes.items():
            self.offsets[name] = self.num_elements
            self.num_elements += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.zeros(self.num_elements, dtype=dtype, device=device)
        self.views = {name: self._view(name) for name in shapes}

    def _view(self, name: str) -> Tensor:
        shape, start = self.shapes[name], self.offsets[name]
        return self.buffer[start : start + math.prod(shape)].view(shape)

    def like(self, dtype: torch.dtype) -> "Flat":
        """Zeros of the same shapes at the same offsets."""
        return Flat(self.shapes, dtype, self.buffer.device)

    @property
    def num_bytes(self) -> int:
        """Bytes it takes when resident."""
        return self.num_elements * self.buffer.element_size()

    @property
    def resident_bytes(self) -> int:
        return self.buffer.untyped_storage().nbytes()

    def release(self) -> None:
        """Give the storage back. Views stay valid, but empty, until `restore`."""
        self.buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take storage again, its contents undefined."""
        self.buffer.untyped_storage().resize_(self.num_bytes)
