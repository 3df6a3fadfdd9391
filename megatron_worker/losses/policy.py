"""Policy losses: an algorithm's surrogate, weighted, with its KL and entropy terms, aggregated; and its metrics.

Shape suffixes: N live targets of a bin, S its sequences.
"""

import torch
from torch import Tensor

from longshore.losses import PolicyLoss
from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.losses.columns import check_finite
from megatron_worker.losses.divergence import bounded, divergence
from megatron_worker.losses.surrogates import Surrogate, surrogate_of
from megatron_worker.losses.targets import Targets, live_targets, shaped_advantages, sums_of_sequences
from megatron_worker.sums import LossSums
from shared.jobs.packed import Units

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
        maxima={"ratio_max": _largest(surrogate.ratio_N)},
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


def _largest(value_N: Tensor) -> Tensor:
    """Return the maximum; 0 if there are no values."""
    return torch.cat([value_N, value_N.new_zeros(1)]).amax()
