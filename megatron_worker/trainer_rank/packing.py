"""Packs the inputs of one slot. Common prefixes are stored once, as trees, if they are long enough.

If no inputs share a prefix, or all units are trees, the pack equals the bin that a job would make of them to the bit
(shared/jobs/prefix_tree.py): the same tokens and targets in the same order.

Shape suffixes: T tokens of the pack, L tokens of an input.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_worker.trainer_rank.inputs import Ints
from shared.jobs.prefix_forest import grow, indices, num_shared


@dataclass(frozen=True, eq=False)
class Pack:
    """The table of tokens; for each input the indices of its tokens, [L]; the inputs in the order of their units."""

    token_id_T: Ints
    position_T: Ints
    parent_T: Ints
    index_of: list[Ints]
    order: list[int]


def pack(sequences: Sequence[Ints], min_shared_tokens: int) -> Pack:
    """Pack all sequences. Those that begin with the same `min_shared_tokens` tokens or more share a tree."""
    units = _units(sequences, min_shared_tokens)
    nothing = np.zeros(0, dtype=np.int64)
    tokens, positions, parents = [nothing], [nothing], [nothing]
    index_of: list[Ints] = [nothing] * len(sequences)
    start = 0
    for members in units:
        order, nodes = grow([sequences[member] for member in members])
        size = sum(node.end - node.begin for node in nodes)
        token_id, position, parent = np.zeros((3, size), dtype=np.int64)
        for member, index_L in zip(members, indices(order, nodes), strict=True):
            token_id[index_L] = sequences[member]
            position[index_L] = np.arange(len(index_L))
            parent[index_L] = np.concatenate([[-1], index_L[:-1] + start])
            index_of[member] = index_L + start
        tokens.append(token_id)
        positions.append(position)
        parents.append(parent)
        start += size
    token_id_T, position_T, parent_T = (np.concatenate(column) for column in (tokens, positions, parents))
    return Pack(token_id_T, position_T, parent_T, index_of, [member for members in units for member in members])


def _units(sequences: Sequence[Ints], min_shared_tokens: int) -> list[list[int]]:
    """Return the sequences of each tree, in the order given; trees are in the order of their first sequences."""
    if not sequences:
        return []
    keys = [_key(token_L) for token_L in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    units = [[order[0]]]
    for before, member in pairwise(order):
        if num_shared(sequences[before], sequences[member]) >= min_shared_tokens:
            units[-1].append(member)
        else:
            units.append([member])
    return sorted(sorted(unit) for unit in units)


def _key(token_L: Ints) -> bytes:
    return token_L.astype(">u4").tobytes()  # compares token by token


class PackSize:
    """Computes how many tokens a pack would have, without making it; inputs are added one by one."""

    def __init__(self, min_shared_tokens: int) -> None:
        self._min_shared = min_shared_tokens
        self._keys: list[bytes] = []
        self._sequences: list[Ints] = []
        self.num_tokens = 0
        self.num_shared = 0

    def copy(self) -> "PackSize":
        same = PackSize(self._min_shared)
        same._keys, same._sequences = self._keys.copy(), self._sequences.copy()
        same.num_tokens, same.num_shared = self.num_tokens, self.num_shared
        return same

    @property
    def num_sequences(self) -> int:
        return len(self._keys)

    def trees(self) -> list[list[Ints]]:
        """Return the sequences that share a prefix, grouped by it, in the order of their tokens."""
        units: list[list[Ints]] = [[]]
        for token_L in self._sequences:
            if units[-1] and not self._shared(units[-1][-1], token_L):
                units.append([])
            units[-1].append(token_L)
        return [unit for unit in units if len(unit) > 1]

    def add(self, token_L: Ints) -> None:
        key = _key(token_L)
        place = bisect_left(self._keys, key)
        before = self._sequences[place - 1] if place else None
        after = self._sequences[place] if place < len(self._sequences) else None
        shared = self._shared(before, token_L) + self._shared(token_L, after) - self._shared(before, after)
        self._keys.insert(place, key)
        self._sequences.insert(place, token_L)
        self.num_shared += shared
        self.num_tokens += len(token_L) - shared

    def _shared(self, a: Ints | None, b: Ints | None) -> int:
        if a is None or b is None:
            return 0
        shared = num_shared(a, b)
        return shared if shared >= self._min_shared else 0
