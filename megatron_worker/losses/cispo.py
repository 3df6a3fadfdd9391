"""CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): -sg(clip(r)) A log p. No token loses its gradient to the clip."""

from torch import Tensor

from megatron_worker.losses.parts.targets import Surrogate, Targets
from shared.jobs.job import CISPO


def surrogate(cispo: CISPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    ratio_N = targets.ratio_N.detach()
    low, high = 0.0 if cispo.clip_low is None else 1 - cispo.clip_low, 1 + cispo.clip_high
    clipped = {"clip_high": ratio_N > high, "clip_low": ratio_N < low}
    return Surrogate(-ratio_N.clamp(low, high) * advantage_N * targets.logprob_N, ratio_N, clipped)
