"""Surrogate losses of policy algorithms: one function each, from a bin's targets to a loss and a ratio of each target.

Shape suffixes: N live targets of a bin, S its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.losses import CISPO, DRO, GMPO, GSPO, PPO, SAPO, PolicyLoss, Reinforce
from megatron_worker.losses.divergence import bounded
from megatron_worker.losses.targets import Targets


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
        case GMPO():
            return _gmpo(loss, targets, advantage_N)
        case SAPO():
            return _sapo(loss, targets, advantage_N)
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

    -min(r A, clip(r, 1 - low, 1 + high) A), and if A < 0 no more than -dual A (Ye et al. 2020, arXiv:1912.09729,
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

    `sequence` is the paper's eq. 5 to 7. `token` is GSPO-token (eq. 13 and 14): each token's ratio has the value s and
    its own token's gradient, so that advantages may differ between tokens. Where they do not, and sequences are
    averaged, both are the same.
    """
    if gspo.level == "sequence":
        ratio_N = bounded(targets.mean_of_sequence(targets.log_ratio_N)).exp()
    else:
        mean_N = targets.mean_of_sequence(targets.log_ratio_N.detach())
        ratio_N = (bounded(mean_N) + targets.logprob_N - targets.logprob_N.detach()).exp()
    return clipped(ratio_N, advantage_N, gspo.clip_low, gspo.clip_high)


def _gmpo(gmpo: GMPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): -A exp(mean over a sequence of clipped log r).

    A token's log r is clipped as PPO's ratio is: above `clip_high` if A > 0, below -`clip_low` if A < 0.
    """
    log_ratio_N = bounded(targets.log_ratio_N)
    clips = {
        "clip_high": (advantage_N > 0) & (log_ratio_N > gmpo.clip_high),
        "clip_low": (advantage_N < 0) & (log_ratio_N < -gmpo.clip_low),
    }
    held_N = torch.where(
        clips["clip_high"], gmpo.clip_high, torch.where(clips["clip_low"], -gmpo.clip_low, log_ratio_N)
    )
    ratio_N = targets.mean_of_sequence(held_N).exp()
    return Surrogate(-ratio_N * advantage_N, ratio_N.detach(), clips)


def _sapo(sapo: SAPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): -A sigmoid(tau (r - 1)) 4 / tau.

    Its slope at r = 1 is -A.
    """
    tau_N = torch.where(advantage_N > 0, sapo.tau_positive, sapo.tau_negative)
    gate_N = torch.sigmoid(tau_N * (targets.ratio_N - 1)) * 4 / tau_N
    return Surrogate(-gate_N * advantage_N, targets.ratio_N.detach(), {})


def _dro(dro: DRO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """DRO (Richemond et al. 2024, arXiv:2405.19107, eq. 5): (A - beta log r)^2 / (2 beta), less its constant."""
    log_ratio_N = targets.log_ratio_N
    loss_N = -advantage_N * log_ratio_N + dro.beta / 2 * log_ratio_N.square()
    return Surrogate(loss_N, targets.ratio_N.detach(), {})
