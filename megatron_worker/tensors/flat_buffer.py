"""Named tensors one after another in one buffer: one copy offloads them, one collective reduces them."""

import math

import torch
from torch import Tensor

from megatron_worker.tensors.offload import HostCopy

_ALIGNMENT = 64  # elements: keeps every tensor on a cache line, and vectorised kernels on their fast path


class Flat:
    """`views[name]` are the tensors, in the order given; the gaps between them hold zeros.

    `host` holds them while they are offloaded: then views stay valid, but empty.

    `multiples`: the length of the section that begins with this name is rounded up to this multiple.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        multiples: dict[str, int] | None = None,
    ) -> None:
        self.shapes = shapes
        self.multiples = multiples or {}
        self.offsets: dict[str, int] = {}
        end, start, multiple = 0, 0, 1
        for name, shape in shapes.items():
            if name in self.multiples:
                end = start + _rounded_up(end - start, multiple)
                start, multiple = end, self.multiples[name]
            self.offsets[name] = end
            end += _rounded_up(math.prod(shape), _ALIGNMENT)
        self.num_elements = start + _rounded_up(end - start, multiple)
        self.buffer = torch.zeros(self.num_elements, dtype=dtype, device=device)
        self.views = {name: self._view(name) for name in shapes}
        self.host = HostCopy([self.buffer])

    def _view(self, name: str) -> Tensor:
        shape, start = self.shapes[name], self.offsets[name]
        return self.buffer[start : start + math.prod(shape)].view(shape)

    def like(self, dtype: torch.dtype, device: torch.device | None = None) -> "Flat":
        """Zeros of the same shapes at the same offsets, on the same device unless another is given."""
        return Flat(self.shapes, dtype, device or self.buffer.device, self.multiples)

    @property
    def num_bytes(self) -> int:
        """Bytes it takes when resident."""
        return self.num_elements * self.buffer.element_size()


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
