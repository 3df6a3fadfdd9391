"""Prefix trees of sequences: the parts that they share, and the position of each token. Pure functions.

Sequences that share a prefix become a tree that holds it once. Tokens are ordered depth first, and the part between two
branchings (a *node*) is contiguous.

Legend: S sequences in lexicographic order ("sorted"); L tokens of one sequence.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
