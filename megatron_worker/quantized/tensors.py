"""Tensors that are held as codes and scales (block_codes.py), with the rows' blocks along the last dimension.

Shape suffixes: O rows, P bytes of a row's codes, B blocks of a row.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_worker.quantized.block_codes import BlockCode
from megatron_worker.tensors.flat_buffer import Flat


class QuantizedTensor:
    """A matrix, or a stack of them. `dtype`: of the decoded tensor."""

    def __init__(
        self, code: BlockCode, shape: tuple[int, ...], dtype: torch.dtype, code_OP: Tensor, scale_OB: Tensor
    ) -> None:
        self._code, self.shape, self.dtype = code, shape, dtype
        self._code_OP, self._scale_OB = code_OP, scale_OB

    def __getitem__(self, number: int) -> "QuantizedTensor":
        """Return a matrix of a stack."""
        parts = (x.unflatten(0, (self.shape[0], -1))[number] for x in (self._code_OP, self._scale_OB))
        return QuantizedTensor(self._code, self.shape[1:], self.dtype, *parts)

    def rows(self, first: int, last: int | None) -> "QuantizedTensor":
        """Return some rows of a matrix."""
        code_oP, scale_oB = self._code_OP[first:last], self._scale_OB[first:last]
        return QuantizedTensor(self._code, (len(code_oP), self.shape[1]), self.dtype, code_oP, scale_oB)

    def zeros(self) -> Tensor:
        """Return zeros of the whole tensor's shape."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self._code_OP.device)

    def store(self, whole: Tensor) -> None:
        """Hold the codes of a whole tensor."""
        self._code.pack(whole.flatten(0, -2), self._code_OP, self._scale_OB)

    def whole(self) -> Tensor:
        """Make the whole tensor."""
        return self._code.unpack(self._code_OP, self._scale_OB, self.shape[-1], self.dtype).view(self.shape)


class QuantizedTensors(dict[str, QuantizedTensor]):
    """Quantized tensors by name; their codes and their scales lie in one buffer each."""

    def __init__(
        self, code: BlockCode, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = {name: code.shapes(math.prod(shape[:-1]), shape[-1]) for name, shape in shapes.items()}
        codes = Flat({name: size for name, (size, _) in sizes.items()}, torch.uint8, device)
        scales = Flat({name: size for name, (_, size) in sizes.items()}, torch.float32, device)
        self.flats = codes, scales
        for name, shape in shapes.items():
            self[name] = QuantizedTensor(code, shape, dtype, codes.views[name], scales.views[name])
