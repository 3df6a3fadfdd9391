"""Numbers as exports hold them: FP8 in blocks, MLX's groups, GGML's types. Each is read back as it was written.

Shapes: O outputs and I inputs of a weight, or of whole rows of it.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.models.merging import Entry, Floats, bytes_of, floats_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FP8_BLOCK = 128
MLX_GROUP = 64
_FP8_LARGEST = 448.0
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U32": 4}
Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class Written:
    """A tensor of an output file: its name, safetensors' name of its type, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


class Encoding(Protocol):
    """A way to write one weight."""

    @property
    def rows(self) -> int:
        """Rows are encoded in multiples of this number."""
        ...

    @property
    def error(self) -> float:
        """What a number that is read back may be off, as a share of the largest of its rows."""
        ...

    def encode(self, rows_OI: Floats) -> Parts:
        """Return the bytes of each tensor that is written, for some rows."""
        ...

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        """Return the rows that such bytes stand for."""
        ...


class Fp8:
    """E4M3 with a float32 scale for each block of 128 by 128, as DeepSeek-V3 and Qwen3 publish: w = code * scale."""

    rows = FP8_BLOCK
    error = 16 / _FP8_LARGEST  # half a step between the largest numbers

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        blocks = tuple(size // FP8_BLOCK for size in entry.shape)
        return Written(entry.name, "F8_E4M3", entry.shape), Written(f"{entry.name}_scale_inv", "F32", blocks)

    def encode(self, rows_OI: Floats) -> Parts:
        blocks = _blocks(rows_OI)
        scales = np.abs(blocks).max(axis=(1, 3)) / np.float32(_FP8_LARGEST)
        scales[scales == 0] = 1
        codes = _e4m3(blocks / scales[:, None, :, None])
        return codes.reshape(rows_OI.shape).tobytes(), scales.tobytes()

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        values = _E4M3[np.frombuffer(parts[0], np.uint8)].reshape(-1, num_inputs)
        scales = np.frombuffer(parts[1], np.float32).reshape(-1, num_inputs // FP8_BLOCK)
        return (_blocks(values) * scales[:, None, :, None]).reshape(values.shape)


def _blocks(rows_OI: Floats) -> Floats:
    return rows_OI.reshape(len(rows_OI) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """Round numbers of at most 448 to E4M3, to the nearest, and to even between two."""
    sign = (values.view(np.uint32) >> 24).astype(np.uint8) & 0x80
    magnitude = np.minimum(np.abs(values), np.float32(_FP8_LARGEST))
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = np.rint(magnitude * 2**9).astype(np.uint32)  # below 2**-6 the steps are of 2**-9
    return np.bitwise_or(sign, np.where(magnitude < 2**-6, small, normal).astype(np.uint8), dtype=np.uint8)


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 0xF, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


_E4M3 = _e4m3_values()


@dataclass(frozen=True)
class Mlx:
    """Codes of 4 or 8 bits in words of 32, with a scale and a bias for each group of 64: w = code * scale + bias."""

    bits: int
    dtype: str

    rows = 1

    @property
    def error(self) -> float:
        return 1.1 / (2**self.bits - 1) + (2**-7 if self.dtype == "BF16" else 2**-10)  # of the range, and of a bias

    def tensors(self, entry: Entry) -> tuple[Written, ...]:
        num_rows, num_inputs = entry.shape
        stem = entry.name.removesuffix(".weight")
        groups = (num_rows, num_inputs // MLX_GROUP)
        return (
            Written(entry.name, "U32", (num_rows, num_inputs * self.bits // 32)),
            Written(f"{stem}.scales", self.dtype, groups),
            Written(f"{stem}.biases", self.dtype, groups),
        )

    def encode(self, rows_OI: Floats) -> Parts:
        groups = rows_OI.reshape(-1, MLX_GROUP)
        largest = 2**self.bits - 1
        bias = bytes_of(groups.min(1), self.dtype)
        low = floats_of(bias, self.dtype, "")  # codes are counted from the bias as it is stored
        step = np.maximum((groups.max(1) - low) / np.float32(largest), np.float32(1e-7))
        scale = bytes_of(step, self.dtype)
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


@dataclass(frozen=True)
class Ggml:
    """A type of GGML, by the `gguf` package.

    Args:
        type_name: `F32`, `F16`, `BF16` or `Q8_0`.
        head_size: of queries and keys of Llama: GGUF holds their rotated pairs side by side; 0 for other weights.
    """

    type_name: str
    head_size: int = 0

    @property
    def rows(self) -> int:
        return self.head_size or 1

    @property
    def error(self) -> float:
        return {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.51 / 127 + 2**-11}[self.type_name]

    @cached_property
    def type(self) -> "GGMLQuantizationType":
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.type_name]

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        from gguf import GGML_QUANT_SIZES

        items, item_bytes = GGML_QUANT_SIZES[self.type]
        return prod(shape) // items * item_bytes

    def encode(self, rows_OI: Floats) -> Parts:
        from gguf import quantize

        if self.head_size:
            halves = rows_OI.reshape(-1, 2, self.head_size // 2, rows_OI.shape[-1])
            rows_OI = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows_OI.shape)
        return (quantize(rows_OI, self.type).tobytes(),)

    def decode(self, parts: Parts, num_inputs: int) -> Floats:
        from gguf import GGML_QUANT_SIZES, dequantize

        items, item_bytes = GGML_QUANT_SIZES[self.type]
        data = np.frombuffer(parts[0], np.uint8).reshape(-1, num_inputs // items * item_bytes)
        rows_OI: Floats = dequantize(data, self.type)
        if self.head_size:
            pairs = rows_OI.reshape(-1, self.head_size // 2, 2, num_inputs)
            rows_OI = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, num_inputs)
        return rows_OI
