"""Weighted squared error of a head's scalar: the sum of w (v - target)^2, which the step divides by its sum of w."""

import torch

from longshore.losses import SquaredError
from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.sums import LossSums


def squared_error_loss(loss: SquaredError) -> LossFunction:
    """Targets are the column `advantage`: what a loss learns from."""
    return LossFunction(Outputs(logprob=False, values=True), lambda scores, batch: _sums(loss, scores, batch))


def _sums(loss: SquaredError, scores: Scores, batch: Batch) -> LossSums:
    assert scores.value_NL is not None
    scalar_N = batch.label_N if loss.scalar is None else torch.full_like(batch.label_N, loss.scalar)
    error_N = scores.value_NL.gather(1, scalar_N[:, None])[:, 0] - batch.advantage_N
    loss_N = (batch.weight_N * error_N.square()).masked_fill(batch.weight_N == 0, 0.0)
    return LossSums(loss=loss_N.sum(), weight=batch.weight_N.sum())
