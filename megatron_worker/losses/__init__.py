"""Losses: sums over a bin's targets. One file each; `loss_function` chooses."""

from megatron_worker.engine import LossFunction
from megatron_worker.losses import cross_entropy
from megatron_worker.losses.dpo import dpo_loss
from megatron_worker.losses.policy import policy_loss
from shared.jobs.job import DPO, CrossEntropy, Loss


def loss_function(loss: Loss, temperature: float = 1.0) -> LossFunction:
    """`temperature`: what a policy's logits are divided by; the other losses know none."""
    match loss:
        case CrossEntropy():
            return cross_entropy.LOSS
        case DPO():
            return dpo_loss(loss)
        case _:
            return policy_loss(loss, temperature)
