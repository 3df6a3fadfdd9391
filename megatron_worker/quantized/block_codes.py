"""Numbers as codes of 4 or 8 bits. Those of a block share a scale, which is the largest magnitude among them.

- `nf4` (Dettmers et al. 2023, arXiv:2305.14314, appendix E): 16 quantiles of a normal distribution, blocks of 64.
- `int8`: 255 equal steps, a row is a block.
- `fp8`: E4M3 (Micikevicius et al. 2022, arXiv:2209.05433), blocks of 128.

Blocks lie within a row, so that a row's codes do not depend on the rows beside it: whichever linears are fused, and
however ranks share rows out. A row that is shorter than a block is one; a row's last block is filled up with zeros.

Shape suffixes: O rows and I columns of a matrix, B blocks of a row, S numbers of a block, P bytes of a row's codes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.training import Quantization

_CHUNK = 1 << 22  # numbers that are held as float32 copies at a time, in addition to the matrix
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class BlockCode:
    """A way to code numbers, float32 from -1 to 1.

    Args:
        size: numbers of a block; None: a row.
        per_byte: codes of a byte.
        encode: their codes, uint8; the last dimension is `per_byte` times shorter.
        decode: the numbers of codes, float32.
        least: the smallest scale.
    """

    size: int | None
    per_byte: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    least: float = torch.finfo(torch.float32).tiny  # below it, float32 loses digits

    def shapes(self, num_rows: int, num_columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of a matrix's codes, [O, P], and of its scales, [O, B]."""
        size = min(self.size or num_columns, num_columns + num_columns % self.per_byte)
        num_blocks = -(-num_columns // size)
        return (num_rows, num_blocks * size // self.per_byte), (num_rows, num_blocks)

    def pack(self, matrix_OI: Tensor, code_OP: Tensor, scale_OB: Tensor) -> None:
        """Write a matrix's codes (uint8) and scales (float32)."""
        num_blocks, width = scale_OB.shape[1], code_OP.shape[1] * self.per_byte
        for some_oI, code_oP, scale_oB in _chunks(width, matrix_OI, code_OP, scale_OB):
            number_oBS = F.pad(some_oI.float(), (0, width - some_oI.shape[1])).unflatten(1, (num_blocks, -1))
            scale_oB.copy_(number_oBS.abs().amax(dim=-1).clamp_min(self.least))
            code_oP.copy_(self.encode(number_oBS / scale_oB[..., None]).flatten(1))

    def unpack(self, code_OP: Tensor, scale_OB: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix, [O, I]; each number is a code's times its scale in float32, then rounded to `dtype`."""
        num_blocks, width = scale_OB.shape[1], code_OP.shape[1] * self.per_byte
        made_OX = code_OP.new_empty(len(code_OP), width, dtype=dtype)
        for made_oX, code_oP, scale_oB in _chunks(width, made_OX, code_OP, scale_OB):
            number_oBS = self.decode(code_oP).unflatten(1, (num_blocks, -1))
            made_oX.copy_(number_oBS.mul_(scale_oB[..., None]).flatten(1))
        return made_OX[:, :num_columns]


def _chunks(width: int, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all matrices, a few at a time."""
    return zip(*(matrix.split(max(1, _CHUNK // width)) for matrix in matrices), strict=True)


@cache
def _table(values: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rising values, and the middles between them; float32."""
    exact = torch.tensor(values, dtype=torch.float64)
    return exact.float().to(device), ((exact[1:] + exact[:-1]) / 2).float().to(device)


@cache
def _pairs(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the two numbers of each byte, the first in its upper half: [256, 2]."""
    byte = torch.arange(256)
    return torch.tensor(values)[torch.stack([byte >> 4, byte & 15], dim=1)].to(device)


def nearest(number: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return which of some rising values, 256 at most, is nearest: uint8; of two the lower one."""
    return torch.bucketize(number, _table(values, number.device)[1], out_int32=True).to(torch.uint8)


def _encode_nf4(number: Tensor) -> Tensor:
    code = nearest(number, _NF4)
    return code[..., ::2] << 4 | code[..., 1::2]


def _decode_nf4(code: Tensor) -> Tensor:
    return _pairs(_NF4, code.device)[code.int()].flatten(-2)


def code_of_values(size: int, values: tuple[float, ...], least: float) -> BlockCode:
    """Return the code of numbers by the nearest of some rising values, 256 at most; -1 or 1 is among them."""
    return BlockCode(
        size, 1, partial(nearest, values=values), lambda code: _table(values, code.device)[0][code.int()], least
    )


_STEPS, _E4M3_MAX = 127, 448
CODES: dict[Quantization, BlockCode] = {
    "nf4": BlockCode(64, 2, _encode_nf4, _decode_nf4),
    "int8": BlockCode(
        None,
        1,
        lambda number: (number * _STEPS).round().to(torch.int8).view(torch.uint8),
        lambda code: code.view(torch.int8).float() / _STEPS,
    ),
    "fp8": BlockCode(
        128,
        1,
        lambda number: (number * _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8),
        lambda code: code.view(torch.float8_e4m3fn).float() / _E4M3_MAX,
    ),
}
