"""Losses of preferences: Bradley-Terry, DPO, KTO."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longshore.losses import DPO, KTO, BradleyTerry
from megatron_worker.engine import PART, Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses.targets import check_finite, read_column, sums_of_sequences
from shared.errors import InvalidInput
from shared.jobs.packed import Units

# --- Reward models of pairs ---
# The log-likelihood of Bradley and Terry (1952) that the chosen answer is the better one.
#
# Sequences 2k and 2k + 1 of a unit are a pair's chosen and rejected answer, with one target each, at its last token.
# The chosen one's advantage is the pair's margin (Touvron et al. 2023, arXiv:2307.09288, eq. 2), 0 without one.
#
# Shape suffixes: N targets, P pairs, B bins of confidence; in `check_scored_pairs`, of all units.

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


# --- Losses of preference pairs ---
# DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) and its relatives (docs/losses.md).
#
# Sequences 2k and 2k + 1 of a unit are a pair; the chosen one's targets have advantage +1, the rejected one's -1. An
# answer's reward is one sum, beta * sum_n w_n (log p - log p_ref); of some objectives it is divided by the answer's
# sum of weights, or has no reference. A pair's margin is the chosen answer's reward less the rejected one's.
#
# Shape suffixes: N live targets, P pairs, of a bin; in `check_pairs`, of all units.

_AVERAGED = ("ipo", "simpo", "orpo")
_TINY = 1e-6


def dpo_loss(dpo: DPO) -> LossFunction:
    return LossFunction(outputs=Outputs(), sums=lambda scores, batch: _dpo_sums(dpo, scores, batch))


def _dpo_sums(dpo: DPO, scores: Scores, batch: Batch) -> LossSums:
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


# --- KTO of single answers (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7) ---
#
# Sequence 2k of a unit is an answer, with advantage +1 if it is desirable, else -1. Sequence 2k + 1, with advantage
# and weight 0, answers another prompt: those of a whole step estimate the policy's divergence from its reference,
# in a pass before the loss. So the estimate depends on neither bins nor ranks, and has no gradient.
#
# Shape suffixes: N targets, S sequences, of a bin; in `check_answers`, of all units.


def kto_loss(kto: KTO) -> LossFunction:
    """Without the baseline's pass, as in memory measurements, the divergence is 0."""

    def loss_of(sums: Mapping[str, float]) -> LossFunction:
        divergence = max(0.0, sums["loss"] / sums["weight"]) if sums["weight"] else 0.0
        return LossFunction(Outputs(), lambda scores, batch: _kto_sums(kto, divergence, scores, batch))

    baseline = LossFunction(Outputs(), _divergence), loss_of
    return LossFunction(Outputs(), lambda scores, batch: _kto_sums(kto, 0.0, scores, batch), baseline)


def _divergence(scores: Scores, batch: Batch) -> LossSums:
    """Add up how far the policy is from the reference on answers to other prompts; the normaliser counts them."""
    log_ratio_S, _ = _sequences(scores, batch, batch.advantage_N == 0)
    return LossSums(loss=log_ratio_S.sum(), weight=log_ratio_S.new_tensor(float(len(log_ratio_S))))


def _kto_sums(kto: KTO, divergence: float, scores: Scores, batch: Batch) -> LossSums:
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
