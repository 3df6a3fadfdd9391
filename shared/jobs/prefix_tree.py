"""Prefix trees: sequences with equal prefixes become trees that hold each shared part once. Pure functions.

A tree's tokens are ordered depth first, and the part between two branchings (a *node*) is contiguous; positions count
along each branch. A target is scored from the hidden state of the token before it; for the first token of a branch that
is in the node above. If several sequences share a token, it is a target of each one whose mask selects it: with the
same hidden index and label, and another sequence number.

Legend: S sequences in lexicographic order ("sorted"); L tokens of one sequence; T tokens and N targets of a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidInput
from shared.jobs.bins import best_fit_decreasing
from shared.jobs.packed import PackedBin

# --- Prefix trees of sequences: the parts that they share, and the position of each token. Pure functions ---
#
# Sequences that share a prefix become a tree that holds it once. Tokens are ordered depth first, and the part between
# two branchings (a *node*) is contiguous.
#
# Legend: S sequences in lexicographic order ("sorted"); L tokens of one sequence.

Ints = NDArray[np.int64]


class Node(NamedTuple):
    """A stretch of positions, `begin` to `end`, at which the sorted sequences `first` to `last` have equal tokens.

    Both ends are excluded. `num_ending` of the sequences end at `end`. `parent` is the parent's index in the list of
    nodes, which is in depth-first order; -1 at a root.
    """

    begin: int
    end: int
    first: int
    last: int
    num_ending: int
    parent: int


def grow(ids: Sequence[NDArray[np.integer]]) -> tuple[list[int], list[Node]]:
    """Return the sequences' indices in lexicographic order, and the nodes of their trees, depth first."""
    keys = [sort_key(row) for row in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    shared_S = [0, *(num_shared(ids[a], ids[b]) for a, b in pairwise(order))]
    return order, nodes_of(shared_S, [len(ids[place]) for place in order])


def sort_key(row: NDArray[np.integer]) -> bytes:
    """Return bytes that compare as the sequences do, token by token."""
    return row.astype(">u4").tobytes()


def nodes_of(shared_S: list[int], length_S: list[int]) -> list[Node]:
    """Return the nodes of sorted sequences, depth first.

    Sequences with a common prefix are neighbours in that order. The prefix's length is the minimum over neighbours of
    the tokens that they share. `shared_S`: the number of tokens that each shares with the one before.
    """
    nodes: list[Node] = []
    waiting = [(first, last, -1) for first, last in _branches(0, len(length_S), 0, shared_S, length_S)]
    while waiting:
        first, last, parent = waiting.pop()
        begin = nodes[parent].end if parent >= 0 else 0
        end = min(shared_S[first + 1 : last], default=length_S[first])
        num_ending = length_S[first:last].count(end)  # sorted before the longer ones
        node = len(nodes)
        nodes.append(Node(begin, end, first, last, num_ending, parent))
        waiting += [(a, b, node) for a, b in _branches(first + num_ending, last, end, shared_S, length_S)]
    return nodes


def shared_where_it_saves(nodes: Sequence[Node], least_tokens: int) -> list[Node]:
    """Return the nodes of trees that share a part only if that saves `least_tokens` or more.

    Any other part is copied into each of its branches, and into the sequences that end with it. Sharing a part of L
    tokens with k branches below saves (k - 1) L, so with more branches a shorter prefix is worth sharing.
    """
    num_below, is_shared = [0] * len(nodes), [True] * len(nodes)
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        num_branches = num_below[number] + (node.num_ending > 0)
        is_shared[number] = num_branches == 1 or (num_branches - 1) * (node.end - node.begin) >= least_tokens
        if node.parent >= 0:
            num_below[node.parent] += 1 if is_shared[number] else num_branches
    found: list[Node] = []
    above: list[tuple[int, int]] = []  # where the parts below each node begin, and their parent
    for node, shared in zip(nodes, is_shared, strict=True):
        begin, parent = above[node.parent] if node.parent >= 0 else (0, -1)
        above.append((node.end, len(found)) if shared else (begin, parent))
        if shared or node.num_ending:
            last = node.last if shared else node.first + node.num_ending
            found.append(Node(begin, node.end, node.first, last, node.num_ending, parent))
    return found


def _branches(first: int, last: int, end: int, shared_S: list[int], length_S: list[int]) -> list[tuple[int, int]]:
    """Split sorted sequences, equal up to position `end` and all longer, by their next token: ranges, as a stack.

    Branches of equal length are adjacent, so that attention can process them together.
    """
    if first == last:
        return []
    cuts = [place for place in range(first + 1, last) if shared_S[place] == end]
    ranges = list(pairwise([first, *cuts, last]))
    return sorted(ranges, key=lambda r: (r[1] - r[0] > 1, length_S[r[0]]), reverse=True)


def num_shared(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    length = min(len(a), len(b))
    differs_L = a[:length] != b[:length]
    return int(differs_L.argmax()) if differs_L.any() else length


def indices(order: list[int], nodes: list[Node]) -> list[Ints]:
    """Return for each sequence the place in the tree of each of its tokens, [L]."""
    found: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(order)
    ways: list[Ints] = []
    start = 0
    for node in nodes:
        stop = start + node.end - node.begin
        above = ways[node.parent] if node.parent >= 0 else np.zeros(0, dtype=np.int64)
        ways.append(np.concatenate([above, np.arange(start, stop)]))
        for member in range(node.first, node.first + node.num_ending):
            found[order[member]] = ways[-1]
        start = stop
    return found


def tables(nodes: Sequence[Node]) -> tuple[Ints, Ints]:
    """Return each token's position, and its parent's place or -1: [T] int64."""
    size_N = np.array([node.end - node.begin for node in nodes], dtype=np.int64)
    end_N = size_N.cumsum()
    begin_N = end_N - size_N
    index_T = np.arange(size_N.sum())
    position_T = index_T + np.repeat(np.array([node.begin for node in nodes], dtype=np.int64) - begin_N, size_N)
    parent_T = index_T - 1
    parent_T[begin_N] = [end_N[node.parent] - 1 if node.parent >= 0 else -1 for node in nodes]
    return position_T, parent_T


def token_ids(ids: Sequence[NDArray[np.integer]], order: Sequence[int], nodes: Sequence[Node]) -> Ints:
    """Return the ids of the trees' tokens, [T] int64."""
    parts = [ids[order[node.first]][node.begin : node.end] for node in nodes]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


@dataclass(frozen=True)
class SequenceRow:
    """One sequence and its training targets: arrays of one length.

    The four arrays after `target_mask` are only read where it is true. `token_ids` are integers from 0; `old_logprob`
    and `ref_logprob` are in nats. `routes`: the experts of each token, [L, layers, experts of a token].
    """

    token_ids: NDArray[np.integer]
    target_mask: NDArray[np.bool_]
    weight: NDArray[np.floating]
    advantage: NDArray[np.floating]
    old_logprob: NDArray[np.floating]
    ref_logprob: NDArray[np.floating]
    routes: NDArray[np.integer] | None = None


@dataclass(frozen=True)
class TreeUnit(PackedBin):
    """One unit's two tables: a forest of tokens [T], and targets [N], sequence after sequence.

    `members[s]` is the index, in the list of sequences that was given, of the sequence numbered s in `sequence_N`.
    """

    members: tuple[int, ...] = ()

    def columns(self) -> dict[str, NDArray]:
        """Return all columns by name, as `UnitsWriter.append` takes them."""
        tables = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "members"}
        return {name.rsplit("_", 1)[0]: values for name, values in tables.items() if values is not None}


def build_tree(sequences: Sequence[SequenceRow]) -> TreeUnit:
    """Make one unit of all sequences, in their order: a tree for each first token.

    Raises InvalidInput: there is none, one is empty, its arrays differ in length, or its first token is a target.
    """
    _check(sequences)
    return _unit(sequences, range(len(sequences)))


def split_tree(sequences: Sequence[SequenceRow], bin_tokens: int) -> list[TreeUnit]:
    """Divide sequences over units of at most `bin_tokens`. No sequence is cut, and units repeat few tokens.

    A subtree that fits goes into one unit, together with the path from the root to it. If it does not fit, its branches
    are grouped by best fit, largest first. Trees of different roots are separate units, which may share a bin.
    Units are ordered by their first sequences.

    Raises InvalidInput: as `build_tree`; or a sequence is longer than `bin_tokens`.
    """
    _check(sequences)
    for number, row in enumerate(sequences):
        if len(row.token_ids) > bin_tokens:
            message = f"it has {len(row.token_ids)} tokens, and a bin holds {bin_tokens}; sequences are never cut"
            raise InvalidInput(message, f"sequence {number}")
    order, nodes = grow([row.token_ids for row in sequences])
    parts = [sorted(order[member] for member in part) for part in _split(nodes, bin_tokens)]
    return [_unit(sequences, part) for part in sorted(parts)]


def _check(sequences: Sequence[SequenceRow]) -> None:
    if not sequences:
        raise InvalidInput("a tree wants at least one sequence", "sequences")
    for number, row in enumerate(sequences):
        place, length = f"sequence {number}", len(row.token_ids)
        if not length:
            raise InvalidInput("it has no tokens", place)
        for column in fields(row):
            values = getattr(row, column.name)
            found = length if values is None else len(values)
            if found != length:
                raise InvalidInput(f"{column.name} has {found} entries for {length} tokens", place)
        if row.target_mask[0]:
            raise InvalidInput("its first token is a target, and nothing stands before it to be scored from", place)


@dataclass(frozen=True)
class _Part:
    """Sequences (by index in sorted order) that go into one unit, and the number of their tokens below some node."""

    num_tokens: int
    members: list[int]


def _split(nodes: list[Node], bin_tokens: int) -> list[list[int]]:
    """Group the sorted sequences into units, from the leaves up. Returns the sequences of each unit."""
    below_N: list[list[_Part]] = [[] for _ in nodes]
    done: list[list[int]] = []
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        ending = _Part(0, list(range(node.first, node.first + node.num_ending)))
        parts = _join([*below_N[number], ending], bin_tokens - node.end)
        parts = [_Part(p.num_tokens + node.end - node.begin, p.members) for p in parts]
        if node.parent < 0:
            done += [p.members for p in parts]
        else:
            below_N[node.parent] += parts
    return done


def _join(parts: list[_Part], room: int) -> list[_Part]:
    """Merge parts into few parts of at most `room` tokens: best fit, largest first."""
    parts = sorted((p for p in parts if p.members), key=lambda p: (-p.num_tokens, p.members))
    costing = [p.num_tokens for p in parts if p.num_tokens]
    bins = best_fit_decreasing(costing, room) or [[]]
    bins[0] += range(len(costing), len(parts))  # sequences that end at the node have no tokens below it
    return [_Part(sum(parts[k].num_tokens for k in each), [m for k in each for m in parts[k].members]) for each in bins]


def _unit(sequences: Sequence[SequenceRow], members: Sequence[int]) -> TreeUnit:
    """The unit of some of the sequences, in this order."""
    rows = [sequences[member] for member in members]
    ids = [row.token_ids for row in rows]
    order, nodes = grow(ids)
    index_of = indices(order, nodes)
    position_T, parent_T = tables(nodes)
    targets = [np.flatnonzero(row.target_mask) for row in rows]
    hidden_index = [index_L[target_N - 1] for index_L, target_N in zip(index_of, targets, strict=True)]

    def column(name: str, dtype: type) -> NDArray:
        parts = [getattr(row, name)[target_N] for row, target_N in zip(rows, targets, strict=True)]
        return np.concatenate(parts).astype(dtype)

    return TreeUnit(
        token_id_T=token_ids(ids, order, nodes),
        position_T=position_T,
        parent_T=parent_T,
        hidden_index_N=np.concatenate(hidden_index),
        label_N=column("token_ids", np.int64),
        weight_N=column("weight", np.float32),
        advantage_N=column("advantage", np.float32),
        old_logprob_N=column("old_logprob", np.float32),
        ref_logprob_N=column("ref_logprob", np.float32),
        sequence_N=np.repeat(np.arange(len(rows)), [len(target_N) for target_N in targets]),
        route_TLK=routes_of_parts([row.routes for row in rows], order, nodes),
        members=tuple(members),
    )


@dataclass(frozen=True)
class ScoredRow:
    """A sequence with K scored tokens: their positions, the scalar of the head for each, and the scalar's target."""

    id_L: NDArray[np.integer]
    place_K: Sequence[int]
    scalar_K: Sequence[int]
    value_K: Sequence[float]


def scored_unit(rows: Sequence[ScoredRow]) -> TreeUnit:
    """Make one unit of sequences, in their order, that are trained on scalars: labels are their numbers, advantages
    their targets.
    """
    ids = [row.id_L for row in rows]
    order, nodes = grow(ids)
    position_T, parent_T = tables(nodes)
    places = zip(indices(order, nodes), rows, strict=True)
    counts = [len(row.place_K) for row in rows]
    zeros_N = np.zeros(sum(counts), dtype=np.float32)
    return TreeUnit(
        token_id_T=token_ids(ids, order, nodes),
        position_T=position_T,
        parent_T=parent_T,
        hidden_index_N=np.concatenate([index_L[list(row.place_K)] for index_L, row in places]),
        label_N=np.array([scalar for row in rows for scalar in row.scalar_K], dtype=np.int64),
        weight_N=zeros_N + 1,
        advantage_N=np.array([value for row in rows for value in row.value_K], dtype=np.float32),
        old_logprob_N=zeros_N,
        ref_logprob_N=zeros_N,
        sequence_N=np.repeat(np.arange(len(rows)), counts),
        members=tuple(range(len(rows))),
    )


def scored_pair(chosen: NDArray[np.integer], rejected: NDArray[np.integer], margin: float = 0.0) -> TreeUnit:
    """Make the unit of a pair of rows, whose rewards are those of their last tokens."""
    rows = [ScoredRow(row, [len(row) - 1], [0], [value]) for row, value in ((chosen, margin), (rejected, 0.0))]
    return scored_unit(rows)


def routes_of_parts(
    routes: Sequence[NDArray[np.integer] | None], order: Sequence[int], nodes: Sequence[Node]
) -> NDArray[np.integer] | None:
    """Return the routes of the trees' tokens, given those of each sequence; None if the sequences have none.

    A shared part gets the routes of its last sequence in lexicographic order. Sequences that end with the part come
    first in that order, and their last token has no computed route.
    """
    last = [routes[order[node.last - 1]] for node in nodes]
    parts = [each[node.begin : node.end] for each, node in zip(last, nodes, strict=True) if each is not None]
    assert len(parts) in (0, len(nodes)), "some sequences have routes, others have none"
    return np.concatenate(parts) if parts else None
