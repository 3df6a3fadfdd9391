"""Blocks of tokenized rows as units: which rows and tokens are kept, what is a target, and pairs as trees.

A preference pair is one unit: what both answers begin with once, the chosen and the rejected one as branches. The loss
DPO tells them apart by columns alone: sequences 2k and 2k + 1 are a pair; the chosen has advantage +1, the rejected -1.

Legend: R rows of a block, two a pair; T tokens of a block, one row behind the other; L tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from activities.packing.prefix_tree import SequenceRow, TreeUnit, build_tree
from activities.tokenizing.report import Tally
from shared.errors import InvalidInput
from shared.jobs.packed import UnitsWriter

PAIR_COLUMNS = ("token_id", "position", "parent", "hidden_index", "label", "weight", "advantage", "sequence")
"""Columns of a pair's unit. Nobody sampled its answers, and the worker scores the reference itself."""

Ids = Sequence[int] | NDArray[np.integer]
Mask = Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True)
class Block:
    """Rows as tokens: ids and labels int64, weights float32 (0: not trained). Token t-1 predicts `label_T[t]`."""

    places: list[str]
    id_T: NDArray[np.int64]
    label_T: NDArray[np.int64]
    weight_T: NDArray[np.float32]
    num_tokens_R: NDArray[np.int64]

    @property
    def start_R(self) -> NDArray[np.int64]:
        return np.cumsum(self.num_tokens_R) - self.num_tokens_R

    @cached_property
    def row_T(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.num_tokens_R)), self.num_tokens_R)

    @cached_property
    def position_T(self) -> NDArray[np.int64]:
        return np.arange(len(self.id_T)) - np.repeat(self.start_R, self.num_tokens_R)

    def refuse_unknown_ids(self, vocab_size: int) -> None:
        """Raises InvalidInput for a token or trained label that the model has no embedding for."""
        trained_T = self.weight_T > 0
        for name, id_T, checked_T in (
            ("token", self.id_T, np.ones_like(trained_T)),
            ("label", self.label_T, trained_T),
        ):
            bad = np.flatnonzero(checked_T & ((id_T < 0) | (id_T >= vocab_size)))
            if len(bad):
                place = self.places[int(self.row_T[bad[0]])]
                raise InvalidInput(f"{name} id {id_T[bad[0]]} is not in the model's vocabulary of {vocab_size}", place)


@dataclass(frozen=True)
class KeptRows:
    """The rows of a block that are trained, as flags by row and by token."""

    block: Block
    kept_R: NDArray[np.bool_]
    too_long_R: NDArray[np.bool_]
    kept_T: NDArray[np.bool_]
    target_T: NDArray[np.bool_]
    truncate: bool

    def count(self, tally: Tally) -> None:
        """Tell the tally what became of each row."""
        block, cut_R = self.block, self.too_long_R & self.truncate
        tally.add_rows(block.num_tokens_R)
        tally.add_kept(
            int(self.kept_R.sum()),
            int(self.kept_T.sum()),
            int(self.target_T.sum()),
            int((self.kept_R & cut_R).sum()),
        )
        for row in np.flatnonzero(~self.kept_R):
            if self.too_long_R[row] and not self.truncate:
                tally.add_too_long(block.places[row], int(block.num_tokens_R[row]))
            else:
                tally.add_fully_masked(block.places[row], was_truncated=bool(self.too_long_R[row]))

    def write(self, writer: UnitsWriter) -> None:
        """Append the kept rows as units: label x[t] is predicted from the hidden state of token t-1."""
        block, row_T, num_rows = self.block, self.block.row_T, len(self.block.num_tokens_R)
        writer.extend(
            np.bincount(row_T[self.kept_T], minlength=num_rows)[self.kept_R],
            np.bincount(row_T[self.target_T], minlength=num_rows)[self.kept_R],
            token_id=block.id_T[self.kept_T],
            hidden_index=block.position_T[self.target_T] - 1,
            label=block.label_T[self.target_T],
            weight=block.weight_T[self.target_T],
        )


