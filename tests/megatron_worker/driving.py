"""Driving an engine as the runner does, but one call at a time."""

from collections.abc import Sequence

import torch

from longshore.losses import CrossEntropy
from longshore.training import Adam
from megatron_worker.losses import loss_function
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.rows import Row, bin_of, empty_bin, total_weight

LOSS = loss_function(CrossEntropy())
ADAM = Adam(weight_decay=0.01, clip_norm=1.0)
LEARNING_RATE = 3e-3


def accumulate(engine: Engine, bins: Sequence[Sequence[Row]]) -> float:
    """Gradients of a step's bins, dealt round the data-parallel ranks. Returns the mean loss over all ranks."""
    zero = torch.zeros((), dtype=torch.float64)
    sums = {"loss": zero, "weight": zero}
    dp_rank, dp_size = engine.facts.dp_rank, engine.facts.dp_size
    for turn in range(-(-len(bins) // dp_size)):
        own = bins[turn * dp_size :][dp_rank : dp_rank + 1]
        for name, value in engine.forward_backward(bin_of(own[0]) if own else empty_bin(), LOSS).items():
            sums[name] = sums[name] + value.double()
    reduced = engine.reduce(sums)
    return reduced["loss"] / reduced["weight"]


def train(
    engine: Engine, steps: Sequence[Sequence[Sequence[Row]]], adam: Adam = ADAM, learning_rate: float = LEARNING_RATE
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    history = []
    for bins in steps:
        loss = accumulate(engine, bins)
        norms = engine.optim_step(adam, learning_rate, total_weight([row for rows in bins for row in rows]))
        history.append((loss, norms.grad_norm))
    return history
