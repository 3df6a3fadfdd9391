"""Makes batches of a command's data: the sequences that a client sent, packed as in a job, but in memory.

Shape suffixes: L tokens of a sequence, N targets of all units.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.commands import TokenScores
from megatron_worker.training.batches import OneStep, PackedBatches
from shared.jobs import bins as packing
from shared.jobs.commands import joined, units_of
from shared.jobs.packed import Ints, Units
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, split_tree


@dataclass(frozen=True)
class CommandData:
    """A command's data as the batches of one step; for each datum the indices of its tokens among all targets."""

    batches: PackedBatches
    targets_of: Sequence[Ints]

    def scores(self, found: dict[str, NDArray]) -> tuple[TokenScores, ...]:
        """Return the scores of each datum, from columns over all targets, [N] or [N, K]."""
        return tuple(
            TokenScores.model_validate({name: values[places].tolist() for name, values in found.items()})
            for places in self.targets_of
        )


def pack_data(data: Units, max_tokens: int, share_prefixes: bool, score_all: bool = False) -> CommandData:
    """Pack a command's data into bins: a unit is a sequence or, with `share_prefixes`, a tree of them.

    `score_all`: what has a weight of 0 is scored, too.
    """
    units = data if score_all else data.of_targets(data.columns["weight"] != 0)
    ends = units.target_offsets
    targets_of = [np.arange(*each) for each in itertools.pairwise(ends)]
    if share_prefixes:
        trees = split_tree([_row(units, number) for number in range(len(targets_of))], max_tokens)
        units, targets_of = units_of(joined([tree.columns() for tree in trees])), _places(trees, len(targets_of))
    sizes = np.diff(units.token_offsets).tolist()
    bins = [np.array(each, dtype=np.int64) for each in packing.pack_bins(sizes, max_tokens)]
    return CommandData(PackedBatches(units, OneStep(bins)), targets_of)


def _row(units: Units, number: int) -> SequenceRow:
    """Return a unit whose targets are its own tokens as a sequence, which gives each target's columns to its token."""
    packed = units.read_bin(np.array([number]))
    target_N = packed.hidden_index_N + 1

    def column(values_N: NDArray) -> NDArray:
        values_L = np.zeros(packed.num_tokens, dtype=values_N.dtype)
        values_L[target_N] = values_N
        return values_L

    return SequenceRow(
        token_ids=packed.token_id_T,
        target_mask=column(np.ones(len(target_N), dtype=bool)),
        weight=column(packed.weight_N),
        advantage=column(packed.advantage_N),
        old_logprob=column(packed.old_logprob_N),
        ref_logprob=column(packed.ref_logprob_N),
    )


def _places(trees: Sequence[TreeUnit], num_data: int) -> list[Ints]:
    """Return for each datum the indices of its targets among those of all units."""
    places: list[Ints] = [np.zeros(0, dtype=np.int64)] * num_data
    first = 0
    for tree in trees:
        for sequence, number in enumerate(tree.members):
            places[number] = first + np.flatnonzero(tree.sequence_N == sequence)
        first += tree.num_targets
    return places
