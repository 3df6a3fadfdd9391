"""Tensors in MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3): 32 numbers of 4 bits share an exponent.

gpt-oss holds a tensor of experts, [E, I, O], as `<name>_blocks`, uint8 [E, O, I / 32, 16] with the earlier of two
numbers in the lower bits, and `<name>_scales`, uint8 [E, O, I / 32]. All its numbers are exact in bfloat16.
"""

from typing import Any

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BIAS = 127  # of the exponents


class Mxfp4Slice:
    """Stands for safetensors' lazy tensor, of which any experts can be read; in bfloat16."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, outputs, num_blocks, num_bytes = self._blocks.get_shape()
        return [experts, num_blocks * num_bytes * 2, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, key: Any) -> Tensor:
        experts = key[0] if isinstance(key, tuple) else key
        return dequantized(self._blocks[experts], self._scales[experts])


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [E, I, O] in bfloat16, contiguous."""
    values = torch.tensor(_VALUES)
    numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - _BIAS)
    return scaled.flatten(-2).to(torch.bfloat16).transpose(1, 2).contiguous()
