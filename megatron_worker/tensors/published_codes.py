"""Weights that published checkpoints hold as codes with scales, read as numbers.

- MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3): 32 numbers of 4 bits share an exponent. gpt-oss holds a
  tensor of experts, [E, I, O], as `<name>_blocks`, uint8 [E, O, I / 32, 16] with the earlier of two numbers in the
  lower bits, and `<name>_scales`, uint8 [E, O, I / 32]. All its numbers are exact in bfloat16.
- FP8 (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2): E4M3 codes [..., O, I] of the tensor's own name, and floats
  `<name>_scale_inv`, [..., ceil(O / 128), ceil(I / 128)]. A number is its code times the scale of its block.
"""

from typing import Any

import torch
from torch import Tensor

from shared.models.merging import FP8_BLOCK

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BIAS = 127  # of the exponents


class Mxfp4Slice:
    """A substitute for safetensors' lazy tensor, to read any of its experts; in bfloat16."""

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


class Fp8Slice:
    """A substitute for safetensors' lazy tensor, to read any part of it; in float32, and written in bfloat16."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self._codes, self._scales = codes, scales

    def get_shape(self) -> list[int]:
        shape: list[int] = self._codes.get_shape()
        return shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, key: Any) -> Tensor:
        shape = self.get_shape()
        keys = [*(key if isinstance(key, tuple) else (key,)), *[slice(None)] * len(shape)][: len(shape)]
        number = self._codes[tuple(keys)].float()
        spans = [range(*own.indices(size)) for own, size in zip(keys[-2:], shape[-2:], strict=True)]
        blocks = [slice(span.start // FP8_BLOCK, -(-span.stop // FP8_BLOCK)) for span in spans]
        scale = self._scales[(*keys[:-2], *blocks)].float()
        rows, columns = (torch.arange(s.start, s.stop) // FP8_BLOCK - s.start // FP8_BLOCK for s in spans)
        scale = scale.index_select(-1, columns)
        for place, own in enumerate(number.split(rows.bincount().tolist(), dim=-2)):  # no copy of the whole size
            own *= scale[..., place, None, :]
        return number


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [E, I, O] in bfloat16, contiguous."""
    values = torch.tensor(_VALUES)
    numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - _BIAS)
    return scaled.flatten(-2).to(torch.bfloat16).transpose(1, 2).contiguous()
