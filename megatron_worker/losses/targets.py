"""The live targets of a bin, for policy losses: rows of weight 0 are removed, whatever they hold.

Shape suffixes: N live targets of a bin, S its sequences.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longshore.losses import PolicyLoss
from megatron_worker.engine import Batch, Scores
from shared.errors import InvalidInput
from shared.jobs.packed import Floats, Ints, Units

# --- Divergence ---
# Estimates of a Kullback-Leibler divergence from single samples (Schulman 2020,
# http://joschu.net/blog/kl-approx.html).
#
# With x drawn from p and d = log p(x) - log q(x), KL(p, q) = E[d] is estimated by
#
#     k1 = d                   unbiased, of either sign
#     k2 = d^2 / 2             biased, never negative
#     k3 = exp(-d) - 1 + d     unbiased, never negative
#
# Beyond -d = 20, k3 follows its tangent: it stays finite, and its gradient still pulls towards q. With a clamped
# exponential the gradient would be that of d alone, away from q; with a clamped k3 (TRL, verl) it is 0.

Estimator = Literal["k1", "k2", "k3"]

# exp(20) is beyond any ratio of use, and finite: a zero gradient times infinity would be no number.
LARGEST_LOG_RATIO = 20.0


def bounded(log_ratio_N: Tensor) -> Tensor:
    """Clamp a logarithm so that its exponential is finite."""
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def divergence(logprob_N: Tensor, other_N: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(p, q) at samples of p, in nats. `logprob_N`: log p; `other_N`: log q."""
    difference_N = logprob_N - other_N
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            exponent_N = (-difference_N).clamp(max=LARGEST_LOG_RATIO)
            return exponent_N.exp() * (1 - difference_N - exponent_N) - 1 + difference_N


# --- Columns of the data that a loss needs, checked before any step ---
# A column that is missing is never taken for zeros.
#
# Shape suffixes: N targets of all units.


def check_finite(units: Units, name: str, reason: str) -> None:
    """Raise InvalidInput, which names the column, the unit and the reason, if a trained token has no number."""
    values_N, weight_N = read_column(units, name, reason), read_column(units, "weight", reason)
    broken_N = ~np.isfinite(values_N) & (weight_N > 0)
    if broken_N.any():
        unit = int(np.searchsorted(units.target_offsets, int(broken_N.argmax()), side="right")) - 1
        raise InvalidInput(f"{name} is no number for {int(broken_N.sum())} trained tokens; {reason}", f"unit {unit}")


def check_teachers(units: Units, num_teachers: int) -> None:
    """Raise InvalidInput if a target's advantage is not the number of a teacher, from 0."""
    number_N = read_column(units, "advantage", "several teachers: it is the number of a target's own")
    if not np.isin(number_N, np.arange(num_teachers)).all():
        raise InvalidInput(f"advantage is a teacher's number, from 0 to {num_teachers - 1}", "data")


def read_column(units: Units, name: str, reason: str) -> Floats | Ints:
    """Return a column of all units, [N]. Raises InvalidInput, which names the reason, if they have none."""
    values = units.columns.get(name)
    if values is None:
        raise InvalidInput(f"the units have no column {name}; {reason}", "data")
    return values


@dataclass(frozen=True)
class Targets:
    """Columns of live targets. `logprob_N` has a gradient, and `entropy_N` if requested; the rest are constants."""

    logprob_N: Tensor
    old_logprob_N: Tensor
    ref_logprob_N: Tensor
    sampler_logprob_N: Tensor
    entropy_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    sequence_N: Tensor
    num_sequences: int

    @property
    def log_ratio_N(self) -> Tensor:
        return self.logprob_N - self.old_logprob_N

    @property
    def ratio_N(self) -> Tensor:
        return bounded(self.log_ratio_N).exp()

    def mean_of_sequence(self, value_N: Tensor) -> Tensor:
        """Return for each target the mean of its sequence's values, by weight, [N]."""
        total_S, weight_S = (
            sums_of_sequences(each_N, self.sequence_N, self.num_sequences)
            for each_N in (self.weight_N * value_N, self.weight_N)
        )
        return (total_S / weight_S)[self.sequence_N]


def live_targets(scores: Scores, batch: Batch, loss: PolicyLoss) -> Targets:
    """Return rows of positive weight; sequences are numbered anew, from 0 without a gap.

    If ratios are against the trainer's own log-probabilities, those of targets that only the first step trains on are
    not computed (NaN): there the old policy is the policy itself.
    """
    assert scores.logprob_N is not None and scores.entropy_N is not None
    live_N = batch.weight_N > 0
    old_N = batch.old_logprob_N
    if loss.old == "trainer":
        old_N = torch.where(torch.isnan(old_N), scores.logprob_N.detach(), old_N)
    sequences_S, sequence_N = torch.unique(batch.sequence_N[live_N], return_inverse=True)
    return Targets(
        logprob_N=scores.logprob_N[live_N],
        old_logprob_N=old_N[live_N],
        ref_logprob_N=batch.ref_logprob_N[live_N],
        sampler_logprob_N=batch.sampler_logprob_N[live_N],
        entropy_N=scores.entropy_N[live_N],
        advantage_N=batch.advantage_N[live_N],
        weight_N=batch.weight_N[live_N],
        sequence_N=sequence_N,
        num_sequences=len(sequences_S),
    )


def shaped_advantages(targets: Targets, loss: PolicyLoss) -> Tensor:
    """Return advantages [N], less the KL penalty if it is part of the reward."""
    if loss.kl is None or loss.kl.placement == "loss":
        return targets.advantage_N
    penalty_N = divergence(targets.old_logprob_N, targets.ref_logprob_N, loss.kl.estimator)
    return targets.advantage_N - loss.kl.coefficient * penalty_N


def sums_of_sequences(value_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Return the sum of each sequence's values, [S]. `sequence_N`: int64, 0 to num_sequences - 1."""
    return value_N.new_zeros(num_sequences).index_add(0, sequence_N, value_N)
