"""The live targets of a bin, for policy losses: rows of weight 0 are removed, whatever they hold.

Shape suffixes: N live targets of a bin, S its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.losses import PolicyLoss
from megatron_worker.engine import Batch, Scores
from megatron_worker.losses.divergence import bounded, divergence


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
