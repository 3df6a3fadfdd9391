"""The gated delta rule and Mamba-2, in chunks over the forest of a bin."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.mixers.forest_calls import find_nodes
from shared.families.architecture import DeltaNet

# --- The gated delta rule over a forest of tokens (Yang et al. 2024, arXiv:2412.06464), in chunks ---
#
# A state S, [K, V] a head, is read and written by each token: with a key k, a query q, a value v, a decay a in (0, 1]
# and a step b in (0, 1), `S = a S + k (b (v - (a S)' k))'`, and the output is `S' q`. A token's state is its parent's,
# so that no sequence sees another and a branch starts from the state of its prefix, which is computed once.
#
# Each node of the forest is cut into chunks. Within a chunk the updates are one triangular system, of all chunks at
# once (the paper's section 3.3). Between chunks the states are passed down, level by level: a chunk's level is the
# number of chunks above it, so that a step of the scan computes all sequences and branches at once. Gradients are
# torch's own: those of a prefix's state are added up over its branches. Everything is in float32 at least.
#
# Shape suffixes: T tokens of a bin, X chunks, C tokens of a chunk, H key heads, G value heads, K size of a key, V size
# of a value, J channels of the convolution, W its width.

_CHUNK = 64
_CHUNK_MULTIPLE = 16
_NORM_EPS = 1e-6  # added to the squared length of keys and queries, as flash-linear-attention does


@dataclass(frozen=True)
class RecurrentPlan:
    """A bin's chunks, in the order of their levels.

    Attributes:
        token_XC: the chunks' tokens; T if a chunk has fewer than C.
        place_T: each token's place among the X * C.
        levels: for each level, how many chunks it has.
        parents: for each level but the first, its chunks' parents' places in the level before.
        ancestor_WT: each token's parent, its parent, and so on, W - 1 of them: T if there is none.
    """

    token_XC: Tensor
    place_T: Tensor
    levels: tuple[int, ...]
    parents: tuple[Tensor, ...]
    ancestor_WT: tuple[Tensor, ...]


def plan_recurrence(parent_T: Tensor, conv_width: int) -> RecurrentPlan:
    """Plan a bin. Raises InvalidInput unless parents come first and each subtree's tokens are contiguous."""
    nodes = find_nodes(parent_T.cpu().numpy())
    lengths = (nodes.end_N - nodes.begin_N).tolist()
    size = min(_CHUNK, -(-max(lengths, default=1) // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    by_level: list[list[tuple[int, int, int]]] = []  # first token, number of tokens, place of the parent
    last_of_node: list[tuple[int, int]] = []  # level and place of each node's last chunk
    for begin, length, parent in zip(nodes.begin_N.tolist(), lengths, nodes.parent_N.tolist(), strict=True):
        level, place = last_of_node[parent] if parent >= 0 else (-1, -1)
        for offset in range(0, length, size):
            level += 1
            if level == len(by_level):
                by_level.append([])
            by_level[level].append((begin + offset, min(size, length - offset), place))
            place = len(by_level[level]) - 1
        last_of_node.append((level, place))
    device, num_tokens = parent_T.device, len(parent_T)
    first_X, length_X, _ = (
        torch.tensor([chunk for chunks in by_level for chunk in chunks], device=device).view(-1, 3).t()
    )
    offset_C = torch.arange(size, device=device)
    is_token_XC = offset_C < length_X[:, None]
    token_XC = torch.where(is_token_XC, first_X[:, None] + offset_C, num_tokens)
    place_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
    place_T[token_XC[is_token_XC]] = is_token_XC.flatten().nonzero()[:, 0]
    return RecurrentPlan(
        token_XC=token_XC,
        place_T=place_T,
        levels=tuple(map(len, by_level)),
        parents=tuple(torch.tensor([place for *_, place in chunks], device=device) for chunks in by_level[1:]),
        ancestor_WT=_ancestors(parent_T, conv_width),
    )


def _ancestors(parent_T: Tensor, conv_width: int) -> tuple[Tensor, ...]:
    none = len(parent_T)
    padded = F.pad(torch.where(parent_T < 0, none, parent_T), (0, 1), value=none)
    found = [padded[:-1]]
    while len(found) < conv_width - 1:
        found.append(padded[found[-1]])
    return tuple(found)


def convolve(input_TJ: Tensor, weight_JW: Tensor, plan: RecurrentPlan, bias_J: Tensor | None = None) -> Tensor:
    """Return each channel's sum over a token and its ancestors, by their weights (the token's own is the last), after
    a SiLU: [T, J]. Before a sequence's first token there are zeros."""
    padded = F.pad(input_TJ, (0, 0, 0, 1))
    output_TJ = input_TJ * weight_JW[:, -1]
    for distance, ancestor_T in enumerate(plan.ancestor_WT, start=1):
        output_TJ = output_TJ + padded.index_select(0, ancestor_T) * weight_JW[:, -1 - distance]
    return F.silu(output_TJ if bias_J is None else output_TJ + bias_J)


def decays_in_chunks(log_decay_XGC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decay factors of states: from each token of a chunk (the last dimension) to itself and each later one
    (the dimension before), 0 to earlier ones; from the chunk's beginning to each token; from each token to its end.

    They are made of differences of sums, which are computed in float64: a tenth of the error.
    """
    decayed_XGC = log_decay_XGC.double().cumsum(-1)
    between_XGCC = (decayed_XGC[..., :, None] - decayed_XGC[..., None, :]).to(log_decay_XGC.dtype)
    later_CC = torch.ones(between_XGCC.shape[-2:], dtype=torch.bool, device=log_decay_XGC.device).triu(1)
    between_XGCC = between_XGCC.masked_fill(later_CC, -torch.inf).exp()
    to_end = (decayed_XGC[..., -1:] - decayed_XGC).to(log_decay_XGC.dtype).exp()
    return between_XGCC, decayed_XGC.to(log_decay_XGC.dtype).exp(), to_end


def gated_delta_rule(
    query_THK: Tensor, key_THK: Tensor, value_TGV: Tensor, log_decay_TG: Tensor, step_TG: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Return the tokens' outputs, [T, G, V] in the values' dtype.

    Queries and keys are divided by their lengths, queries by the root of their size too.
    """
    query, key, value, log_decay, step = (
        in_chunks(x.to(torch.promote_types(torch.float32, x.dtype)), plan)
        for x in (query_THK, key_THK, value_TGV, log_decay_TG[..., None], step_TG[..., None])
    )
    per_key_head = value_TGV.shape[1] // key_THK.shape[1]
    query, key = (unit_length(x).repeat_interleave(per_key_head, dim=1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    between_XGCC, from_start_XGC, to_end_XGC = decays_in_chunks(log_decay[..., 0])
    from_start, to_end = from_start_XGC[..., None], to_end_XGC[..., None]
    step_key = key * step
    system_XGCC = (step_key @ key.transpose(-1, -2)) * between_XGCC
    seen_XGCC = (query @ key.transpose(-1, -2)) * between_XGCC
    # What each token would write if the state before the chunk were zero, and what to subtract for that state.
    written = torch.linalg.solve_triangular(system_XGCC, value * step, upper=False, unitriangular=True)
    read_first = torch.linalg.solve_triangular(system_XGCC, step_key * from_start, upper=False, unitriangular=True)
    query = query * from_start
    key = (key * to_end).transpose(-1, -2)
    whole_decay = from_start[..., -1, :, None]
    outputs, states, start = [], value.new_empty(0), 0
    for level, num_chunks in enumerate(plan.levels):
        here = slice(start, start + num_chunks)
        if level == 0:
            change = written[here]
            outputs.append(seen_XGCC[here] @ change)
            states = key[here] @ change
        else:
            before = states.index_select(0, plan.parents[level - 1])
            change = written[here] - read_first[here] @ before
            outputs.append(query[here] @ before + seen_XGCC[here] @ change)
            states = before * whole_decay[here] + key[here] @ change
        start += num_chunks
    output_XCGV = torch.cat(outputs).transpose(1, 2)
    return output_XCGV.flatten(0, 1).index_select(0, plan.place_T).to(value_TGV.dtype)


def heads_of(mixed_TJ: Tensor, a: DeltaNet, num_ranks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values that a rank of `num_ranks` has, [T, heads, size] each."""
    query, key, value = mixed_TJ.split([size // num_ranks for size in a.mixed_sizes], dim=-1)
    return (
        query.unflatten(-1, (-1, a.key_size)),
        key.unflatten(-1, (-1, a.key_size)),
        value.unflatten(-1, (-1, a.value_size)),
    )


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def in_chunks(rows: Tensor, plan: RecurrentPlan) -> Tensor:
    """Return rows of tokens, [T, heads, size], by chunk: [X, heads, C, size], zeros if a chunk has no token.

    Without a decay and a step, these change no state.
    """
    padded = F.pad(rows, (0, 0, 0, 0, 0, 1))
    return padded[plan.token_XC].transpose(1, 2)


def log_decay(decay_TG: Tensor, log_rate_G: Tensor, bias_G: Tensor) -> Tensor:
    """Return the logarithm of each token's decay factor, at most 0: float32 at least."""
    wide = torch.promote_types(torch.float32, decay_TG.dtype)
    return -log_rate_G.to(wide).exp() * F.softplus(decay_TG.to(wide) + bias_G)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head's output, times the SiLU of its gate; in float32, except the weight."""
    wide = torch.promote_types(torch.float32, x.dtype)
    normed = weight * F.rms_norm(x.to(wide), (x.shape[-1],), eps=eps).to(x.dtype)
    return (normed * F.silu(gate.to(wide))).to(x.dtype)


# --- The state space of Mamba-2 over a forest of tokens (Dao & Gu 2024, arXiv:2405.21060), in chunks ---
#
# A state S, [P, N] a head, is written and read by each token: with a value x, a key B, a query C, a step d and a decay
# a in (0, 1], `S = a S + d x B'`, and the output is `S C`. A token's state is its parent's; the plan
# of chunks is the delta rule's above. Within a chunk all tokens are one masked product (the paper's section 6); between
# chunks only the states are passed down, level by level. Everything is in float32 at least.
#
# Shape suffixes: T tokens of a bin, X chunks, C tokens of a chunk, H heads, G groups of R heads each, P size of a
# value, N size of a state, I all heads' values.


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
