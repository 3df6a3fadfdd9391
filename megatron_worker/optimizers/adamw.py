"""AdamW's update on flat float32 tensors, for every engine's optimizer once gradients are summed.

Update (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, the decay scaled by the learning rate):

    m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
    w = (1 - lr * decay) w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.training import Optimizer

_CHUNK = 1 << 18  # elements: five float32 chunks stay in cache while they are updated


@dataclass(frozen=True)
class Rates:
    """The rates of a step for some weights. `by_muon`: Muon updates them (optimizers/muon.py), else AdamW."""

    learning_rate: float
    weight_decay: float
    by_muon: bool = False


def update(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, adam: Optimizer, rates: Rates, step: int
) -> None:
    """Do step number `step`, counted from 1, in place. All tensors are flat, float32 and of one length."""
    correction1 = 1 - adam.beta1**step
    correction2 = math.sqrt(1 - adam.beta2**step)
    for w, g, m, v in zip(*(x.split(_CHUNK) for x in (weight, grad, mean, square)), strict=True):
        w.mul_(1 - rates.learning_rate * rates.weight_decay)
        m.lerp_(g, 1 - adam.beta1)
        v.mul_(adam.beta2).addcmul_(g, g, value=1 - adam.beta2)
        scale = v.sqrt().div_(correction2).add_(adam.eps)
        w.addcdiv_(m, scale, value=-rates.learning_rate / correction1)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares, a float64 scalar, added up in float64 a chunk at a time."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in tensor.split(_CHUNK):
        total += torch.linalg.vector_norm(chunk, dtype=torch.float64) ** 2
    return total
