"""Distillation: the sum of w D, which the step divides by its sum of w. Divergences: head/distributions.py."""

from longshore.losses import Distillation
from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.sums import LossSums
from megatron_worker.teachers import Divergence


def distillation_loss(loss: Distillation, temperature: float) -> LossFunction:
    """`temperature`: what the logits of both are divided by."""
    divergence = Divergence(loss.divergence, loss.mixed, loss.tokens)
    return LossFunction(Outputs(temperature=temperature, divergence=divergence), _sums)


def _sums(scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin. `nll`: of the labels; targets of weight 0 count for nothing, whatever they hold."""
    assert scores.divergence_N is not None and scores.logprob_N is not None
    dead_N, weight = batch.weight_N == 0, batch.weight_N.sum()
    loss, nll = (
        (batch.weight_N * value_N).masked_fill(dead_N, 0.0).sum()
        for value_N in (scores.divergence_N, -scores.logprob_N)
    )
    return LossSums(loss=loss, weight=weight, means={"nll": (nll, weight)})
