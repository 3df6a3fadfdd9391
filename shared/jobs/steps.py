"""Decides which units make each step of a run, and counts passes, steps and tokens.

Pure functions of lengths and a seed. Legend: U units.
"""

import math
from collections.abc import Iterator
from itertools import count, islice
from typing import Self

from pydantic import Field, model_validator

from longshore.fields import Frozen
from shared.errors import InvalidInput
from shared.jobs.bins import Indices, epoch_order, steps_by_count, steps_by_tokens

MOST_STEPS_OF_EPOCHS = 50_000
_MOST_COUNTED = 1_000_000  # units whose steps of `batch_tokens` are counted one by one: seconds


class Cut(Frozen):
    """How units are cut into steps: `epochs` or `steps`, and `batch_size` or `batch_tokens`.

    An epoch's last step may be smaller. With `steps` the data is repeated for as many epochs as needed.
    """

    seed: int = Field(ge=0, lt=2**63)
    epochs: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)

    @property
    def _is_cut(self) -> bool:
        return True

    @model_validator(mode="after")
    def _one_length_one_batch(self) -> Self:
        if self._is_cut and ((self.epochs is None) == (self.steps is None)):
            raise ValueError("give exactly one of epochs and steps")
        if self._is_cut and ((self.batch_size is None) == (self.batch_tokens is None)):
            raise ValueError("give exactly one of batch_size and batch_tokens")
        return self


class RunLength(Frozen):
    """The passes, steps and tokens of a run. `is_exact`: equal to those of its plan."""

    epochs: float
    steps: int
    tokens: int
    is_exact: bool = True


def steps_of(tokens_U: Indices, cut: Cut) -> Iterator[Indices]:
    """Cut units into steps, one epoch after another. A fraction of an epoch is the first part of its order."""
    return islice(_endless(tokens_U, cut), cut.steps)


def _endless(tokens_U: Indices, cut: Cut) -> Iterator[Indices]:
    for epoch in count():
        order_U = epoch_order(len(tokens_U), cut.seed, epoch)
        if cut.epochs is not None:
            order_U = order_U[: _units_of_epoch(len(tokens_U), cut.epochs, epoch)]
        if not len(order_U):
            return
        if cut.batch_size is not None:
            yield from steps_by_count(order_U, cut.batch_size)
        elif cut.batch_tokens is not None:
            yield from steps_by_tokens(order_U, tokens_U, cut.batch_tokens)


def _units_of_epoch(num_units: int, epochs: float, epoch: int) -> int:
    """Return how many of `num_units` an epoch trains: in the first one at least 1."""
    units = round(min(1.0, max(0.0, epochs - epoch)) * num_units)
    return min(num_units, max(units, 1)) if epoch == 0 else units


def check_epochs(tokens_U: Indices, cut: Cut) -> None:
    """Raise InvalidInput if `epochs` means more than MOST_STEPS_OF_EPOCHS steps, since that is likely a mistake."""
    if cut.epochs is None:
        return
    size, batch = (int(tokens_U.sum()), cut.batch_tokens) if cut.batch_size is None else (len(tokens_U), cut.batch_size)
    num_steps = round(cut.epochs * size / (batch or 1))
    if num_steps > MOST_STEPS_OF_EPOCHS:
        found = f"{cut.epochs:g} epochs of {len(tokens_U):,} examples are {num_steps:,} steps"
        advice = "give fewer epochs or a larger batch (or, if you mean it, the number of steps)"
        raise InvalidInput(f"{found}, {MOST_STEPS_OF_EPOCHS:,} at most: {advice}", "epochs")


def length_of(tokens_U: Indices, cut: Cut) -> RunLength:
    """Count the passes, steps and tokens that `steps_of` makes. Steps of `batch_tokens` beyond a million units are
    assumed to be as large as those before.
    """
    num_units = len(tokens_U)
    if not num_units:
        return RunLength(epochs=0.0, steps=0, tokens=0)
    if cut.epochs is not None:
        whole, rest = int(cut.epochs), _units_of_epoch(num_units, cut.epochs, int(cut.epochs))
        planned = whole * num_units + rest
        steps, is_exact = _count_steps(tokens_U, cut, planned)
        tokens = _tokens_of_first(planned, tokens_U, cut.seed)
        return RunLength(epochs=planned / num_units, steps=steps, tokens=tokens, is_exact=is_exact)
    assert cut.steps is not None
    planned, tokens, is_exact = _count_units(tokens_U, cut, cut.steps)
    return RunLength(epochs=planned / num_units, steps=cut.steps, tokens=tokens, is_exact=is_exact)


def length_of_draws(tokens_U: Indices, cut: Cut) -> RunLength:
    """Count rollouts' passes, steps and tokens. Every step has `batch_size` prompts, even if a pass ends within it."""
    num_units, batch_size = len(tokens_U), cut.batch_size
    assert batch_size is not None
    if not num_units:
        return RunLength(epochs=0.0, steps=cut.steps or 1, tokens=0)
    steps = cut.steps or max(1, math.floor((cut.epochs or 0) * num_units / batch_size))
    drawn = steps * batch_size
    return RunLength(epochs=drawn / num_units, steps=steps, tokens=_tokens_of_first(drawn, tokens_U, cut.seed))


def _tokens_of_first(num_drawn: int, tokens_U: Indices, seed: int) -> int:
    """Return the tokens of the first units in the order of their epochs."""
    whole, rest = divmod(num_drawn, len(tokens_U))
    tokens = whole * int(tokens_U.sum())
    if rest:
        tokens += int(tokens_U[epoch_order(len(tokens_U), seed, whole)[:rest]].sum())
    return tokens


def _count_steps(tokens_U: Indices, cut: Cut, planned: int) -> tuple[int, bool]:
    """Return how many steps `planned` units take, and whether that is exact."""
    if cut.batch_size is not None:
        whole, rest = divmod(planned, len(tokens_U))
        return whole * math.ceil(len(tokens_U) / cut.batch_size) + math.ceil(rest / cut.batch_size), True
    steps = counted = 0
    for step in steps_of(tokens_U, cut):
        if counted > _MOST_COUNTED:
            return round(steps * planned / counted), False
        steps, counted = steps + 1, counted + len(step)
    return steps, True


def _count_units(tokens_U: Indices, cut: Cut, steps: int) -> tuple[int, int, bool]:
    """Return the units and tokens of this many steps, and whether they are exact."""
    if cut.batch_size is not None:
        whole, left = divmod(steps, math.ceil(len(tokens_U) / cut.batch_size))
        planned = whole * len(tokens_U) + min(len(tokens_U), left * cut.batch_size)
        return planned, _tokens_of_first(planned, tokens_U, cut.seed), True
    counted = tokens = 0
    for number, step in enumerate(steps_of(tokens_U, cut)):
        if counted > _MOST_COUNTED:
            return round(counted * steps / number), round(tokens * steps / number), False
        counted, tokens = counted + len(step), tokens + int(tokens_U[step].sum())
    return counted, tokens, True
