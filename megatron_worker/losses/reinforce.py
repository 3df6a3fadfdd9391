"""Importance-weighted REINFORCE (Williams 1992; off-policy as in Degris et al. 2012, arXiv:1205.4839): -r A."""

from torch import Tensor

from megatron_worker.losses.parts.targets import Surrogate, Targets
from shared.jobs.job import Reinforce


def surrogate(_: Reinforce, targets: Targets, advantage_N: Tensor) -> Surrogate:
    ratio_N = targets.ratio_N
    return Surrogate(-ratio_N * advantage_N, ratio_N.detach(), {})
