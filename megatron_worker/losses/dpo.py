"""Losses of preference pairs: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) and its relatives (docs/losses.md).

Sequences 2k and 2k + 1 of a unit are a pair; the chosen one's targets have advantage +1, the rejected one's -1. An
answer's reward is one sum, beta * sum_n w_n (log p - log p_ref); of some objectives it is divided by the answer's sum
of weights, or has no reference. A pair's margin is the chosen answer's reward less the rejected one's.

Shape suffixes: N live targets, P pairs, of a bin; in `check_pairs`, of all units.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.losses.columns import read_column
from megatron_worker.losses.targets import sums_of_sequences
from megatron_worker.sums import LossSums
from shared.errors import InvalidInput
from shared.jobs.losses import DPO
from shared.jobs.packed import Units

_AVERAGED = ("ipo", "simpo", "orpo")
_TINY = 1e-6


def dpo_loss(dpo: DPO) -> LossFunction:
    return LossFunction(outputs=Outputs(), sums=lambda scores, batch: _sums(dpo, scores, batch))


def _sums(dpo: DPO, scores: Scores, batch: Batch) -> LossSums:
    """Sums over a bin's pairs; the normaliser counts them."""
    assert scores.logprob_N is not None
    live_N = batch.weight_N > 0
    pairs, pair_N = torch.unique(batch.sequence_N[live_N] // 2, return_inverse=True)
    sign_N, weight_N = batch.advantage_N[live_N], batch.weight_N[live_N]

    def of_answer(value_N: Tensor, sign: int) -> Tensor:
        return sums_of_sequences(value_N.masked_fill(sign_N != sign, 0.0), pair_N, len(pairs))

    log_ratio_N = scores.logprob_N - batch.ref_logprob_N if dpo.has_reference else scores.logprob_N
    reward_N = dpo.beta * weight_N * log_ratio_N[live_N]
    chosen_P, rejected_P = of_answer(reward_N, 1), of_answer(reward_N, -1)
    length_P = of_answer(weight_N, 1).clamp(min=_TINY)
    if dpo.objective in _AVERAGED:
        chosen_P, rejected_P = chosen_P / length_P, rejected_P / of_answer(weight_N, -1).clamp(min=_TINY)
    loss_P = _losses(dpo, chosen_P, rejected_P)
    values_P = {
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
        "reward_margin": chosen_P - rejected_P,
        "preference_accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
    }
    if nll_weight := 1.0 if dpo.objective == "orpo" else dpo.rpo_alpha:
        values_P["nll_chosen"] = -of_answer(weight_N * scores.logprob_N[live_N], 1) / length_P
        loss_P = loss_P + nll_weight * values_P["nll_chosen"]
    weight = chosen_P.new_tensor(float(len(pairs)))
    means: dict[str, tuple[Tensor, Tensor]] = {n: (value_P.detach().sum(), weight) for n, value_P in values_P.items()}
    return LossSums(loss=loss_P.sum(), weight=weight, means=means)


def _losses(dpo: DPO, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return each pair's loss of the rewards of its answers, without the chosen answer's own likelihood."""
    margin_P, share = chosen_P - rejected_P, dpo.label_smoothing
    match dpo.objective:
        case "sigmoid":
            return -(1 - share) * logsigmoid(margin_P) - share * logsigmoid(-margin_P)
        case "robust":
            return (share * logsigmoid(-margin_P) - (1 - share) * logsigmoid(margin_P)) / (1 - 2 * share)
        case "hinge":
            return torch.relu(1 - margin_P)
        case "ipo":
            return ((margin_P - 0.5) / dpo.beta).square()
        case "apo_zero":
            return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)
        case "apo_down":
            return torch.sigmoid(chosen_P) + torch.sigmoid(-margin_P)
        case "simpo":
            return -logsigmoid(margin_P - dpo.gamma)
        case "orpo":
            return -dpo.beta * logsigmoid(_log_odds(chosen_P / dpo.beta) - _log_odds(rejected_P / dpo.beta))


def _log_odds(logprob_P: Tensor) -> Tensor:
    """Return log(p / (1 - p)). Nearer to p = 1 than a millionth it is constant: its gradient would not be finite."""
    logprob_P = logprob_P.clamp(max=-_TINY)
    return logprob_P - torch.log(-torch.expm1(logprob_P))


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
