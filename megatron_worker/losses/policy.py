"""Policy losses: an algorithm's surrogate, weighed, with its KL and entropy terms, aggregated; and what is reported.

Shape suffixes: N live targets of a bin.
"""

import torch
from torch import Tensor

from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses import cispo, dro, gspo, ppo, reinforce
from megatron_worker.losses.parts.aggregation import aggregate
from megatron_worker.losses.parts.divergence import bounded, divergence
from megatron_worker.losses.parts.targets import Surrogate, Targets, live_targets, shaped_advantages
from shared.jobs.job import CISPO, DRO, GSPO, PPO, PolicyLoss, Reinforce


def policy_loss(loss: PolicyLoss, temperature: float) -> LossFunction:
    outputs = Outputs(entropy=True, entropy_gradient=loss.entropy_coefficient > 0, temperature=temperature)
    return LossFunction(outputs=outputs, sums=lambda scores, batch: sums(loss, scores, batch))


def sums(loss: PolicyLoss, scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin's targets of positive weight."""
    targets = live_targets(scores, batch, loss)
    surrogate = _surrogate(loss, targets, shaped_advantages(targets, loss))
    importance_N = _importance(targets)
    value_N = surrogate.loss_N
    if loss.truncated_importance is not None:
        value_N = value_N * importance_N.clamp(max=loss.truncated_importance)
    if loss.kl is not None and loss.kl.placement == "loss":
        value_N = value_N + loss.kl.coefficient * divergence(
            targets.logprob_N, targets.ref_logprob_N, loss.kl.estimator
        )
    if loss.entropy_coefficient:
        value_N = value_N - loss.entropy_coefficient * targets.entropy_N
    total, weight = aggregate(value_N, targets.weight_N, targets.sequence_N, targets.num_sequences, loss)
    return LossSums(
        loss=total,
        weight=weight,
        metrics={"sequences": weight.new_tensor(float(targets.num_sequences))},
        means=_means(loss, targets, surrogate, importance_N),
        maxima={"ratio_max": _largest(surrogate.ratio_N)},
    )


def _surrogate(loss: PolicyLoss, targets: Targets, advantage_N: Tensor) -> Surrogate:
    match loss:
        case Reinforce():
            return reinforce.surrogate(loss, targets, advantage_N)
        case PPO():
            return ppo.surrogate(loss, targets, advantage_N)
        case CISPO():
            return cispo.surrogate(loss, targets, advantage_N)
        case GSPO():
            return gspo.surrogate(loss, targets, advantage_N)
        case DRO():
            return dro.surrogate(loss, targets, advantage_N)


def _importance(targets: Targets) -> Tensor:
    """The frozen policy's probability over the sampler's (Yao et al. 2025, truncated importance sampling)."""
    return bounded(targets.old_logprob_N - targets.sampler_logprob_N).exp()


def _means(
    loss: PolicyLoss, targets: Targets, surrogate: Surrogate, importance_N: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Averages over tokens by weight. Divergences are k3, which needs no luck to be positive."""
    t, logprob_N = targets, targets.logprob_N.detach()
    known_N = torch.isfinite(t.sampler_logprob_N)  # a trainer that goes by its own old policy may do without
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
        values["truncated_fraction"] = (importance_N > loss.truncated_importance).to(t.weight_N.dtype)
    count = t.weight_N.sum()
    means = {name: ((t.weight_N * value_N).sum(), count) for name, value_N in values.items()}
    means["kl_sampler_trainer"] = ((t.weight_N * mismatch_N).sum(), (t.weight_N * known_N).sum())
    return means


def _largest(value_N: Tensor) -> Tensor:
    """The maximum; 0 of none."""
    return torch.cat([value_N, value_N.new_zeros(1)]).amax()
