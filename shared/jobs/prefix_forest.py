"""Prefix trees of sequences: the parts that they share, and the place of each token. Pure functions.

Sequences that share a prefix become a tree that holds it once. Tokens are ordered depth first, a part between two
branchings (a *node*) in one piece.

Legend: S sequences in lexicographic order ("sorted"); L tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Node:
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
    """Return the sequences' indices in lexicographic order, and the nodes of their trees, depth first.

    In that order sequences with a common prefix stand together, and its length is the least that any two neighbours
    among them share.
    """
    keys = [row.astype(">u4").tobytes() for row in ids]  # compare token by token
    order = sorted(range(len(ids)), key=keys.__getitem__)
    length_S = [len(ids[place]) for place in order]
    shared_S = [0, *(num_shared(ids[a], ids[b]) for a, b in pairwise(order))]
    nodes: list[Node] = []
    waiting = [(first, last, -1) for first, last in _branches(0, len(order), 0, shared_S, length_S)]
    while waiting:
        first, last, parent = waiting.pop()
        begin = nodes[parent].end if parent >= 0 else 0
        end = min(shared_S[first + 1 : last], default=length_S[first])
        num_ending = length_S[first:last].count(end)  # in the order, they come before those that go on
        node = len(nodes)
        nodes.append(Node(begin, end, first, last, num_ending, parent))
        waiting += [(a, b, node) for a, b in _branches(first + num_ending, last, end, shared_S, length_S)]
    return order, nodes


def _branches(first: int, last: int, end: int, shared_S: list[int], length_S: list[int]) -> list[tuple[int, int]]:
    """Split sorted sequences, equal up to position `end` and all longer, by their next token: ranges, as a stack.

    Branches of one length stand beside each other, for attention to take them together.
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
