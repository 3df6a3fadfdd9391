"""Muon, LoRA+ and groups of decay in plain torch, for a model whose parameters have their names."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longshore.training import Optimizer
from tests.megatron_worker.rows import Row, reference_loss


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """Jordan's quintic iteration, an element of its polynomial at a time."""
    x = matrix / (matrix.norm() + 1e-30)
    for _ in range(num_steps):
        symmetric = x @ x.T
        x = 3.4445 * x - 4.7750 * symmetric @ x + 2.0315 * symmetric @ symmetric @ x
    return x


def is_of_layer(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and (".layers." in name or ".lora_" in name)


class Reference:
    """Steps of `optimizer`. Muon's are of whole matrices, in the parameters' dtype."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        self.named, self.optimizer, self.count = [(n, p) for n, p in named if p.requires_grad], optimizer, 0
        self.states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.named}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        o, self.count = self.optimizer, self.count + 1
        if o.clip_norm:
            nn.utils.clip_grad_norm_([p for _, p in self.named], o.clip_norm)
        for name, p in self.named:
            rate = learning_rate * (o.lora_plus_ratio if ".lora_B" in name else 1)
            decays = o.decay == "all" or (p.ndim >= 2 and "embed" not in name)
            p *= 1 - rate * (o.weight_decay if decays else 0)
            mean, square = self.states[name]
            if o.kind == "muon" and is_of_layer(name, p):
                mean.copy_(o.momentum * mean + (1 - o.momentum) * p.grad)
                direction = o.momentum * mean + (1 - o.momentum) * p.grad if o.nesterov else mean
                sizes = p.shape
                scale = (
                    0.2 * math.sqrt(max(sizes)) if o.scale == "match_rms_adamw" else max(1, sizes[0] / sizes[1]) ** 0.5
                )
                p -= rate * scale * orthogonal(direction, o.newton_schulz_steps)
            else:
                mean.copy_(o.beta1 * mean + (1 - o.beta1) * p.grad)
                square.copy_(o.beta2 * square + (1 - o.beta2) * p.grad**2)
                corrected = (square / (1 - o.beta2**self.count)).sqrt() + o.eps
                p -= rate * mean / (1 - o.beta1**self.count) / corrected
            p.grad = None


def train(model: Any, steps: Sequence[Sequence[Row]], optimizer: Optimizer, learning_rate: float) -> None:
    reference = Reference(list(model.named_parameters()), optimizer)
    for rows in steps:
        reference_loss(model, rows).backward()
        reference.step(learning_rate)