def keep_rows(block: Block, max_tokens: int, truncate: bool) -> KeptRows:
    """Drop or cut rows beyond `max_tokens`, then drop those without a target. A row's first token is never a target."""
    row_T, position_T = block.row_T, block.position_T
    too_long_R = block.num_tokens_R > max_tokens
    fits_T = position_T < max_tokens if truncate else ~too_long_R[row_T]
    target_T = fits_T & (position_T > 0) & (block.weight_T > 0)
    has_target_R = np.bincount(row_T[target_T], minlength=len(too_long_R)) > 0
    return KeptRows(block, has_target_R, too_long_R, fits_T & has_target_R[row_T], target_T, truncate)


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


@dataclass(frozen=True)
class KeptPairs:
    """The pairs of a block, in order."""

    pairs: list[Pair]

    @property
    def units(self) -> list[TreeUnit]:
        """The units of the pairs that are kept."""
        return [pair.unit for pair in self.pairs if pair.unit is not None and pair.fits]

    def count(self, tally: Tally) -> None:
        """Tell the tally what became of each pair."""
        tally.add_rows(np.array([pair.unit.num_tokens if pair.unit else 0 for pair in self.pairs], dtype=np.int64))
        kept = self.units
        tally.add_kept(len(kept), sum(unit.num_tokens for unit in kept), sum(unit.num_targets for unit in kept), 0)
        for pair in self.pairs:
            if pair.unit is None:
                tally.add_untrainable(pair.place, pair.reason)
            elif not pair.fits:
                tally.add_too_long(pair.place, pair.unit.num_tokens)

    def write(self, writer: UnitsWriter) -> None:
        """Append the pairs that are kept as units, to a writer of `PAIR_COLUMNS`."""
        if not (kept := self.units):
            return
        tables = [unit.columns() for unit in kept]
        writer.extend(
            [unit.num_tokens for unit in kept],
            [unit.num_targets for unit in kept],
            **{name: np.concatenate([table[name] for table in tables]) for name in PAIR_COLUMNS},
        )


def keep_pairs(block: Block, max_tokens: int) -> KeptPairs:
    """The pairs of a block whose rows 2k and 2k + 1 are the chosen and the rejected answer to one prompt.

    Pairs are never cut: a unit of more than `max_tokens` tokens, what both answers begin with counted once, is too
    long.
    """
    first_R, num_tokens_R = block.start_R.tolist(), block.num_tokens_R.tolist()
    target_T = (block.weight_T > 0) & (block.position_T > 0)
    rows = [slice(first, first + num) for first, num in zip(first_R, num_tokens_R, strict=True)]
    pairs = []
    for place, chosen, rejected in zip(block.places[::2], rows[::2], rows[1::2], strict=True):
        try:
            unit = pair_unit(block.id_T[chosen], target_T[chosen], block.id_T[rejected], target_T[rejected])
            pairs.append(Pair(place, unit, unit.num_tokens <= max_tokens))
        except InvalidInput as error:
            pairs.append(Pair(place, None, reason=error.message))
    return KeptPairs(pairs)


def pair_unit(chosen_ids: Ids, chosen_mask: Mask, rejected_ids: Ids, rejected_mask: Mask) -> TreeUnit:
    """One pair as one unit. Each row is a prompt with an answer; its targets are the tokens that its mask says.

    Raises:
        InvalidInput: there is nothing to prefer, or a row's first token is a target.
    """
    for name, mask in (("chosen", chosen_mask), ("rejected", rejected_mask)):
        if not np.any(mask):
            raise InvalidInput(f"the {name} answer has no token to train on", "pair")
    if np.array_equal(chosen_ids, rejected_ids):
        raise InvalidInput("both answers become the same tokens: nothing to prefer", "pair")
    return build_tree([_row(chosen_ids, chosen_mask, 1.0), _row(rejected_ids, rejected_mask, -1.0)])


def _row(ids: Ids, mask: Mask, sign: float) -> SequenceRow:
    return SequenceRow(
        token_ids=np.asarray(ids, dtype=np.int64),
        target_mask=np.asarray(mask, dtype=np.bool_),
        weight=np.ones(len(ids), dtype=np.float32),
        advantage=np.full(len(ids), sign, dtype=np.float32),
        old_logprob=np.full(len(ids), np.nan, dtype=np.float32),
        ref_logprob=np.zeros(len(ids), dtype=np.float32),
    )
