"""Columns of the data that a loss needs, checked before any step: a column that is missing is never taken for zeros.

Shape suffixes: N targets of all units.
"""

import numpy as np

from shared.errors import InvalidInput
from shared.jobs.packed import Floats, Ints, Units


def check_finite(units: Units, name: str, reason: str) -> None:
    """Raise InvalidInput, which names the column, the unit and the reason, if a trained token has no number."""
    values_N, weight_N = read_column(units, name, reason), read_column(units, "weight", reason)
    broken_N = ~np.isfinite(values_N) & (weight_N > 0)
    if broken_N.any():
        unit = int(np.searchsorted(units.target_offsets, int(broken_N.argmax()), side="right")) - 1
        raise InvalidInput(f"{name} is no number for {int(broken_N.sum())} trained tokens; {reason}", f"unit {unit}")


def check_teachers(units: Units, num_teachers: int) -> None:
    """Raise InvalidInput if a target's advantage is not the number of a teacher, from 0."""
    number_N = read_column(units, "advantage", "several teachers: it is the number of a target's own")
    if not np.isin(number_N, np.arange(num_teachers)).all():
        raise InvalidInput(f"advantage is a teacher's number, from 0 to {num_teachers - 1}", "data")


def read_column(units: Units, name: str, reason: str) -> Floats | Ints:
    """Return a column of all units, [N]. Raises InvalidInput, which names the reason, if they have none."""
    values = units.columns.get(name)
    if values is None:
        raise InvalidInput(f"the units have no column {name}; {reason}", "data")
    return values
