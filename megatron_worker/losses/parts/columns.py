"""What a loss needs of the data, checked before any step: a column that is missing is never taken for zeros.

Shape suffixes: N targets of all units, P pairs of all units.
"""

import numpy as np

from shared.errors import InvalidInput
from shared.jobs.job import DPO, CrossEntropy, Loss, PolicyLoss
from shared.jobs.packed import Floats, Ints, Units


def check_columns(units: Units, loss: Loss) -> None:
    """Raises InvalidInput naming the column, the unit and the rule."""
    match loss:
        case CrossEntropy():
            pass
        case DPO():
            _check_pairs(units)
        case _:
            _check_finite(units, "advantage", f"the loss {loss.kind} learns from it")
            if needs_sampler(loss):
                reason = "truncated_importance" if loss.truncated_importance is not None else "old = sampler"
                _check_finite(units, "old_logprob", f"{reason} needs the sampler's log-probabilities")


def needs_sampler(loss: PolicyLoss) -> bool:
    return loss.old == "sampler" or loss.truncated_importance is not None


def _check_finite(units: Units, name: str, reason: str) -> None:
    values_N, weight_N = _column(units, name, reason), _column(units, "weight", reason)
    broken_N = ~np.isfinite(values_N) & (weight_N > 0)
    if broken_N.any():
        unit = _unit_of(units, int(broken_N.argmax()))
        raise InvalidInput(f"{name} is no number for {int(broken_N.sum())} trained tokens; {reason}", f"unit {unit}")


def _check_pairs(units: Units) -> None:
    """Of sequences 2k and 2k + 1 of a unit one is chosen (advantage +1), the other rejected (-1); both have targets."""
    reason = "dpo tells the chosen from the rejected by it"
    advantage_N, sequence_N = _column(units, "advantage", reason), _column(units, "sequence", reason)
    live_N = _column(units, "weight", reason) > 0
    unit_N = np.repeat(np.arange(units.header.num_units), np.diff(units.target_offsets))
    live = np.stack([unit_N[live_N], sequence_N[live_N]], axis=1)
    sequences, sequence_of_N = np.unique(live, axis=0, return_inverse=True)
    signs = np.zeros((len(sequences), 2), dtype=bool)  # has a chosen target, has a rejected one
    for column, sign in enumerate((1.0, -1.0)):
        signs[sequence_of_N.reshape(-1)[advantage_N[live_N] == sign], column] = True
    known_N = np.isin(advantage_N[live_N], (1.0, -1.0))
    if not known_N.all():
        raise InvalidInput("an advantage is neither +1 nor -1", f"unit {unit_N[live_N][~known_N][0]}")
    pairs, pair_of = np.unique(sequences // np.array([1, 2]), axis=0, return_inverse=True)
    num_chosen_P, num_rejected_P = (
        np.bincount(pair_of.reshape(-1), weights=signs[:, column], minlength=len(pairs)) for column in (0, 1)
    )
    whole_P = (num_chosen_P == 1) & (num_rejected_P == 1) & (np.bincount(pair_of.reshape(-1)) == 2)
    if not whole_P.all():
        unit, pair = pairs[~whole_P][0]
        raise InvalidInput(
            f"pair {pair} is not one chosen and one rejected sequence, each with targets", f"unit {unit}"
        )


def _column(units: Units, name: str, reason: str) -> Floats | Ints:
    values = units.column(name)
    if values is None:
        raise InvalidInput(f"the units have no column {name}; {reason}", "data")
    return values


def _unit_of(units: Units, target: int) -> int:
    return int(np.searchsorted(units.target_offsets, target, side="right")) - 1
