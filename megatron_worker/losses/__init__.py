"""Losses: sums over a bin's targets. One file each; `loss_function` chooses."""

from megatron_worker.engine import LossFunction
from megatron_worker.losses import cross_entropy
from shared.jobs import CrossEntropy, Loss


def loss_function(loss: Loss) -> LossFunction:
    match loss:
        case CrossEntropy():
            return cross_entropy.LOSS
