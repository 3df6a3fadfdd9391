"""Losses of tokens with given answers: cross-entropy, distillation, squared errors, a critic's values."""

import torch

from longshore.losses import Distillation, SquaredError
from megatron_worker.engine import Batch, Divergence, LossFunction, LossSums, Outputs, Scores

# --- Weighted negative log-likelihood: the sum of -w log p(label), which the step divides by its sum of w ---


def cross_entropy_sums(scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin. Labels of weight 0 count for nothing, even if their log-probability is -inf."""
    assert scores.logprob_N is not None
    loss_N = (-batch.weight_N * scores.logprob_N).masked_fill(batch.weight_N == 0, 0.0)
    return LossSums(loss=loss_N.sum(), weight=batch.weight_N.sum())


def cross_entropy_loss(temperature: float) -> LossFunction:
    """`temperature`: what logits are divided by."""
    return LossFunction(Outputs(temperature=temperature), cross_entropy_sums)


# --- Distillation ---
# The sum of w D, which the step divides by its sum of w. Divergences: head/distributions.py.


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


# --- Weighted squared error of a head's scalar ---
# The sum of w (v - target)^2, which the step divides by its sum of w.


def squared_error_loss(loss: SquaredError) -> LossFunction:
    """Targets are the column `advantage`: what a loss learns from."""
    return LossFunction(
        Outputs(logprob=False, values=True), lambda scores, batch: _squared_error_sums(loss, scores, batch)
    )


def _squared_error_sums(loss: SquaredError, scores: Scores, batch: Batch) -> LossSums:
    assert scores.value_NL is not None
    scalar_N = batch.label_N if loss.scalar is None else torch.full_like(batch.label_N, loss.scalar)
    error_N = scores.value_NL.gather(1, scalar_N[:, None])[:, 0] - batch.advantage_N
    loss_N = (batch.weight_N * error_N.square()).masked_fill(batch.weight_N == 0, 0.0)
    return LossSums(loss=loss_N.sum(), weight=batch.weight_N.sum())


# --- The loss of a critic ---
# Half the squared error of its values, which are kept near those before the job if it clips.
#
# Shape suffixes: N targets of a bin.


def value_loss(clip: float | None) -> LossFunction:
    """Targets are the column `advantage`; `old_logprob` holds values from before the job, in the targets' units.

    L = 1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) (OpenAI's baselines, ppo2; arXiv:2005.12729,
    section 3), weighted, over the sum of weights.
    """
    return LossFunction(Outputs(logprob=False, values=True), lambda scores, batch: _value_sums(clip, scores, batch))


def _value_sums(clip: float | None, scores: Scores, batch: Batch) -> LossSums:
    assert scores.value_NL is not None
    live_N = batch.weight_N > 0
    value_N, wanted_N, weight_N = scores.value_NL[live_N, 0], batch.advantage_N[live_N], batch.weight_N[live_N]
    square_N = (value_N - wanted_N).square()
    means = {}
    if clip is not None:
        old_N = batch.old_logprob_N[live_N]
        near_N = (old_N + (value_N - old_N).clamp(-clip, clip) - wanted_N).square()
        means["clipped_fraction"] = ((weight_N * (near_N > square_N)).sum(), weight_N.sum())
        square_N = torch.maximum(square_N, near_N)
    return LossSums(loss=(0.5 * weight_N * square_N).sum(), weight=weight_N.sum(), means=means)
