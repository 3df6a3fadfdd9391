"""AdamW, Muon, and groups of weights with rates of their own."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.training import Muon, Optimizer
from shared.families.tensor_slices import TensorSlice

# --- AdamW's update on flat float32 tensors, for every engine's optimizer once gradients are summed ---
#
# Update (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, the decay scaled by the learning rate):
#
#     m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
#     w = (1 - lr * decay) w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

_CHUNK = 1 << 18  # elements: five float32 chunks stay in cache while they are updated


@dataclass(frozen=True)
class Rates:
    """The rates of a step for some weights. `by_muon`: Muon updates them, else
    AdamW."""

    learning_rate: float
    weight_decay: float
    by_muon: bool = False


def adamw_update(
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


# --- Muon ---
# Jordan et al. 2024, kellerjordan.github.io/posts/muon: momentum, and its direction made orthogonal.
#
#     m = mu m + (1 - mu) g      d = mu m + (1 - mu) g (Nesterov), or m
#     w = (1 - lr * decay) w - lr * scale * NS(d)
#
# NS is the quintic Newton-Schulz iteration: of d = U S V^T it makes about U V^T. It is of whole matrices, so that
# ranks which split one have to bring it together.

_A, _B, _C = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7


def direct(grad: Tensor, mean: Tensor, square: Tensor, muon: Muon) -> None:
    """Replace the gradient by the step's direction. All are flat, float32 and of one length.

    The second moment is updated too, so that a client may switch to AdamW.
    """
    square.mul_(muon.beta2).addcmul_(grad, grad, value=1 - muon.beta2)
    mean.lerp_(grad, 1 - muon.momentum)
    if muon.nesterov:
        grad.lerp_(mean, muon.momentum)
    else:
        grad.copy_(mean)


def step_of(direction: Tensor, muon: Muon, dtype: torch.dtype) -> Tensor:
    """Return the step, float32, of whole matrices [..., rows, columns]. `dtype`: what products are computed in."""
    rows, columns = direction.shape[-2:]
    is_like_adamw = muon.scale == "match_rms_adamw"
    scale = 0.2 * math.sqrt(max(rows, columns)) if is_like_adamw else math.sqrt(max(1, rows / columns))
    return orthogonal(direction, muon.newton_schulz_steps, dtype).float() * scale


def orthogonal(direction: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Return the matrices [..., rows, columns] with singular values near 1, by Newton-Schulz. Zeros stay zeros."""
    is_tall = direction.shape[-2] > direction.shape[-1]
    x = direction.reshape(-1, *direction.shape[-2:]).to(dtype)
    x = x.mT if is_tall else x  # products of the smaller of both sizes
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if is_tall else x).reshape(direction.shape)


# --- Groups ---
# Groups of weights, which an optimizer gives other learning rates, decay or updates; the update of flat tensors.

_OF_LAYER = re.compile(r"\.\d+\.|\.lora_[AB]\.")
_EMBEDDING = re.compile(r"embed(?!_out)|\bwte\b|\bwpe\b")


@dataclass(frozen=True)
class Group:
    """`is_layers`: matrices of layers and of adapters. `is_matrix`: all but vectors, embeddings. `is_b`: LoRA's B."""

    is_layers: bool = False
    is_matrix: bool = False
    is_b: bool = False


def groups_of(slices: Sequence[TensorSlice]) -> dict[str, Group]:
    """Return the groups of parameters."""
    groups = {}
    for s in slices:
        num_dimensions, of_layer = len(s.shape) - s.is_stack, _OF_LAYER.search(s.name) is not None
        is_matrix = num_dimensions > 1 and (of_layer or not _EMBEDDING.search(s.name))
        groups[s.parameter] = Group(num_dimensions == 2 and of_layer, is_matrix, ".lora_B." in s.name)
    return groups


def rates_of(group: Group, optimizer: Optimizer, learning_rate: float) -> Rates:
    return Rates(
        learning_rate * (optimizer.lora_plus_ratio if group.is_b else 1.0),
        optimizer.weight_decay if optimizer.decay == "all" or group.is_matrix else 0.0,
        group.is_layers and isinstance(optimizer, Muon),
    )


def step_matrix(weight: Tensor, made: Tensor, rates: Rates) -> None:
    """Take a step that `muon.step_of` has made, in place."""
    weight.mul_(1 - rates.learning_rate * rates.weight_decay).add_(made, alpha=-rates.learning_rate)


def update(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, optimizer: Optimizer, rates: Rates, step: int
) -> None:
    """Do step number `step` of flat float32 tensors, in place; of Muon's only what comes before `step_of`."""
    if isinstance(optimizer, Muon) and rates.by_muon:
        direct(grad, mean, square, optimizer)
    else:
        adamw_update(weight, grad, mean, square, optimizer, rates, step)
