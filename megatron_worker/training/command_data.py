"""Makes batches of a command's data: the sequences that a client sent, packed as in a job, but in memory.

Shape suffixes: L tokens of a sequence, P those but the first, N targets of all units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from longshore.commands import Datum, TokenScores
from megatron_worker.training.batches import OneStep, PackedBatches
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.jobs import bins as packing
from shared.jobs.commands import Command, command
from shared.jobs.packed import Ints, Units
from shared.jobs.prefix_tree import SequenceRow, split_tree


@dataclass(frozen=True)
class CommandData:
    """A command's data as the batches of one step; for each datum the indices of its tokens among all targets."""

    batches: PackedBatches
    targets_of: tuple[Ints, ...]

    def scores(self, found: dict[str, NDArray]) -> tuple[TokenScores, ...]:
        """Return the scores of each datum, from columns over all targets, [N] or [N, K]."""
        return tuple(
            TokenScores.model_validate({name: values[places].tolist() for name, values in found.items()})
            for places in self.targets_of
        )


def read_command(data: bytes) -> Command:
    """Read a command's file. Raises InvalidInput naming the field and the rule."""
    try:
        return command.validate_json(data)
    except ValidationError as error:
        place, rule = first_error(error)
        raise InvalidInput(rule, place) from None


def pack_data(data: Sequence[Datum], max_tokens: int, share_prefixes: bool, score_all: bool = False) -> CommandData:
    """Pack a command's data into units and bins. A unit is one sequence or, with `share_prefixes`, a tree of them.

    `score_all`: what has a weight of 0 is scored, too.
    """
    if share_prefixes:
        trees = split_tree([_row(datum, score_all) for datum in data], max_tokens)
        units, members = [tree.columns() for tree in trees], [tree.members for tree in trees]
    else:
        units = [_chain(_row(each, score_all)) if each.labels is None else _labelled(each, score_all) for each in data]
        members = [(number,) for number in range(len(data))]
    sizes = [len(unit["token_id"]) for unit in units]
    bins = [np.array(each, dtype=np.int64) for each in packing.pack_bins(sizes, max_tokens)]
    return CommandData(PackedBatches(Units.in_memory(units), OneStep(bins)), _places(units, members, len(data)))


def _row(datum: Datum, score_all: bool) -> SequenceRow:
    num_tokens = len(datum.tokens)

    def column(given: Sequence[float] | None, default: float) -> NDArray[np.float32]:
        values_L = np.full(num_tokens, default, dtype=np.float32)
        if given is not None:
            values_L[1:] = given
        return values_L

    weight_L = column(datum.weights, 1.0)
    weight_L[0] = 0.0
    is_target_L = (weight_L != 0) | score_all
    is_target_L[0] = False
    return SequenceRow(
        token_ids=np.array(datum.tokens, dtype=np.int64),
        target_mask=is_target_L,
        weight=weight_L,
        advantage=column(datum.advantages, 0.0),
        old_logprob=column(datum.logprobs, np.nan),
        ref_logprob=column(datum.ref_logprobs, 0.0),
    )


def _chain(row: SequenceRow) -> dict[str, NDArray]:
    """Return the columns of a unit of one sequence. Positions, parents and sequence numbers have their defaults."""
    target_N = np.flatnonzero(row.target_mask)
    return {
        "token_id": row.token_ids,
        "hidden_index": target_N - 1,
        "label": row.token_ids[target_N],
        "weight": row.weight[target_N],
        "advantage": row.advantage[target_N],
        "old_logprob": row.old_logprob[target_N],
        "ref_logprob": row.ref_logprob[target_N],
    }


def _labelled(datum: Datum, score_all: bool) -> dict[str, NDArray]:
    """Return the columns of a unit of one sequence that is scored on labels of its own, several of them in a place."""
    assert datum.labels is not None
    label_N = np.fromiter(chain.from_iterable(datum.labels), dtype=np.int64)
    weight_N = np.ones(len(label_N), dtype=np.float32)
    if datum.label_weights is not None:
        weight_N[:] = np.fromiter(chain.from_iterable(datum.label_weights), dtype=np.float32)
    hidden_index_N = np.repeat(np.arange(len(datum.labels)), [len(labels) for labels in datum.labels])
    scored_N = (weight_N != 0) | score_all
    zeros_N = np.zeros(int(scored_N.sum()), dtype=np.float32)
    return {
        "token_id": np.array(datum.tokens, dtype=np.int64),
        "hidden_index": hidden_index_N[scored_N],
        "label": label_N[scored_N],
        "weight": weight_N[scored_N],
        "advantage": zeros_N,
        "old_logprob": np.full_like(zeros_N, np.nan),
        "ref_logprob": zeros_N,
    }


def _places(units: Sequence[dict[str, NDArray]], members: Sequence[Sequence[int]], num_data: int) -> tuple[Ints, ...]:
    """Return for each datum the indices of its targets among those of all units."""
    places: list[Ints] = [np.zeros(0, dtype=np.int64)] * num_data
    first = 0
    for unit, numbers in zip(units, members, strict=True):
        num_targets = len(unit["label"])
        sequence_N = unit.get("sequence", np.zeros(num_targets, dtype=np.int64))
        for sequence, number in enumerate(numbers):
            places[number] = first + np.flatnonzero(sequence_N == sequence)
        first += num_targets
    return tuple(places)
