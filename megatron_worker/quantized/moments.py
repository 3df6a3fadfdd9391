"""AdamW's moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), in blocks of 64.

Codes are those of the paper's dynamic tree: a power of ten from 1 to 1e-6, a fraction with the remaining bits and, for
the first moment, a sign; here the upper ends of a fraction's steps, so that 1 is among them. The second moment is coded
as its root: both moments are then as small as gradients, and neither is zero if the other is not. Tensors of a flat
buffer, and ranks' shares of it, begin at multiples of 64, so no block spans two tensors. A checkpoint has moments in
float32, whatever the layout; encoding decoded moments gives the same codes, so no bit is lost.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.training import Optimizer
from megatron_worker.optimizers.adamw import Rates
from megatron_worker.optimizers.groups import update
from megatron_worker.quantized.block_codes import code_of_values
from megatron_worker.quantized.tensors import QuantizedTensors

_BLOCK, _CHUNK = 64, 1 << 18
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
        for w, g in zip(weight.split(_CHUNK), grad.split(_CHUNK), strict=True):
            m, v = (moment.read(start, start + len(w)) for moment in (mean, square))
            update(w, g, m, v, optimizer, rates, step)
            mean.write(m, start)
            square.write(v, start)
            start += len(w)
