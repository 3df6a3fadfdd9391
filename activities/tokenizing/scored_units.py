"""Answers with numbers as units of reward models: a target for each number, at the last token of what it is of.

A pair is one unit of two sequences, as DPO's (units.py); its number is the margin. Targets say by their labels which of
a head's scalars they are of.

Legend: L tokens of one sequence; K its targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activities.formats.scores import Numbers
from activities.tokenizing.units import KeptPairs, Pair, TokenBlock
from shared.jobs.prefix_forest import grow, indices, tables, token_ids
from shared.jobs.prefix_tree import TreeUnit


@dataclass(frozen=True)
class ScoredRow:
    """A sequence, the places of its scored tokens, which scalar each is of, and what it is to be."""

    id_L: NDArray[np.int64]
    place_K: Sequence[int]
    scalar_K: Sequence[int]
    value_K: Sequence[float]


def scored_unit(rows: Sequence[ScoredRow]) -> TreeUnit:
    """Make one unit of sequences, in their order: what they begin with stands once."""
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


def scored_pair(chosen: NDArray[np.int64], rejected: NDArray[np.int64], margin: float = 0.0) -> TreeUnit:
    """Make the unit of a pair of rows, whose rewards are those of their last tokens."""
    rows = [ScoredRow(row, [len(row) - 1], [0], [value]) for row, value in ((chosen, margin), (rejected, 0.0))]
    return scored_unit(rows)


def keep_scored(block: TokenBlock, numbers: Numbers, max_tokens: int, are_pairs: bool) -> KeptPairs:
    """The units of a block: of each row, or of rows 2k and 2k + 1, a chosen and a rejected answer to one prompt.

    None is cut: one of more than `max_tokens` tokens is too long.
    """
    ends = block.start_R + block.num_tokens_R
    rows = [block.id_T[first:end] for first, end in zip(block.start_R, ends, strict=True)]
    kept = list[Pair]()
    for number in range(0, len(rows), 2 if are_pairs else 1):
        place, row, values = block.places[number], rows[number], numbers.pop(block.places[number])
        if are_pairs and np.array_equal(row, rows[number + 1]):
            kept.append(Pair(place, None, reason="both answers become the same tokens: nothing to prefer"))
            continue
        if are_pairs:
            unit = scored_pair(row, rows[number + 1], values[0])
        else:
            unit = scored_unit([ScoredRow(row, [len(row) - 1] * len(values), range(len(values)), values)])
        kept.append(Pair(place, unit, unit.num_tokens <= max_tokens))
    return KeptPairs(kept)
