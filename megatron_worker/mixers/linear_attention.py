"""The gated delta rule and Mamba-2, in chunks over the forest of a bin."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.mixers.forest_calls import Ints, Nodes, find_nodes
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
# If context-parallel ranks share a bin out, a branch's parent may be on another rank. A state is a linear function of
# any state before it, so each rank first computes this function for the states that other ranks need. One collective
# gathers all of them; every rank then computes the states that enter its part, and scans its part as above.
#
# Shape suffixes: T tokens of a bin, X chunks, C tokens of a chunk, H key heads, G value heads, K size of a key, V size
# of a value, J channels of the convolution, W its width.

_CHUNK = 64
_CHUNK_MULTIPLE = 16
_NORM_EPS = 1e-6  # added to the squared length of keys and queries, as flash-linear-attention does


@dataclass(frozen=True)
class Share:
    """The part of a bin that a context-parallel rank computes.

    Attributes:
        parts: each rank's tokens, as slices of the bin in its order. A rank's rows are those of its slices.
        gather: gathers equally many rows from every rank, in the order of ranks. Their gradients are summed over ranks.
    """

    rank: int
    parts: tuple[tuple[slice, ...], ...]
    gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Crossing:
    """The parts of a bin that context-parallel ranks pass to each other. All ranks give equally much.

    Attributes:
        levels, parents: as in RecurrentPlan, of the chunks that lead to states that are given; the levels' chunks are
            named by their places X.
        given: places among all chunks of `levels`; the states behind these chunks are given.
        states: for each state that is passed, in the bin's order, its row among the gathered ones, and which of the
            states passed before it is the nearest above it on another rank (None: there is none).
        entering: for each chunk of the plan's first level, which of `states` it begins with; their number: zeros.
        row_G: this rank's tokens that others' convolutions look back on.
    """

    gather: Callable[[Tensor], Tensor]
    levels: tuple[Tensor, ...]
    parents: tuple[Tensor, ...]
    given: Tensor
    states: tuple[tuple[int, int | None], ...]
    entering: Tensor
    row_G: Tensor


@dataclass(frozen=True)
class RecurrentPlan:
    """The chunks of a bin, or of a rank's share of it, in the order of their levels. T counts the rank's tokens.

    Attributes:
        token_XC: the chunks' tokens; T if a chunk has fewer than C.
        place_T: each token's place among the X * C.
        levels: for each level, how many chunks it has.
        parents: for each level but the first, its chunks' parents' places in the level before.
        ancestor_WT: each token's parent, its parent, and so on, W - 1 of them. Behind this rank's tokens come those
            that the ranks give by `Crossing.row_G`; behind these is zero, for a token that has none.
        crossing: None if nothing passes between ranks.
    """

    token_XC: Tensor
    place_T: Tensor
    levels: tuple[int, ...]
    parents: tuple[Tensor, ...]
    ancestor_WT: tuple[Tensor, ...]
    crossing: Crossing | None = None


def plan_recurrence(parent_T: Tensor, conv_width: int, share: Share | None = None) -> RecurrentPlan:
    """Plan a bin, or a rank's share of it; `parent_T` is the whole bin's.

    Raises InvalidInput unless parents come first and each subtree's tokens are contiguous.
    """
    device, parent = parent_T.device, parent_T.cpu().numpy()
    rank, parts = (share.rank, share.parts) if share else (0, ((slice(0, len(parent)),),))
    owner_T, row_T = np.empty_like(parent), np.empty_like(parent)
    for owner, own in enumerate(parts):
        tokens = np.concatenate([np.arange(part.start, part.stop) for part in own])
        owner_T[tokens], row_T[tokens] = owner, np.arange(len(tokens))
    nodes = find_nodes(parent, [edge for own in parts for part in own for edge in (part.start, part.stop)])
    owner_N, above_N = owner_T[nodes.begin_N], nodes.parent_N
    # A node's last state is passed to the ranks that have its children.
    passed = np.unique(above_N[(above_N >= 0) & (owner_N[above_N] != owner_N)])
    own_N = np.flatnonzero(owner_N == rank)
    longest = int((nodes.end_N - nodes.begin_N)[own_N].max(initial=1))
    size = min(_CHUNK, -(-longest // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    levels = _levels(nodes, own_N, size, passed)
    chunks = [(row_T[begin], min(size, end - begin)) for begin, end, _ in chain(*levels)]
    first_X, length_X = torch.tensor(np.array(chunks).reshape(-1, 2), device=device).t()
    offset_C = torch.arange(size, device=device)
    is_token_XC = offset_C < length_X[:, None]
    num_tokens = int((owner_T == rank).sum())
    token_XC = torch.where(is_token_XC, first_X[:, None] + offset_C, num_tokens)
    place_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
    place_T[token_XC[is_token_XC]] = is_token_XC.flatten().nonzero()[:, 0]
    ancestor_WT, row_G = _ancestors(parent, conv_width, owner_T, row_T, rank)
    crossing = None
    if share is not None and len(passed):
        crossing = _crossing(nodes, owner_N, passed, levels, size, share, torch.from_numpy(row_G).to(device))
    return RecurrentPlan(
        token_XC=token_XC,
        place_T=place_T,
        levels=tuple(map(len, levels)),
        parents=_parents(levels, device)[1:],
        ancestor_WT=tuple(torch.from_numpy(ancestor_T).to(device) for ancestor_T in ancestor_WT),
        crossing=crossing,
    )


_Levels = list[list[tuple[int, int, int]]]


def _levels(nodes: Nodes, chosen: Ints, size: int, passed: Ints) -> _Levels:
    """Cut chosen nodes into chunks: for each level its chunks' first tokens, the ends of their nodes, and the places of
    their parents in the level before. At the first level the place is that in `passed`, or its length.
    """
    number = {node: index for index, node in enumerate(passed.tolist())}
    levels: _Levels = []
    last: dict[int, tuple[int, int]] = {}  # level and place of each node's last chunk
    for node in chosen.tolist():
        begin, end, above = (int(x[node]) for x in (nodes.begin_N, nodes.end_N, nodes.parent_N))
        level, place = last.get(above, (-1, number.get(above, len(passed))))
        for first in range(begin, end, size):
            level += 1
            if level == len(levels):
                levels.append([])
            levels[level].append((first, end, place))
            place = len(levels[level]) - 1
        last[node] = level, place
    return levels


def _parents(levels: _Levels, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([place for *_, place in chunks], device=device) for chunks in levels)


def _crossing(
    nodes: Nodes, owner_N: Ints, passed: Ints, levels: _Levels, size: int, share: Share, row_G: Tensor
) -> Crossing:
    above, owner, device = nodes.parent_N.tolist(), owner_N.tolist(), row_G.device
    number, row_of, own = {}, [0] * len(share.parts), []
    states: list[tuple[int, int | None]] = []
    for index, node in enumerate(passed.tolist()):
        number[node] = index
        nearest = node
        while nearest >= 0 and owner[nearest] == owner[node]:
            if owner[node] == share.rank:
                own.append(nearest)
            nearest = above[nearest]
        states.append((row_of[owner[node]], number.get(nearest)))
        row_of[owner[node]] += 1
    most = max(row_of)
    states = [(owner[node] * most + row, up) for node, (row, up) in zip(passed.tolist(), states, strict=True)]
    own_passed = [node for node in passed.tolist() if owner[node] == share.rank]
    paths = _levels(nodes, np.unique(own or owner.index(share.rank)), size, passed)
    place_of = {first: place for place, (first, *_) in enumerate(chain(*levels))}
    among = {end: place for place, (_, end, _) in enumerate(chain(*paths))}  # a node's last chunk is the deepest
    given = [among[int(nodes.end_N[node])] for node in own_passed]
    return Crossing(
        gather=share.gather,
        levels=tuple(torch.tensor([place_of[first] for first, *_ in chunks], device=device) for chunks in paths),
        parents=_parents(paths, device)[1:],
        given=torch.tensor(given + [0] * (most - len(given)), device=device),  # what has no state gives any
        states=tuple(states),
        entering=_parents(levels[:1], device)[0],
        row_G=row_G,
    )


def _ancestors(parent: Ints, conv_width: int, owner_T: Ints, row_T: Ints, rank: int) -> tuple[list[Ints], Ints]:
    """Return for a rank's tokens the rows of their ancestors, as in RecurrentPlan, and the rows that it gives."""
    none = len(parent)
    up_T = np.append(np.where(parent < 0, none, parent), none)
    found = [up_T[:-1]]
    while len(found) < conv_width - 1:
        found.append(up_T[found[-1]])
    owner_and_none = np.append(owner_T, -1)
    needed = np.unique(np.concatenate([x[(x < none) & (owner_and_none[x] != owner_T)] for x in found]))
    num_ranks, num_own = int(owner_T.max(initial=0)) + 1, int((owner_T == rank).sum())
    most = int(np.bincount(owner_T[needed], minlength=num_ranks).max(initial=0))
    row_of = np.append(row_T, num_own + num_ranks * most)
    given = np.zeros(most, dtype=np.int64)
    for owner in range(num_ranks):
        theirs = needed[owner_T[needed] == owner]
        if owner == rank:
            given[: len(theirs)] = row_T[theirs]
        else:
            row_of[theirs] = num_own + owner * most + np.arange(len(theirs))
    own = owner_T == rank
    return [row_of[x[own]] for x in found], given


