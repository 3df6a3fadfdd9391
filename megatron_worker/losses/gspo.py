"""GSPO (Zheng et al. 2025, arXiv:2507.18071): PPO's clip of s = exp(mean of log r over a sequence).

Written as GSPO-token (eq. 13 and 14): each token's ratio has the value s and its own token's gradient, so that
advantages may differ between tokens. Where they do not, and sequences are averaged, it is GSPO (eq. 5 to 7).
"""

from torch import Tensor

from megatron_worker.losses.parts.aggregation import sums_of_sequences
from megatron_worker.losses.parts.clipping import clipped_surrogate
from megatron_worker.losses.parts.divergence import bounded
from megatron_worker.losses.parts.targets import Surrogate, Targets
from shared.jobs.job import GSPO


def surrogate(gspo: GSPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    t = targets
    total_S, length_S = (
        sums_of_sequences(value_N, t.sequence_N, t.num_sequences)
        for value_N in ((t.weight_N * t.log_ratio_N).detach(), t.weight_N)
    )
    mean_N = (total_S / length_S)[t.sequence_N]
    ratio_N = (bounded(mean_N) + t.logprob_N - t.logprob_N.detach()).exp()
    return clipped_surrogate(ratio_N, advantage_N, gspo.clip_low, gspo.clip_high, dual_clip=None)
