"""Weighted negative log-likelihood: the sum of -w log p(label), which the step divides by its sum of w."""

from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.sums import LossSums


def cross_entropy_sums(scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin. Labels of weight 0 count for nothing, even if their log-probability is -inf."""
    assert scores.logprob_N is not None
    loss_N = (-batch.weight_N * scores.logprob_N).masked_fill(batch.weight_N == 0, 0.0)
    return LossSums(loss=loss_N.sum(), weight=batch.weight_N.sum())


def cross_entropy_loss(temperature: float) -> LossFunction:
    """`temperature`: what logits are divided by."""
    return LossFunction(Outputs(temperature=temperature), cross_entropy_sums)