def entering_states(
    crossing: Crossing,
    start: Tensor,
    advance: Callable[[Tensor, Tensor], Tensor],
    apply: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Return the states that enter the chunks of the first level, [chunks, ...].

    Args:
        start: the function from a state to itself, as one tensor.
        advance: returns the functions behind chunks, given the places X of these and the functions before them.
        apply: returns what a function makes of a state; of None, which is zero, also.
    """
    made: list[Tensor] = []
    for level, chunk in enumerate(crossing.levels):
        if level:
            before = made[-1].index_select(0, crossing.parents[level - 1])
        else:
            before = start.expand(len(chunk), *start.shape)
        made.append(advance(chunk, before))
    function_R = crossing.gather(torch.cat(made).index_select(0, crossing.given))
    states: list[Tensor] = []
    for row, above in crossing.states:
        states.append(apply(function_R[row], None if above is None else states[above]))
    return torch.stack([*states, torch.zeros_like(states[0])]).index_select(0, crossing.entering)


def with_ancestors(input_TJ: Tensor, plan: RecurrentPlan) -> Iterator[Tensor]:
    """Yield the tokens' inputs, their parents', and so on, [T, J] each. Before a sequence's first token are zeros."""
    looked_at = input_TJ
    if plan.crossing is not None:
        looked_at = torch.cat([input_TJ, plan.crossing.gather(input_TJ.index_select(0, plan.crossing.row_G))])
    padded = F.pad(looked_at, (0, 0, 0, 1))
    yield input_TJ
    for ancestor_T in plan.ancestor_WT:
        yield padded.index_select(0, ancestor_T)


def convolve(inputs: Iterable[Tensor], weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
    """Return each channel's sum over a token and its ancestors, by their weights (the token's own is the last): [T, J].
    `inputs`: the tokens' own, then those of the nearest ancestors, and so on."""
    output_TJ = reduce(torch.add, (x_TJ * weight_JW[:, -1 - distance] for distance, x_TJ in enumerate(inputs)))
    return output_TJ if bias_J is None else output_TJ + bias_J


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
    query_THK: Tensor,
    key_THK: Tensor,
    value_TGV: Tensor,
    log_decay_TG: Tensor,
    step_TG: Tensor,
    plan: RecurrentPlan,
    entering: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens' outputs, [T, G, V] in the values' dtype, and the last level's states, [chunks, G, K, V].

    Queries and keys are divided by their lengths, queries by the root of their size too. `entering`: the states before
    the first level's chunks; None: zeros, or what other ranks pass.
    """
    query, key, value, log_decay, step = (
        in_chunks(x.to(torch.promote_types(torch.float32, x.dtype)), plan)
        for x in (query_THK, key_THK, value_TGV, log_decay_TG[..., None], step_TG[..., None])
    )
    query, key = _of_value_heads(query, key, value)
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

    def advance(chunk: Tensor, function: Tensor) -> Tensor:
        own = F.pad(written[chunk], (function.shape[-1] - written.shape[-1], 0))
        return function * whole_decay[chunk] + key[chunk] @ (own - read_first[chunk] @ function)

    def apply(function: Tensor, state: Tensor | None) -> Tensor:
        factor, added = function.split([key.shape[-2], value.shape[-1]], dim=-1)
        return added if state is None else added + factor @ state

    if plan.crossing is not None:
        identity = F.pad(torch.eye(key.shape[-2], dtype=key.dtype, device=key.device), (0, value.shape[-1]))
        entering = entering_states(plan.crossing, identity.expand(key.shape[1], -1, -1), advance, apply)
    outputs, states, start = [], value.new_empty(0), 0
    for level, num_chunks in enumerate(plan.levels):
        here = slice(start, start + num_chunks)
        before = states.index_select(0, plan.parents[level - 1]) if level else entering
        if before is None:
            change = written[here]
            outputs.append(seen_XGCC[here] @ change)
            states = key[here] @ change
        else:
            change = written[here] - read_first[here] @ before
            outputs.append(query[here] @ before + seen_XGCC[here] @ change)
            states = before * whole_decay[here] + key[here] @ change
        start += num_chunks
    output_XCGV = torch.cat(outputs).transpose(1, 2)
    return output_XCGV.flatten(0, 1).index_select(0, plan.place_T).to(value_TGV.dtype), states


def delta_step(
    query_BHK: Tensor, key_BHK: Tensor, value_BGV: Tensor, log_decay_BG: Tensor, step_BG: Tensor, state_BGKV: Tensor
) -> Tensor:
    """Return the outputs of one token of each of B sequences, as `gated_delta_rule` does, and change their states."""
    query, key, value = (x.to(state_BGKV.dtype) for x in (query_BHK, key_BHK, value_BGV))
    query, key = _of_value_heads(query, key, value)
    state_BGKV *= log_decay_BG.exp()[..., None, None]
    change_BG1V = (value[:, :, None] - key[:, :, None] @ state_BGKV) * step_BG.to(state_BGKV.dtype)[..., None, None]
    state_BGKV.addcmul_(key[..., None], change_BG1V)
    return (query[:, :, None] @ state_BGKV)[:, :, 0].to(value_BGV.dtype)


def _of_value_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return scaled queries and keys for each value head; heads are dimension 1."""
    per_key_head = value.shape[1] // key.shape[1]
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS) for x in (query, key))
    query, key = (x.repeat_interleave(per_key_head, dim=1) for x in (query, key))
    return query * query.shape[-1] ** -0.5, key


