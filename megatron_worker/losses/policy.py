"""Policy losses: an algorithm's surrogate, weighted, with its KL and entropy terms, aggregated; and its metrics.

Shape suffixes: N live targets of a bin, S its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.losses import CISPO, DRO, GMPO, GSPO, PPO, SAPO, PolicyLoss, Reinforce, TruncatedReinforce
from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses.targets import (
    Targets,
    bounded,
    check_finite,
    divergence,
    live_targets,
    shaped_advantages,
    sums_of_sequences,
)
from shared.jobs.packed import Units

# --- Surrogate losses of policy algorithms ---
# One function each, from a bin's targets to a loss and a ratio of each target.


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
        case TruncatedReinforce():
            return _truncated_reinforce(loss, targets, advantage_N)


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


def _truncated_reinforce(loss: TruncatedReinforce, targets: Targets, advantage_N: Tensor) -> Surrogate:
    """-sg(min(r, c)) A log p + beta (log r)^2 / 2.

    V-trace's policy gradient (Espeholt et al. 2018, arXiv:1802.01561, section 4.2), of one step, and Schulman's
    estimate k2 (2020) of the divergence from the old policy. Neither has the gradient of an exponential.
    """
    ratio_N = targets.ratio_N.detach()
    gradient_N = -ratio_N.clamp(max=loss.truncation) * advantage_N * targets.logprob_N
    pull_N = loss.old_kl_coefficient / 2 * targets.log_ratio_N.square()
    return Surrogate(gradient_N + pull_N, ratio_N, {"clip_high": ratio_N > loss.truncation})


_OF_THE_SAMPLER = ("truncated_importance", "off_policy_bound")  # fields that compare with it, whatever `old` is


def policy_loss(loss: PolicyLoss, temperature: float, has_critic: bool = False) -> LossFunction:
    outputs = Outputs(entropy=True, entropy_gradient=loss.entropy_coefficient > 0, temperature=temperature)
    return LossFunction(outputs=outputs, sums=lambda scores, batch: _sums(loss, scores, batch, has_critic))


def check_policy_columns(units: Units, loss: PolicyLoss) -> None:
    """Raise InvalidInput if an advantage, or a sampler's log-probability that the loss needs, is no number."""
    check_finite(units, "advantage", f"the loss {loss.kind} learns from it")
    if (reader := next((n for n in _OF_THE_SAMPLER if getattr(loss, n) is not None), None)) is not None:
        check_finite(units, "old_logprob", f"{reader} needs the sampler's log-probabilities")
    elif loss.old == "sampler":
        check_finite(units, "old_logprob", "old = sampler needs the sampler's log-probabilities")


def _sums(loss: PolicyLoss, scores: Scores, batch: Batch, has_critic: bool) -> LossSums:
    """Return sums over a bin's targets of positive weight."""
    targets = live_targets(scores, batch, loss)
    advantage_N = targets.advantage_N if has_critic else shaped_advantages(targets, loss)
    surrogate = surrogate_of(loss, targets, advantage_N)
    importance_N = _importance(targets, loss)
    left_out = _left_out(targets, importance_N, loss)
    value_N = surrogate.loss_N
    if loss.truncated_importance is not None:
        value_N = value_N * importance_N.clamp(max=loss.truncated_importance)
    for where_N in left_out.values():
        value_N = value_N.masked_fill(where_N, 0.0)
    if loss.kl is not None and loss.kl.placement == "loss":
        kl_N = divergence(targets.logprob_N, targets.ref_logprob_N, loss.kl.estimator)
        value_N = value_N + loss.kl.coefficient * kl_N
    if loss.entropy_coefficient:
        value_N = value_N - loss.entropy_coefficient * targets.entropy_N
    total, weight = _aggregate(value_N, targets, loss)
    return LossSums(
        loss=total,
        weight=weight,
        metrics={"sequences": weight.new_tensor(float(targets.num_sequences))},
        means=_means(loss, targets, surrogate, importance_N, left_out),
        maxima={"ratio_max": torch.cat([surrogate.ratio_N, surrogate.ratio_N.new_zeros(1)]).amax()},
    )


