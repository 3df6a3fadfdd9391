"""The experts that each token goes to, and their weights: one formula for trainer and sampler.

Shape suffixes: T tokens, H hidden size, E experts, K experts of a token, G groups of X experts each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.families.architecture import Mixture


def scores(hidden_TH: Tensor, router_EH: Tensor, mixture: Mixture, bias_E: Tensor | None = None) -> Tensor:
    """Return how much each token wants of each expert, [T, E], in float32 (or more); logits as they are computed."""
    wide = torch.promote_types(torch.float32, hidden_TH.dtype)
    match mixture.scoring:
        case "softmax":
            return F.linear(hidden_TH, router_EH).softmax(dim=-1, dtype=wide)
        case "chosen softmax":
            return F.linear(hidden_TH, router_EH, bias_E)
        case "sigmoid":
            return F.linear(hidden_TH.to(wide), router_EH.to(wide)).sigmoid()


def choose(score_TE: Tensor, mixture: Mixture, correction_E: Tensor | None = None) -> Tensor:
    """Return the numbers of the experts with the highest scores, [T, K].

    With groups, only from the groups whose two best experts have the highest sums (DeepSeek-AI 2024, arXiv:2412.19437,
    section 2.1.2).

    `correction_E`: added to scores only for the choice, so that experts are chosen equally often.
    """
    wanted_TE = score_TE.detach() if correction_E is None else score_TE.detach() + correction_E
    if mixture.chosen_groups < mixture.num_groups:
        wanted_TGX = wanted_TE.unflatten(1, (mixture.num_groups, -1))
        group_TC = wanted_TGX.topk(2, dim=-1).values.sum(-1).topk(mixture.chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(wanted_TGX[..., 0], dtype=torch.bool).scatter(1, group_TC, False)
        wanted_TE = wanted_TGX.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)
    return wanted_TE.topk(mixture.experts_per_token, dim=-1).indices


def weights(score_TE: Tensor, expert_TK: Tensor, mixture: Mixture) -> Tensor:
    """Return the weights of the chosen experts' outputs, [T, K]."""
    weight_TK = score_TE.gather(1, expert_TK)
    if mixture.scoring == "chosen softmax":
        return weight_TK.softmax(dim=-1)
    if mixture.is_normalised:
        weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * mixture.scale