def heads_of(mixed_TJ: Tensor, a: DeltaNet, num_ranks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values that a rank of `num_ranks` has, [T, heads, size] each."""
    query, key, value = mixed_TJ.split([size // num_ranks for size in a.mixed_sizes], dim=-1)
    return (
        query.unflatten(-1, (-1, a.key_size)),
        key.unflatten(-1, (-1, a.key_size)),
        value.unflatten(-1, (-1, a.value_size)),
    )


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
    value_THP: Tensor,
    key_TGN: Tensor,
    query_TGN: Tensor,
    step_TH: Tensor,
    log_decay_TH: Tensor,
    plan: RecurrentPlan,
    entering: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens' outputs, [T, H, P], and the last level's states, [chunks, G, R, P, N], in float32 at least.

    `entering`: as of `gated_delta_rule`.
    """
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
    decay_XGR11 = from_start_XGRC[..., -1, None, None]

    def advance(chunk: Tensor, function: Tensor) -> Tensor:
        return function * decay_XGR11[chunk] + F.pad(added_XGRPN[chunk], (0, 0, 0, 1))

    def apply(function: Tensor, state: Tensor | None) -> Tensor:
        added, factor = function[..., :-1, :], function[..., -1:, :]
        return added if state is None else added + factor * state

    if plan.crossing is not None:
        identity = F.pad(torch.zeros_like(added_XGRPN[0]), (0, 0, 0, 1), value=1.0)
        entering = entering_states(plan.crossing, identity, advance, apply)
    first = plan.levels[0] if entering is None else 0  # the number of chunks that begin with no state
    before, states, start = list[Tensor](), added_XGRPN[:0], 0
    for level, num_chunks in enumerate(plan.levels):
        here = slice(start, start + num_chunks)
        entered = states.index_select(0, plan.parents[level - 1]) if level else entering
        if entered is None:
            states = added_XGRPN[here]
        else:
            before.append(entered)
            states = entered * decay_XGR11[here] + added_XGRPN[here]
        start += num_chunks
    if before:
        read = query_XG1CN[first:] @ torch.cat(before).transpose(-1, -2) * from_start_XGRC[first:, ..., None]
        output_XGRCP = torch.cat([output_XGRCP[:first], output_XGRCP[first:] + read])
    output_XCHP = output_XGRCP.flatten(1, 2).transpose(1, 2)
    return output_XCHP.flatten(0, 1).index_select(0, plan.place_T), states


def scan_step(
    value_BHP: Tensor, key_BGN: Tensor, query_BGN: Tensor, step_BH: Tensor, log_decay_BH: Tensor, state_BGRPN: Tensor
) -> Tensor:
    """Return the outputs of one token of each of B sequences, as `scan` does, and change their states."""
    value, key, query = (x.to(state_BGRPN.dtype) for x in (value_BHP, key_BGN, query_BGN))
    heads = key.shape[1], -1  # by group
    state_BGRPN *= log_decay_BH.exp().unflatten(1, heads)[..., None, None]
    state_BGRPN.addcmul_((value * step_BH[..., None]).unflatten(1, heads)[..., None], key[:, :, None, None])
    return (state_BGRPN @ query[:, :, None, :, None])[..., 0].flatten(1, 2)


def steps(made_TH: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return how much each token writes, [T, H] in float32 at least."""
    wide = torch.promote_types(torch.float32, made_TH.dtype)
    return F.softplus(made_TH.to(wide) + bias_H.to(wide)).clamp(min=least)


def gated_group_norm(x_TI: Tensor, gate_TI: Tensor, scale_I: Tensor, num_groups: int, eps: float) -> Tensor:
    """Return outputs times the SiLU of their gates, after a root mean square norm of each group of heads."""
    gated_TGX = (x_TI * F.silu(gate_TI.to(x_TI.dtype))).unflatten(-1, (num_groups, -1))
    return scale_I * F.rms_norm(gated_TGX, (gated_TGX.shape[-1],), eps=eps).flatten(-2)
