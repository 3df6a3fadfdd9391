"""Weights in 4 and 8 bits, products with them, and AdamW's moments in 8 bits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.training import Optimizer, Quantization
from megatron_worker.offload import Flat
from megatron_worker.optimizers import Rates, update

# --- Numbers as codes of 4 or 8 bits ---
# Those of a block share a scale, which is the largest magnitude among them.
#
# - `nf4` (Dettmers et al. 2023, arXiv:2305.14314, appendix E): 16 quantiles of a normal distribution, blocks of 64.
# - `int8`: 255 equal steps, a row is a block.
# - `fp8`: E4M3 (Micikevicius et al. 2022, arXiv:2209.05433), blocks of 128.
#
# Blocks lie within a row, so that a row's codes do not depend on the rows beside it: whichever linears are fused, and
# however ranks share rows out. A row that is shorter than a block is one; a row's last block is filled up with zeros.
#
# Shape suffixes: O rows and I columns of a matrix, B blocks of a row, S numbers of a block, P bytes of a row's codes.

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


# --- Tensors ---
# Tensors that are held as codes and scales, with the rows' blocks along the last dimension.
#
# Shape suffixes: O rows, P bytes of a row's codes, B blocks of a row.


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


# --- Frozen weights that are held as codes, and products with them ---
#
# A weight is decoded for a product and freed after it, in the forward and in the backward: a pass keeps none of it,
# and the gradient of the input is that of the product that was computed.
#
# Shape suffixes: T tokens, I input features, O output features.


class WholeWeights(dict[str, Any]):
    """Parameters by name, plain ones first; quantized ones are made whole whenever they are looked up."""

    def __getitem__(self, name: str) -> Tensor:
        return whole(super().__getitem__(name))


def whole(weight: Tensor | QuantizedTensor) -> Tensor:
    """Return the weight that is multiplied by."""
    return weight if isinstance(weight, Tensor) else weight.whole()


def quantized_linear(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias_O: Tensor | None,
    forward_group: dist.ProcessGroup | None = None,
    backward_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Apply a frozen linear, its weight [O, I]. The output, or the input's gradient, is summed over a group."""
    output: Tensor = _Linear.apply(x, lambda: whole(weight), bias_O, forward_group, backward_group)
    return output


def quantized_product(bias_O: Tensor, x_TI: Tensor, weight: QuantizedTensor) -> Tensor:
    """Return x W + bias, as torch.addmm does with a weight [I, O]."""
    output_TO: Tensor = _Linear.apply(x_TI, lambda: weight.whole().t(), bias_O, None, None)
    return output_TO


class _Linear(torch.autograd.Function):
    """y = x W^T + bias, both frozen. `matrix` makes W, [O, I]; of all that only the input's gradient is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Callable[[], Tensor],
        bias_O: Tensor | None,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.matrix, ctx.group = matrix, backward_group
        output = F.linear(x, matrix(), bias_O)
        if forward_group is not None:
            dist.all_reduce(output, group=forward_group)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad @ ctx.matrix()
        if ctx.group is not None:
            dist.all_reduce(grad_x, group=ctx.group)
        return grad_x, None, None, None, None


# --- AdamW's moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), in blocks of 64 ---
#
# Codes are those of the paper's dynamic tree: a power of ten from 1 to 1e-6, a fraction with the remaining bits and,
# for the first moment, a sign; here the upper ends of a fraction's steps, so that 1 is among them. The second moment
# is coded as its root: both moments are then as small as gradients, and neither is zero if the other is not. Tensors
# of a flat buffer, and ranks' shares of it, begin at multiples of 64, so no block spans two tensors. A checkpoint has
# moments in float32, whatever the layout; encoding decoded moments gives the same codes, so no bit is lost.

_BLOCK, _MOMENTS_CHUNK = 64, 1 << 18
_LEAST = 2.0**-50  # the least scale: squares of its block's smallest numbers still differ in float32


def _magnitudes(bits: int) -> list[float]:
    """Return those above zero, rising: 2^bits up to 1, half as many up to a tenth, and so on."""
    parts = [(power, part / 2 ** (bits - power)) for power in range(7) for part in range(1, 2 ** (bits - power) + 1)]
    return sorted(10.0**-power * (0.1 + 0.9 * fraction) for power, fraction in parts)


_SIGNED = (*(-value for value in reversed(_magnitudes(6))), 0.0, *_magnitudes(6))
_UNSIGNED = (0.0, *_magnitudes(7))
_CODES = {is_square: code_of_values(_BLOCK, values, _LEAST) for is_square, values in enumerate((_SIGNED, _UNSIGNED))}


class CodedMoment:
    """A moment of `num_weights` flat weights, a multiple of 64. Zeros at first. `is_square`: the second one."""

    def __init__(self, num_weights: int, is_square: bool, device: torch.device) -> None:
        shapes = {"moment": (num_weights // _BLOCK, _BLOCK)}
        held = QuantizedTensors(_CODES[is_square], shapes, torch.float32, device)
        self.flats, self._held, self._is_square = held.flats, held["moment"], is_square

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the numbers from `start` on, a multiple of 64, up to `stop`: flat, float32."""
        number = self._held.rows(start // _BLOCK, stop and stop // _BLOCK).whole().view(-1)
        return number.square_() if self._is_square else number

    def write(self, number: Tensor, start: int = 0) -> None:
        """Hold the codes of numbers from `start` on."""
        coded = number.sqrt() if self._is_square else number
        first = start // _BLOCK
        self._held.rows(first, first + len(number) // _BLOCK).store(coded.view(-1, _BLOCK))


def update_coded(
    parts: Sequence[tuple[Tensor, Tensor, Rates]],
    mean: CodedMoment,
    square: CodedMoment,
    optimizer: Optimizer,
    step: int,
) -> None:
    """Do a step of weights, gradients: moments lie one after another, and a few are in float32 at a time."""
    start = 0
    for weight, grad, rates in parts:
        for w, g in zip(weight.split(_MOMENTS_CHUNK), grad.split(_MOMENTS_CHUNK), strict=True):
            m, v = (moment.read(start, start + len(w)) for moment in (mean, square))
            update(w, g, m, v, optimizer, rates, step)
            mean.write(m, start)
            square.write(v, start)
            start += len(w)
