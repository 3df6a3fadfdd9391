"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, and its direction made orthogonal.

    m = mu m + (1 - mu) g      d = mu m + (1 - mu) g (Nesterov), or m
    w = (1 - lr * decay) w - lr * scale * NS(d)

NS is the quintic Newton-Schulz iteration: of d = U S V^T it makes about U V^T. It is of whole matrices, so that ranks
which split one have to bring it together.
"""

import math

import torch
from torch import Tensor

from longshore.training import Muon

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