def _aggregate(value_N: Tensor, targets: Targets, loss: PolicyLoss) -> tuple[Tensor, Tensor]:
    """Return the sum of a bin, and its part of the divisor of the sum over all bins. A sequence lies in one bin.

    token_mean: sum_n w_n v_n over sum_n w_n. sequence_mean: sum_s (sum_n w_n v_n / sum_n w_n) over S.
    constant_length: sum_n w_n v_n / L over S (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2).
    """
    weight_N, sequence_N = targets.weight_N, targets.sequence_N
    sequences = weight_N.new_tensor(float(targets.num_sequences))
    match loss.aggregation:
        case "token_mean":
            return _total(weight_N * value_N), weight_N.sum()
        case "sequence_mean":
            length_S = sums_of_sequences(weight_N, sequence_N, targets.num_sequences)
            return _total(value_N * weight_N / length_S[sequence_N]), sequences
        case "constant_length":
            assert loss.constant is not None
            return _total(weight_N * value_N) / loss.constant, sequences


def _total(value_N: Tensor) -> Tensor:
    """Add up in float64: surrogates of either sign cancel, and a sum must not depend on how bins were cut."""
    return value_N.double().sum()


def _importance(targets: Targets, loss: PolicyLoss) -> Tensor:
    """Return the old policy's probability over the sampler's (Yao et al. 2025, truncated importance sampling).

    It is a token's ratio, or the whole sequence's: the product over the trained targets.
    """
    log_ratio_N = targets.old_logprob_N - targets.sampler_logprob_N
    if loss.importance_level == "sequence":
        log_ratio_N = sums_of_sequences(log_ratio_N, targets.sequence_N, targets.num_sequences)[targets.sequence_N]
    return bounded(log_ratio_N).exp()


def _left_out(targets: Targets, importance_N: Tensor, loss: PolicyLoss) -> dict[str, Tensor]:
    """Return the tokens that are masked out, bool [N], by the reason.

    `masked`: their importance is beyond the bounds (IcePop, Ling Team 2025, arXiv:2510.18855). `off_policy`: they have
    a negative advantage, and the policy has drifted too far from the sampler on their sequence (off-policy sequence
    masking: DeepSeek-V3.2, 2025, arXiv:2512.02556, with the sampler's own log-probabilities as the old policy).
    """
    found = {}
    if loss.truncated_importance is not None and loss.importance_beyond == "mask":
        low, high = loss.importance_floor or 0.0, loss.truncated_importance
        found["masked"] = (importance_N > high) | (importance_N < low)
    if loss.off_policy_bound is not None:
        behind_N = targets.mean_of_sequence(targets.sampler_logprob_N - targets.logprob_N.detach())
        found["off_policy"] = (targets.advantage_N < 0) & (behind_N > loss.off_policy_bound)
    return found


def _means(
    loss: PolicyLoss, targets: Targets, surrogate: Surrogate, importance_N: Tensor, left_out: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return averages over tokens by weight. Divergences are k3 estimates, which are never negative."""
    t, logprob_N = targets, targets.logprob_N.detach()
    known_N = torch.isfinite(t.sampler_logprob_N)  # a trainer that computes its own old policy may lack these
    trainer_N = logprob_N if loss.old == "sampler" else t.old_logprob_N
    mismatch_N = divergence(t.sampler_logprob_N, trainer_N, "k3").masked_fill(~known_N, 0.0)
    values = {
        "ratio_mean": surrogate.ratio_N,
        "kl_old_new": divergence(t.old_logprob_N, logprob_N, "k3"),
        "entropy": t.entropy_N.detach(),
        **{f"{name}_fraction": where_N.to(t.weight_N.dtype) for name, where_N in surrogate.clipped.items()},
    }
    if loss.kl is not None:
        values["kl_reference"] = divergence(logprob_N, t.ref_logprob_N, "k3")
    if loss.truncated_importance is not None:
        values["importance_mean"] = importance_N
        outside_N = left_out.get("masked", importance_N > loss.truncated_importance)
        values["truncated_fraction"] = outside_N.to(t.weight_N.dtype)
    if "off_policy" in left_out:
        values["off_policy_fraction"] = left_out["off_policy"].to(t.weight_N.dtype)
    count = t.weight_N.sum()
    means = {name: ((t.weight_N * value_N).sum(), count) for name, value_N in values.items()}
    means["kl_sampler_trainer"] = ((t.weight_N * mismatch_N).sum(), (t.weight_N * known_N).sum())
    return means
