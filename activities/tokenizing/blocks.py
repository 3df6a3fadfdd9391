"""Blocks of tokenized rows: which rows and tokens are kept, and what is a target.

Legend: R rows of a block, T tokens of a block, one row behind the other.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from activities.tokenizing.report import Tally
from shared.errors import InvalidInput
from shared.jobs.packed import UnitsWriter


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
class Kept:
    """Flags of what is trained of a block, by row and by token."""

    kept_R: NDArray[np.bool_]
    too_long_R: NDArray[np.bool_]
    kept_T: NDArray[np.bool_]
    target_T: NDArray[np.bool_]


def keep(block: Block, max_tokens: int, truncate: bool) -> Kept:
    """Drop or cut rows beyond `max_tokens`, then drop those without a target. A row's first token is never a target."""
    row_T, position_T = block.row_T, block.position_T
    too_long_R = block.num_tokens_R > max_tokens
    fits_T = position_T < max_tokens if truncate else ~too_long_R[row_T]
    target_T = fits_T & (position_T > 0) & (block.weight_T > 0)
    has_target_R = np.bincount(row_T[target_T], minlength=len(too_long_R)) > 0
    return Kept(has_target_R, too_long_R, fits_T & has_target_R[row_T], target_T)


def count(block: Block, kept: Kept, truncate: bool, tally: Tally) -> None:
    """Tell the tally what became of each row."""
    tally.add_rows(block.num_tokens_R)
    tally.add_kept(
        int(kept.kept_R.sum()),
        int(kept.kept_T.sum()),
        int(kept.target_T.sum()),
        int((kept.kept_R & kept.too_long_R).sum()) if truncate else 0,
    )
    for row in np.flatnonzero(~kept.kept_R):
        if kept.too_long_R[row] and not truncate:
            tally.add_too_long(block.places[row], int(block.num_tokens_R[row]))
        else:
            tally.add_fully_masked(block.places[row], was_truncated=bool(kept.too_long_R[row]))


def write(block: Block, kept: Kept, writer: UnitsWriter) -> None:
    """Append the kept rows as units: label x[t] is predicted from the hidden state of token t-1."""
    row_T, num_rows = block.row_T, len(block.num_tokens_R)
    writer.extend(
        np.bincount(row_T[kept.kept_T], minlength=num_rows)[kept.kept_R],
        np.bincount(row_T[kept.target_T], minlength=num_rows)[kept.kept_R],
        token_id=block.id_T[kept.kept_T],
        hidden_index=block.position_T[kept.target_T] - 1,
        label=block.label_T[kept.target_T],
        weight=block.weight_T[kept.target_T],
    )
