"""The activations of MLPs and of experts."""

import torch.nn.functional as F
from torch import Tensor

from shared.families.architecture import Activation, ClampedGate


def activate(made: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    """Return the input of an MLP's last linear: the activation of the first linear's outputs or, if it is gated, of
    their first half, times the second half."""
    gate, up = made.chunk(2, dim=-1) if is_gated else (made, None)
    match activation:
        case "silu":
            active = F.silu(gate)
        case "relu2":
            active = F.relu(gate).square()
        case "gelu_tanh":
            active = F.gelu(gate, approximate="tanh")
    return active if up is None else active * up


def clamped_gate(by: ClampedGate, gate: Tensor, up: Tensor) -> Tensor:
    """Return the product of gate and up that ClampedGate describes."""
    gate = gate.clamp(max=by.limit)
    return (up.clamp(-by.limit, by.limit) + 1) * gate * (by.alpha * gate).sigmoid()
