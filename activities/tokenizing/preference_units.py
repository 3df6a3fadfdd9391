"""Preference pairs as units: what both answers begin with once, the chosen and the rejected one as branches.

The loss DPO tells them apart by columns alone: sequences 2k and 2k + 1 are a pair; the chosen has advantage +1, the
rejected -1. Legend: R rows of a block, two a pair; T tokens; L tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activities.packing.prefix_tree import SequenceRow, TreeUnit, build_tree
from activities.tokenizing.blocks import Block
from activities.tokenizing.report import Tally
from shared.errors import InvalidInput
from shared.jobs.packed import UnitsWriter

COLUMNS = ("token_id", "position", "parent", "hidden_index", "label", "weight", "advantage", "sequence")
"""Columns of a pair's unit. Nobody sampled its answers, and the worker scores the reference itself."""

Ids = Sequence[int] | NDArray[np.integer]
Mask = Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True)
class Pair:
    """A pair of a block: its unit, or the reason why there is none. `fits`: within max_tokens."""

    place: str
    unit: TreeUnit | None
    fits: bool = True
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return self.unit is not None and self.fits


def pair_unit(chosen_ids: Ids, chosen_mask: Mask, rejected_ids: Ids, rejected_mask: Mask) -> TreeUnit:
    """One pair as one unit. Each row is a prompt with an answer; its targets are the tokens that its mask says.

    Raises:
        InvalidInput: there is nothing to prefer (`why_not`), or a row's first token is a target.
    """
    if reason := why_not(chosen_ids, chosen_mask, rejected_ids, rejected_mask):
        raise InvalidInput(reason, "pair")
    return build_tree([_row(chosen_ids, chosen_mask, 1.0), _row(rejected_ids, rejected_mask, -1.0)])


def why_not(chosen_ids: Ids, chosen_mask: Mask, rejected_ids: Ids, rejected_mask: Mask) -> str | None:
    """The reason why two rows are no pair; None for a pair."""
    if not np.any(chosen_mask):
        return "the chosen answer has no token to train on"
    if not np.any(rejected_mask):
        return "the rejected answer has no token to train on"
    if np.array_equal(chosen_ids, rejected_ids):
        return "both answers become the same tokens: nothing to prefer"
    return None


def _row(ids: Ids, mask: Mask, sign: float) -> SequenceRow:
    nothing_L = np.zeros(len(ids), dtype=np.float32)
    return SequenceRow(
        token_ids=np.asarray(ids, dtype=np.int64),
        target_mask=np.asarray(mask, dtype=np.bool_),
        weight=np.ones(len(ids), dtype=np.float32),
        advantage=np.full(len(ids), sign, dtype=np.float32),
        old_logprob=np.full(len(ids), np.nan, dtype=np.float32),
        ref_logprob=nothing_L,
    )


def pairs_of(block: Block, max_tokens: int) -> list[Pair]:
    """The pairs of a block whose rows 2k and 2k + 1 are the chosen and the rejected answer to one prompt.

    Pairs are never cut: a unit of more than `max_tokens` tokens, what both answers begin with counted once, is too
    long.
    """
    first_R, num_tokens_R = block.start_R.tolist(), block.num_tokens_R.tolist()
    target_T = (block.weight_T > 0) & (block.position_T > 0)
    rows = [slice(first, first + num) for first, num in zip(first_R, num_tokens_R, strict=True)]
    pairs = []
    for place, chosen, rejected in zip(block.places[::2], rows[::2], rows[1::2], strict=True):
        answers = (block.id_T[chosen], target_T[chosen], block.id_T[rejected], target_T[rejected])
        if reason := why_not(*answers):
            pairs.append(Pair(place, None, reason=reason))
        else:
            unit = pair_unit(*answers)
            pairs.append(Pair(place, unit, unit.num_tokens <= max_tokens))
    return pairs


def count(pairs: list[Pair], tally: Tally) -> None:
    """Tell the tally what became of each pair."""
    tally.add_rows(np.array([pair.unit.num_tokens if pair.unit else 0 for pair in pairs], dtype=np.int64))
    kept = _kept(pairs)
    tally.add_kept(len(kept), sum(unit.num_tokens for unit in kept), sum(len(unit.label_N) for unit in kept), 0)
    for pair in pairs:
        if pair.unit is None:
            tally.add_untrainable(pair.place, pair.reason)
        elif not pair.fits:
            tally.add_too_long(pair.place, pair.unit.num_tokens)


def write(pairs: list[Pair], writer: UnitsWriter) -> None:
    """Append the pairs that are kept as units, to a writer of `COLUMNS`."""
    kept = _kept(pairs)
    if not kept:
        return
    tables = [unit.columns() for unit in kept]
    writer.extend(
        [unit.num_tokens for unit in kept],
        [len(unit.label_N) for unit in kept],
        **{name: np.concatenate([table[name] for table in tables]) for name in COLUMNS},
    )


def _kept(pairs: list[Pair]) -> list[TreeUnit]:
    return [pair.unit for pair in pairs if pair.unit is not None and pair.fits]
