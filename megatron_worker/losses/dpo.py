"""DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), with smoothed labels (Mitchell 2023, conservative DPO).

Sequences 2k and 2k + 1 of a unit are a pair; the chosen one's targets have advantage +1, the rejected one's -1. A
pair's margin is then one sum: beta * sum_n w_n A_n (log p - log p_ref).

Shape suffixes: N live targets of a bin, P pairs of a bin.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.losses.parts.aggregation import sums_of_sequences
from shared.jobs.job import DPO


def dpo_loss(dpo: DPO) -> LossFunction:
    return LossFunction(outputs=Outputs(), sums=lambda scores, batch: sums(dpo, scores, batch))


def sums(dpo: DPO, scores: Scores, batch: Batch) -> LossSums:
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
