"""KTO of single answers (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7).

Sequence 2k of a unit is an answer, with advantage +1 if it is desirable, else -1. Sequence 2k + 1, with advantage
and weight 0, answers another prompt: those of a whole step estimate the policy's divergence from its reference,
in a pass before the loss. So the estimate depends on neither bins nor ranks, and has no gradient.

Shape suffixes: N targets, S sequences, of a bin; in `check_answers`, of all units.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.losses.columns import read_column
from megatron_worker.losses.targets import sums_of_sequences
from megatron_worker.sums import LossSums
from shared.errors import InvalidInput
from shared.jobs.losses import KTO
from shared.jobs.packed import Units


def kto_loss(kto: KTO) -> LossFunction:
    """Without the baseline's pass, as in memory measurements, the divergence is 0."""

    def loss_of(sums: Mapping[str, float]) -> LossFunction:
        divergence = max(0.0, sums["loss"] / sums["weight"]) if sums["weight"] else 0.0
        return LossFunction(Outputs(), lambda scores, batch: _sums(kto, divergence, scores, batch))

    baseline = LossFunction(Outputs(), _divergence), loss_of
    return LossFunction(Outputs(), lambda scores, batch: _sums(kto, 0.0, scores, batch), baseline)


def _divergence(scores: Scores, batch: Batch) -> LossSums:
    """Add up how far the policy is from the reference on answers to other prompts; the normaliser counts them."""
    log_ratio_S, _ = _sequences(scores, batch, batch.advantage_N == 0)
    return LossSums(loss=log_ratio_S.sum(), weight=log_ratio_S.new_tensor(float(len(log_ratio_S))))


def _sums(kto: KTO, divergence: float, scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin's answers; the normaliser counts them, whatever they weigh."""
    log_ratio_S, sign_S = _sequences(scores, batch, batch.weight_N > 0)
    is_good_S, lead_S = sign_S > 0, sign_S * (log_ratio_S - divergence)
    weight_S = torch.full_like(lead_S, kto.undesirable_weight).masked_fill(is_good_S, kto.desirable_weight)
    count, reward_S = log_ratio_S.new_tensor(float(len(sign_S))), kto.beta * log_ratio_S.detach()
    return LossSums(
        loss=(weight_S * torch.sigmoid(-kto.beta * lead_S)).sum(),
        weight=count,
        means={
            "reward_chosen": (reward_S[is_good_S].sum(), is_good_S.sum()),
            "reward_rejected": (reward_S[~is_good_S].sum(), (~is_good_S).sum()),
            "label_accuracy": ((lead_S > 0).sum(), count),
            "kl": (divergence * count, count),
        },
    )


def _sequences(scores: Scores, batch: Batch, kept_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p - log p_ref of the sequences of some targets, and their signs: [S] each."""
    assert scores.logprob_N is not None
    sequences, sequence_N = torch.unique(batch.sequence_N[kept_N], return_inverse=True)
    log_ratio_N = (scores.logprob_N - batch.ref_logprob_N)[kept_N]
    log_ratio_S, sign_S = (
        sums_of_sequences(value_N, sequence_N, len(sequences)) for value_N in (log_ratio_N, batch.advantage_N[kept_N])
    )
    return log_ratio_S, sign_S.sign()


def check_answers(units: Units) -> None:
    """Raise InvalidInput unless each unit has good or bad answers, each paired with one to another prompt.

    An answer is sequence 2k, of advantage +1 or -1; sequence 2k + 1 has weight and advantage 0.
    """
    reason = "kto tells good answers from bad ones by it"
    advantage_N, sequence_N, weight_N = (
        read_column(units, name, reason) for name in ("advantage", "sequence", "weight")
    )
    unit_N = np.repeat(np.arange(units.header.num_units), np.diff(units.target_offsets))
    is_other_N = sequence_N % 2 == 1
    fits_N = np.where(is_other_N, (advantage_N == 0) & (weight_N == 0), np.isin(advantage_N, (1, -1)) & (weight_N > 0))
    if not fits_N.all():
        rule = "an answer has advantage +1 or -1 and a weight, one to another prompt 0 of both"
        raise InvalidInput(rule, f"unit {unit_N[~fits_N][0]}")
    signed = np.unique(np.stack([unit_N, sequence_N, advantage_N], axis=1).astype(np.int64), axis=0)
    examples, num_parts = np.unique(signed[:, :2] // np.array([1, 2]), axis=0, return_counts=True)
    num_answers = np.add.reduceat(1 - signed[:, 1] % 2, np.cumsum(num_parts) - num_parts)
    is_whole = (num_parts == 2) & (num_answers == 1)
    if not is_whole.all():
        unit, number = examples[~is_whole][0]
        raise InvalidInput(
            f"example {number} is not one answer, good or bad, and one to another prompt", f"unit {unit}"
        )
