"""Numbers as exports hold them: FP8 in blocks, MLX's groups, GGML's types; written, and read back.

Shapes: O outputs and I inputs of a weight, or of some of its rows.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from activities.models.gguf_names import swapped
from shared.models.merging import FP8_BLOCK, ITEM_BYTES, Entry, Floats, bytes_of, floats_of

MLX_GROUP = 64
_FP8_LARGEST = np.float32(448)
Parts = tuple[bytes, ...]


class Written(NamedTuple):
    """A tensor of an output file: its name, safetensors' name of its type, its shape; or a GGUF file's, by GGML's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def written(name: str, dtype: str, *shape: int) -> Written:
    return Written(name, dtype, shape, prod(shape) * ITEM_BYTES[dtype])


# Each encoding has:
#   rows: it takes rows in multiples of this number;
#   error: the greatest error of a decoded number, as a share of the largest number of its rows;
#   tensors: the tensors written for a weight; encode: each one's bytes, for some rows; decode: the rows of such bytes.


class Fp8:
    """E4M3 with a float32 scale for each block of 128 by 128, as DeepSeek-V3 and Qwen3 publish: w = code * scale."""

    rows = FP8_BLOCK
    error = float(17 / _FP8_LARGEST)  # half a step between the largest numbers is 16; products are rounded

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        scales = written(f"{entry.name}_scale_inv", "F32", *(size // FP8_BLOCK for size in entry.shape))
        return written(entry.name, "F8_E4M3", *entry.shape), scales

    def encode(self, rows_OI: Floats) -> Parts:
        blocks = _blocks(rows_OI)
        scales = np.maximum(np.abs(blocks).max(axis=(1, 3)) / _FP8_LARGEST, np.float32(1e-30))
        return _e4m3(blocks / scales[:, None, :, None]).tobytes(), scales.tobytes()

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        blocks = _blocks(_E4M3[np.frombuffer(parts[0], np.uint8)].reshape(-1, num_inputs))
        scales = np.frombuffer(parts[1], np.float32).reshape(-1, num_inputs // FP8_BLOCK)
        return (blocks * scales[:, None, :, None]).reshape(-1, num_inputs)


def _blocks(rows_OI: Floats) -> Floats:
    return rows_OI.reshape(len(rows_OI) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """Round numbers to E4M3, to the nearest, to even between two, and to 448 at most."""
    magnitude = np.minimum(np.abs(values), _FP8_LARGEST)
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = np.rint(magnitude * 2**9)  # below 2**-6 the steps are of 2**-9
    sign = (values.view(np.uint32) >> 24) & 0x80
    return (sign + np.where(magnitude < 2**-6, small, normal)).astype(np.uint8)


def _e4m3_values() -> Floats:
    exponent, mantissa = np.arange(128) >> 3, np.arange(128) & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3_values()


@dataclass(frozen=True)
class Mlx:
    """Codes of 4 or 8 bits in words of 32, with a scale and a bias for each group of 64: w = code * scale + bias."""

    bits: int
    dtype: str

    rows = 1

    @property
    def error(self) -> float:
        return 1.1 / (2**self.bits - 1) + 2**-7  # half a step of twice the largest; scale and bias are rounded

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        stem, (num_rows, num_inputs) = entry.name.removesuffix(".weight"), entry.shape
        groups = (written(f"{stem}.{part}", self.dtype, num_rows, num_inputs // MLX_GROUP) for part in _MLX_PARTS)
        return written(entry.name, "U32", num_rows, num_inputs * self.bits // 32), *groups

    def encode(self, rows_OI: Floats) -> Parts:
        groups, largest = rows_OI.reshape(-1, MLX_GROUP), 2**self.bits - 1
        bias = bytes_of(groups.min(1), self.dtype)
        low = floats_of(bias, self.dtype, "")  # codes are relative to the stored bias
        scale = bytes_of(np.maximum((groups.max(1) - low) / np.float32(largest), np.float32(1e-7)), self.dtype)
        codes = np.rint((groups - low[:, None]) / floats_of(scale, self.dtype, "")[:, None])
        words = np.clip(codes, 0, largest).astype(np.uint32).reshape(-1, 32 // self.bits) << self._shifts
        return words.sum(1, dtype=np.uint32).tobytes(), scale, bias

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        codes = (np.frombuffer(parts[0], np.uint32)[:, None] >> self._shifts) & np.uint32(2**self.bits - 1)
        scale, bias = (floats_of(part, self.dtype, "")[:, None] for part in parts[1:])
        return (codes.reshape(-1, MLX_GROUP) * scale + bias).astype(np.float32).reshape(-1, num_inputs)

    @property
    def _shifts(self) -> NDArray[np.uint32]:
        return np.arange(0, 32, self.bits, dtype=np.uint32)


_MLX_PARTS = ("scales", "biases")


@dataclass(frozen=True)
class Ggml:
    """A type of GGML, by the `gguf` package: `F32`, `F16`, `BF16` or `Q8_0`.

    `head_size`: of queries and keys of Llama, whose rotated pairs GGUF holds side by side; 0 for other weights.
    """

    name: str
    type: str
    head_size: int = 0

    @property
    def rows(self) -> int:
        return self.head_size or 1

    @property
    def error(self) -> float:
        return {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.51 / 127 + 2**-11}[self.type]

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        return (Written(self.name, self.type, entry.shape, prod(entry.shape[:-1]) * self._row_bytes(entry.shape[-1])),)

    def encode(self, rows_OI: Floats) -> Parts:
        from gguf import GGMLQuantizationType, quantize

        return (quantize(swapped(rows_OI, 2, self.head_size), GGMLQuantizationType[self.type]).tobytes(),)

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        from gguf import GGMLQuantizationType, dequantize

        data = np.frombuffer(parts[0], np.uint8).reshape(-1, self._row_bytes(num_inputs))
        return swapped(dequantize(data, GGMLQuantizationType[self.type]), self.head_size // 2, self.head_size)

    def _row_bytes(self, num_inputs: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        items, item_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return num_inputs // items * item_bytes


Encoding = Fp8 | Mlx | Ggml
