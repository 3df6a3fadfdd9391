"""Packs the inputs of one slot. Common prefixes are stored once, as trees, if that saves enough tokens.

If no inputs share a prefix, or every shared prefix is stored once, the pack equals a job's bin of the same inputs to
the bit (shared/jobs/prefix_tree.py): the same tokens and targets in the same order.

Shape suffixes: T tokens of the pack, L tokens of an input.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron_worker.forwards.inputs import Ints
from shared.jobs.prefix_forest import (
    Node,
    grow,
    indices,
    nodes_of,
    num_shared,
    shared_where_it_saves,
    sort_key,
    tables,
    token_ids,
)

# From here on a tree is faster than separate sequences, on the CPU: `python -m benchmarks.prefix_sharing --short`.
LEAST_SAVED = 8  # tokens


@dataclass(frozen=True, eq=False)
class Pack:
    """The table of tokens; for each input the indices of its tokens, [L]; the inputs in the order of their trees."""

    token_id_T: Ints
    position_T: Ints
    parent_T: Ints
    index_of: list[Ints]
    order: list[int]


def pack(sequences: Sequence[Ints], least_saved_tokens: int) -> Pack:
    """Pack all sequences. Trees are in the order of their first sequences, which are in the order given."""
    order, nodes = grow(sequences)
    nodes = shared_where_it_saves(nodes, least_saved_tokens)
    roots = [number for number, node in enumerate(nodes) if node.parent < 0]
    trees = sorted(
        (sorted(order[nodes[begin].first : nodes[begin].last]), begin, end)
        for begin, end in pairwise([*roots, len(nodes)])
    )
    placed: list[Node] = []
    for _, begin, end in trees:
        moved = len(placed) - begin
        placed += [node._replace(parent=max(-1, node.parent + moved * (node.parent >= 0))) for node in nodes[begin:end]]
    position_T, parent_T = tables(placed)
    members = [member for each, _, _ in trees for member in each]
    return Pack(token_ids(sequences, order, placed), position_T, parent_T, indices(order, placed), members)


@dataclass(frozen=True)
class PackSize:
    """Computes how many tokens a pack would have, without making it.

    `keys`: of the sequences, sorted; `shared`: what each shares with the one before.
    """

    least_saved_tokens: int
    keys: tuple[bytes, ...] = ()
    shared: tuple[int, ...] = ()

    def with_sequences(self, sequences: Sequence[Ints]) -> "PackSize":
        keys, shared = list(self.keys), list(self.shared)
        for key in map(sort_key, sequences):
            place = bisect_left(keys, key)
            shared.insert(place, _num_shared(keys[place - 1], key) if place else 0)
            if place < len(keys):
                shared[place + 1] = _num_shared(key, keys[place])
            keys.insert(place, key)
        return PackSize(self.least_saved_tokens, tuple(keys), tuple(shared))

    @cached_property
    def nodes(self) -> list[Node]:
        nodes = nodes_of(list(self.shared), [_length(key) for key in self.keys])
        return shared_where_it_saves(nodes, self.least_saved_tokens)

    @cached_property
    def num_tokens(self) -> int:
        return sum(node.end - node.begin for node in self.nodes)

    @property
    def num_shared(self) -> int:
        """The tokens that are stored once in place of several times."""
        return sum(map(_length, self.keys)) - self.num_tokens


def _length(key: bytes) -> int:
    return len(key) // 4


def _num_shared(a: bytes, b: bytes) -> int:
    return num_shared(np.frombuffer(a, ">u4"), np.frombuffer(b, ">u4"))
