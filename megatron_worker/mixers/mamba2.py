"""The state space of Mamba-2 over a forest of tokens (Dao & Gu 2024, arXiv:2405.21060), in chunks.

A state S, [P, N] a head, is written and read by each token: with a value x, a key B, a query C, a step d and a decay a
in (0, 1], `S = a S + d x B'`, and the output is `S C`. A token's state is its parent's (see delta_rule.py, whose plan
of chunks this follows). Within a chunk all tokens are one masked product (the paper's section 6); between chunks only
the states are passed down, level by level. Everything is in float32 at least.

Shape suffixes: T tokens of a bin, X chunks, C tokens of a chunk, H heads, G groups of R heads each, P size of a value,
N size of a state, I all heads' values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.mixers.delta_rule import RecurrentPlan, decays_in_chunks, in_chunks


def scan(
    value_THP: Tensor, key_TGN: Tensor, query_TGN: Tensor, step_TH: Tensor, log_decay_TH: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Return the tokens' outputs, [T, H, P] in float32 at least."""
    wide = torch.promote_types(torch.float32, value_THP.dtype)
    written_THP = value_THP.to(wide) * step_TH.to(wide)[..., None]
    written, key, query, log_decay = (
        in_chunks(x, plan)
        for x in (written_THP, key_TGN.to(wide), query_TGN.to(wide), log_decay_TH.to(wide)[..., None])
    )
    heads = query.shape[1], -1  # by group
    written_XGRCP, log_decay_XGRC = written.unflatten(1, heads), log_decay[..., 0].unflatten(1, heads)
    key_XG1CN, query_XG1CN = key[:, :, None], query[:, :, None]
    between_XGRCC, from_start_XGRC, to_end_XGRC = decays_in_chunks(log_decay_XGRC)
    output_XGRCP = (query_XG1CN @ key_XG1CN.transpose(-1, -2) * between_XGRCC) @ written_XGRCP
    added_XGRPN = (written_XGRCP * to_end_XGRC[..., None]).transpose(-1, -2) @ key_XG1CN
    first = plan.levels[0]  # the number of chunks that begin with no state
    states, before, start = added_XGRPN[:first], [], first
    for num_chunks, parent in zip(plan.levels[1:], plan.parents, strict=True):
        here = slice(start, start + num_chunks)
        before.append(states.index_select(0, parent))
        states = before[-1] * from_start_XGRC[here, ..., -1, None, None] + added_XGRPN[here]
        start += num_chunks
    if before:
        read = query_XG1CN[first:] @ torch.cat(before).transpose(-1, -2) * from_start_XGRC[first:, ..., None]
        output_XGRCP = torch.cat([output_XGRCP[:first], output_XGRCP[first:] + read])
    output_XCHP = output_XGRCP.flatten(1, 2).transpose(1, 2)
    return output_XCHP.flatten(0, 1).index_select(0, plan.place_T)


def steps(made_TH: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return how much each token writes, [T, H] in float32 at least."""
    wide = torch.promote_types(torch.float32, made_TH.dtype)
    return F.softplus(made_TH.to(wide) + bias_H.to(wide)).clamp(min=least)


def gated_group_norm(x_TI: Tensor, gate_TI: Tensor, scale_I: Tensor, num_groups: int, eps: float) -> Tensor:
    """Return outputs times the SiLU of their gates, after a root mean square norm of each group of heads."""
    gated_TGX = (x_TI * F.silu(gate_TI.to(x_TI.dtype))).unflatten(-1, (num_groups, -1))
    return scale_I * F.rms_norm(gated_TGX, (gated_TGX.shape[-1],), eps=eps).flatten(-2)
