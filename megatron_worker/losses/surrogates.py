"""Surrogate losses of policy algorithms: one function each, from a bin's targets to a loss and a ratio of each target.

Shape suffixes: N live targets of a bin, S its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.losses import CISPO, DRO, GSPO, PPO, PolicyLoss, Reinforce
from megatron_worker.losses.divergence import bounded
from megatron_worker.losses.targets import Targets, sums_of_sequences


@dataclass(frozen=True)
class Surrogate:
    """A loss and a ratio for each target, and for each kind of clip the targets that it clipped, bool [N]."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped: dict[str, Tensor]


def surrogate_of(loss: PolicyLoss, targets: Targets, advantage_N: Tensor) -> Surrogate:
    match loss:
        case Reinforce():
            return _reinforce(targets, advantage_N)
        case PPO():
            return clipped(targets.ratio_N, advantage_N, loss.clip_low, loss.clip_high, loss.dual_clip)
        case CISPO():
            return _cispo(loss, targets, advantage_N)
        case GSPO():
            return _gspo(loss, targets, advantage_N)
        case DRO():
            return _dro(loss, targets, advantage_N)


def _reinforce(targets: Targets, advantage_N: Tensor) -> Surrogate:
    """Importance-weighted REINFORCE (Williams 1992; off-policy as in Degris et al. 2012, arXiv:1205.4839): -r A."""
    ratio_N = targets.ratio_N
    return Surrogate(-ratio_N * advantage_N, ratio_N.detach(), {})


def clipped(
    ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """PPO's clip of a ratio (Schulman et al. 2017, arXiv:1707.06347, eq. 7), its bounds apart, and the dual clip.

    -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 no more than -dual A (Ye et al. 2020, arXiv:1912.09729,
    eq. 5). A ratio on a bound is not clipped: it has its gradient.
    """
    clips = {
        "clip_high": (1 + clip_high, (advantage_N > 0) & (ratio_N > 1 + clip_high)),
        "clip_low": (1 - clip_low, (advantage_N < 0) & (ratio_N < 1 - clip_low)),
    }
    if dual_clip is not None:
        clips["clip_dual"] = (dual_clip, (advantage_N < 0) & (ratio_N > dual_clip))
    bounded_N = ratio_N
    for bound, where_N in clips.values():
        bounded_N = torch.where(where_N, bound, bounded_N)
    where = {name: where_N for name, (_, where_N) in clips.items()}
    return Surrogate(-bounded_N * advantage_N, ratio_N.detach(), where)


def _cispo(cispo: CISPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): -sg(clip(r)) A log p. Clipped tokens keep their gradient."""
    ratio_N = targets.ratio_N.detach()
    low, high = 0.0 if cispo.clip_low is None else 1 - cispo.clip_low, 1 + cispo.clip_high
    clips = {"clip_high": ratio_N > high, "clip_low": ratio_N < low}
    return Surrogate(-ratio_N.clamp(low, high) * advantage_N * targets.logprob_N, ratio_N, clips)


def _gspo(gspo: GSPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): PPO's clip of s = exp(mean of log r over a sequence).

    Written as GSPO-token (eq. 13 and 14): each token's ratio has the value s and its own token's gradient, so that
    advantages may differ between tokens. Where they do not, and sequences are averaged, it is GSPO (eq. 5 to 7).
    """
    t = targets
    total_S, length_S = (
        sums_of_sequences(value_N, t.sequence_N, t.num_sequences)
        for value_N in ((t.weight_N * t.log_ratio_N).detach(), t.weight_N)
    )
    mean_N = (total_S / length_S)[t.sequence_N]
    ratio_N = (bounded(mean_N) + t.logprob_N - t.logprob_N.detach()).exp()
    return clipped(ratio_N, advantage_N, gspo.clip_low, gspo.clip_high)


def _dro(dro: DRO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """DRO (Richemond et al. 2024, arXiv:2405.19107, eq. 5): (A - beta log r)^2 / (2 beta), less its constant."""
    log_ratio_N = targets.log_ratio_N
    loss_N = -advantage_N * log_ratio_N + dro.beta / 2 * log_ratio_N.square()
    return Surrogate(loss_N, targets.ratio_N.detach(), {})
