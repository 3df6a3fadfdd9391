"""The loss of a critic: half the squared error of its values, which are kept near those before the job if it clips.

Shape suffixes: N targets of a bin.
"""

import torch

from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.sums import LossSums


def value_loss(clip: float | None) -> LossFunction:
    """Targets are the column `advantage`; `old_logprob` holds values from before the job, in the targets' units.

    L = 1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) (OpenAI's baselines, ppo2; arXiv:2005.12729,
    section 3), weighted, over the sum of weights.
    """
    return LossFunction(Outputs(logprob=False, values=True), lambda scores, batch: _sums(clip, scores, batch))


def _sums(clip: float | None, scores: Scores, batch: Batch) -> LossSums:
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
