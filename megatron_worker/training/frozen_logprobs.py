"""Chooses the units that are scored for a job's frozen log-probabilities: the reference's and the old policy's.

A unit is scored once, in the first bin of this rank that holds it, however often it is trained on. A job that goes on
from a checkpoint is scored by its initial weights in the same bins, so that the log-probabilities are equal to the bit.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_worker.training.batches import NO_UNITS, PackedBatches
from shared.jobs.packed import Ints


def bins_to_score(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    """Return the units that this rank scores, a bin at a time: each unit in the first bin that holds it.

    Bins are left out if no step from `first_step` on trains on their units; the others are not changed. Every rank gets
    the same number of bins, the last of which may be empty.
    """
    everyone = [_turns_of_rank(data, first_step, num_steps, rank, dp_size) for rank in range(dp_size)]
    longest = max(len(own) for own in everyone)
    return everyone[dp_rank] + [NO_UNITS] * (longest - len(everyone[dp_rank]))


def share_of_rank(data: PackedBatches, num_steps: int, dp_rank: int, dp_size: int) -> NDArray[np.float64]:
    """Return of each unit 1 over the number of ranks that score it, or 0 where this one does not: [U]."""
    held_RU = np.zeros((dp_size, data.units.header.num_units))
    for rank in range(dp_size):
        for step in range(num_steps):
            for units in data.bins_of_rank(step, rank, dp_size):
                held_RU[rank, units] = 1
    share_U: NDArray[np.float64] = held_RU[dp_rank] / np.maximum(held_RU.sum(axis=0), 1)
    return share_U


def _turns_of_rank(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    met: set[int] = set()
    fresh: list[Ints] = []
    for step in range(num_steps):
        for units in data.bins_of_rank(step, dp_rank, dp_size):
            fresh.append(np.array([unit for unit in units if int(unit) not in met], dtype=np.int64))
            met.update(units.tolist())
    ahead = {
        int(unit)
        for step in range(first_step, num_steps)
        for units in data.bins_of_rank(step, dp_rank, dp_size)
        for unit in units
    }
    return [units for units in fresh if any(int(unit) in ahead for unit in units)]
