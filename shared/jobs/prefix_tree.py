"""Prefix trees: sequences with equal prefixes become trees that hold each shared part once. Pure functions.

A tree's tokens are ordered depth first, and the part between two branchings (a *node*) is contiguous; positions count
along each branch. A target is scored from the hidden state of the token before it; for the first token of a branch that
is in the node above. If several sequences share a token, it is a target of each one whose mask selects it: with the
same hidden index and label, and another sequence number.

Legend: S sequences in lexicographic order ("sorted"); L tokens of one sequence; T tokens and N targets of a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidInput
from shared.jobs.bins import best_fit_decreasing
from shared.jobs.packed import PackedBin
from shared.jobs.prefix_forest import Node, grow, indices, tables, token_ids


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
        route_TLK=_routes(rows, order, nodes),
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


def _routes(rows: Sequence[SequenceRow], order: Sequence[int], nodes: Sequence[Node]) -> NDArray[np.integer] | None:
    """Return the routes of the trees' tokens; None if the sequences have none.

    A shared part gets the routes of its last sequence in lexicographic order. Sequences that end with the part come
    first in that order, and their last token has no computed route.
    """
    last = [rows[order[node.last - 1]].routes for node in nodes]
    parts = [each[node.begin : node.end] for each, node in zip(last, nodes, strict=True) if each is not None]
    assert len(parts) in (0, len(nodes)), "some sequences have routes, others have none"
    return np.concatenate(parts) if parts else None
