"""Reward models of pairs: the log-likelihood of Bradley and Terry (1952) that the chosen answer is the better one.

Sequences 2k and 2k + 1 of a unit are a pair's chosen and rejected answer, with one target each, at its last token. The
chosen one's advantage is the pair's margin (Touvron et al. 2023, arXiv:2307.09288, eq. 2), 0 without one.

Shape suffixes: N targets, P pairs, B bins of confidence; in `check_scored_pairs`, of all units.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses.columns import check_finite, read_column
from megatron_worker.losses.targets import sums_of_sequences
from megatron_worker.sums import PART
from shared.errors import InvalidInput
from shared.jobs.losses import BradleyTerry
from shared.jobs.packed import Units

_CONFIDENCES = 10


def bradley_terry_loss(loss: BradleyTerry) -> LossFunction:
    return LossFunction(Outputs(logprob=False, values=True), lambda scores, batch: _sums(loss, scores, batch))


def _sums(loss: BradleyTerry, scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin's pairs; the normaliser counts them."""
    assert scores.value_NL is not None
    live_N = batch.weight_N > 0
    pairs, pair_N = torch.unique(batch.sequence_N[live_N] // 2, return_inverse=True)
    is_rejected_N = batch.sequence_N[live_N] % 2 == 1

    def of(value_N: Tensor, rejected: bool = False) -> Tensor:
        return sums_of_sequences(value_N[live_N].masked_fill(is_rejected_N != rejected, 0.0), pair_N, len(pairs))

    value_N = scores.value_NL[:, loss.scalar]
    chosen_P, rejected_P = of(value_N), of(value_N, rejected=True)
    lead_P = chosen_P - rejected_P
    loss_P = -logsigmoid(lead_P - of(batch.advantage_N))
    if loss.center:
        loss_P = loss_P + loss.center * (chosen_P + rejected_P).square()
    count = lead_P.new_tensor(float(len(pairs)))
    is_right_P = (lead_P > 0).to(lead_P.dtype)
    values_P = {
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
        "reward_margin": lead_P,
        "preference_accuracy": is_right_P,
    }
    means = {name: (value_P.detach().sum(), count) for name, value_P in values_P.items()}
    for number, gap in enumerate(_gaps(lead_P.detach().double(), is_right_P.double())):
        means[f"calibration_error{PART}{number}"] = gap, count
    return LossSums(loss=loss_P.sum(), weight=count, means=means)


def _gaps(lead_P: Tensor, is_right_P: Tensor) -> Tensor:
    """Return by how much confidence is above accuracy, summed over the pairs of each bin of confidence: [B] float64.

    A pair's confidence is that of the answer which has the higher reward, from 1/2 to 1: ten bins of one width. The
    sum of their absolute values, over the number of pairs, is the expected calibration error (Guo et al. 2017,
    arXiv:1706.04599, eq. 3).
    """
    confidence_P = torch.sigmoid(lead_P.abs())
    bin_P = ((confidence_P - 0.5) * 2 * _CONFIDENCES).long().clamp(max=_CONFIDENCES - 1)
    return sums_of_sequences(confidence_P - is_right_P, bin_P, _CONFIDENCES)


def check_scored_pairs(units: Units) -> None:
    """Raise InvalidInput unless each unit's sequences 2k and 2k + 1 have one target each, and a margin is a number."""
    reason = "bradley_terry tells the chosen from the rejected by it"
    check_finite(units, "advantage", "it is the margin of bradley_terry")
    sequence_N, weight_N = read_column(units, "sequence", reason), read_column(units, "weight", reason)
    unit_N = np.repeat(np.arange(units.header.num_units), np.diff(units.target_offsets))
    live = np.stack([unit_N[weight_N > 0], sequence_N[weight_N > 0]], axis=1)
    sequences, counts = np.unique(live, axis=0, return_counts=True)
    pairs, num_answers = np.unique(sequences // np.array([1, 2]), axis=0, return_counts=True)
    broken = [*sequences[counts != 1] // np.array([1, 2]), *pairs[num_answers != 2]]
    if broken:
        unit, pair = broken[0]
        raise InvalidInput(
            f"pair {pair} is not one chosen and one rejected answer with one target each", f"unit {unit}"
        )
