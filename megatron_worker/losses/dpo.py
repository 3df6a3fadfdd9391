"""DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), with smoothed labels (Mitchell 2023, conservative DPO).

Sequences 2k and 2k + 1 of a unit are a pair; the chosen one's targets have advantage +1, the rejected one's -1. A
pair's margin is then one sum: beta * sum_n w_n A_n (log p - log p_ref).

Shape suffixes: N live targets, P pairs, of a bin; in `check_pairs`, of all units.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses.columns import read_column
from megatron_worker.losses.targets import sums_of_sequences
from shared.errors import InvalidInput
from shared.jobs.losses import DPO
from shared.jobs.packed import Units


def dpo_loss(dpo: DPO) -> LossFunction:
    return LossFunction(outputs=Outputs(), sums=lambda scores, batch: _sums(dpo, scores, batch))


def _sums(dpo: DPO, scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin's pairs; the normaliser counts them."""
    assert scores.logprob_N is not None
    live_N = batch.weight_N > 0
    pairs, pair_N = torch.unique(batch.sequence_N[live_N] // 2, return_inverse=True)
    sign_N = batch.advantage_N[live_N]
    reward_N = dpo.beta * batch.weight_N[live_N] * (scores.logprob_N - batch.ref_logprob_N)[live_N]
    chosen_P, rejected_P = (
        sums_of_sequences(reward_N.masked_fill(sign_N != sign, 0.0), pair_N, len(pairs)) for sign in (1, -1)
    )
    margin_P = chosen_P - rejected_P
    loss_P = -(1 - dpo.label_smoothing) * logsigmoid(margin_P) - dpo.label_smoothing * logsigmoid(-margin_P)
    weight = margin_P.new_tensor(float(len(pairs)))
    values_P = {
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
        "reward_margin": margin_P,
        "preference_accuracy": (margin_P > 0).to(margin_P.dtype),
    }
    means: dict[str, tuple[Tensor, Tensor]] = {n: (value_P.detach().sum(), weight) for n, value_P in values_P.items()}
    return LossSums(loss=loss_P.sum(), weight=weight, means=means)


def check_pairs(units: Units) -> None:
    """Raise InvalidInput unless of sequences 2k and 2k + 1 of a unit one is chosen, the other rejected.

    The chosen one's targets have advantage +1, the rejected one's -1; both have targets.
    """
    reason = "dpo tells the chosen from the rejected by it"
    advantage_N, sequence_N = read_column(units, "advantage", reason), read_column(units, "sequence", reason)
    live_N = read_column(units, "weight", reason) > 0
    unit_N = np.repeat(np.arange(units.header.num_units), np.diff(units.target_offsets))
    live = np.stack([unit_N[live_N], sequence_N[live_N]], axis=1)
    sequences, sequence_of_N = np.unique(live, axis=0, return_inverse=True)
    signs = np.zeros((len(sequences), 2), dtype=bool)  # has a chosen target, has a rejected one
    for column, sign in enumerate((1.0, -1.0)):
        signs[sequence_of_N.reshape(-1)[advantage_N[live_N] == sign], column] = True
    known_N = np.isin(advantage_N[live_N], (1.0, -1.0))
    if not known_N.all():
        raise InvalidInput("an advantage is neither +1 nor -1", f"unit {unit_N[live_N][~known_N][0]}")
    pairs, pair_of = np.unique(sequences // np.array([1, 2]), axis=0, return_inverse=True)
    num_chosen_P, num_rejected_P = (
        np.bincount(pair_of.reshape(-1), weights=signs[:, column], minlength=len(pairs)) for column in (0, 1)
    )
    whole_P = (num_chosen_P == 1) & (num_rejected_P == 1) & (np.bincount(pair_of.reshape(-1)) == 2)
    if not whole_P.all():
        unit, pair = pairs[~whole_P][0]
        raise InvalidInput(
            f"pair {pair} is not one chosen and one rejected sequence, each with targets", f"unit {unit}"
        )
