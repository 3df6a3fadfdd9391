"""Scores data before steps with weights that do not change: the policy's, a reference's, a teacher's or a critic's.

A unit is scored once, in the first bin of this rank that holds it, however often it is trained on. A job that resumes
from a checkpoint is scored by its initial weights in the same bins, so that the scores are equal to the bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.training import ScalarHead
from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.sums import LossSums
from megatron_worker.training.batches import NO_UNITS, Flags, PackedBatches, Scored
from shared.jobs.packed import Ints


@dataclass(frozen=True)
class Role:
    """A slot that scores data, and the destination of its scores.

    Attributes:
        slot: its name; None: the base.
        steps: those whose examples are scored. They end with the last step that is computed at all.
        take: is given what `TargetScores.found` has of this rank's share.
        head: that of the slot, if `outputs` asks for its values.
    """

    slot: str | None
    data: PackedBatches
    steps: range
    outputs: Outputs
    take: Callable[[dict[str, NDArray]], object]
    head: ScalarHead | None = None


def logprobs_role(
    slot: str | None,
    data: PackedBatches,
    steps: range,
    temperature: float = 1.0,
    *,
    column: Scored,
    at_N: Flags | None = None,
) -> Role:
    """Return a role whose log-probabilities, in nats, fill a column of the data.

    Args:
        temperature: what logits are divided by.
        at_N: the targets whose column is filled, bool; None: all.
    """
    outputs = Outputs(temperature=temperature)
    return Role(slot, data, steps, outputs, lambda found: data.put(column, found["logprobs"], at_N))


def likeliest_role(
    slot: str | None,
    data: PackedBatches,
    steps: range,
    temperature: float = 1.0,
    *,
    top_k: int,
    at_N: Flags | None = None,
) -> Role:
    """Return a role whose `top_k` likeliest ids and their log-probabilities become the data's; see `logprobs_role`.

    `top_k`: 0 for the row's own token. The last column has the log-probability of all other ids (`Outputs.rest`).
    """

    def take(found: dict[str, NDArray]) -> None:
        data.put_likeliest(found["top_ids"].astype(np.int32), found["top_logprobs"], at_N)

    return Role(slot, data, steps, Outputs(logprob=False, temperature=temperature, top_k=top_k, rest=True), take)


class TargetScores:
    """Collects scores of a data set's targets, a bin at a time. Targets of other ranks' bins have NaN (ids: -1).

    Attributes:
        found: `logprobs` [N] float32 in nats, and if they were requested `entropies` [N], `top_ids` [N, K] int64,
            `top_logprobs` [N, K]; or the `values` [N, L] of the slot's head.
    """

    def __init__(self, data: PackedBatches, outputs: Outputs, head: ScalarHead | None = None) -> None:
        """Columns are made here, for all outputs: a rank that has no bin must have them, too.

        `head`: that of the slot, if its values are asked for.
        """
        self._data = data
        shape_N, shape_NK = (data.units.header.num_targets,), (data.units.header.num_targets, outputs.num_named)
        self.found: dict[str, NDArray] = {}
        if outputs.logprob:
            self.found["logprobs"] = np.full(shape_N, np.nan, dtype=np.float32)
        if outputs.values and head is not None:
            self.found["values"] = np.full((*shape_N, len(head.names)), np.nan, dtype=np.float32)
        if outputs.entropy:
            self.found["entropies"] = np.full(shape_N, np.nan, dtype=np.float32)
        if outputs.num_named:
            self.found["top_ids"] = np.full(shape_NK, -1, dtype=np.int64)
            self.found["top_logprobs"] = np.full(shape_NK, np.nan, dtype=np.float32)

    def put(self, units: Ints, scores: Scores) -> None:
        """Store the scores of a bin's targets."""
        columns = {
            "logprobs": scores.logprob_N,
            "entropies": scores.entropy_N,
            "top_ids": scores.top_id_NK,
            "top_logprobs": scores.top_logprob_NK,
            "values": scores.value_NL,
        }
        places = self._data.units.target_indices(units)
        for name, column in self.found.items():
            tensor = columns[name]
            assert tensor is not None, name
            column[places] = (tensor if name == "top_ids" else tensor.detach().float()).cpu().numpy()

    def recorded(self, loss: LossFunction, bins: list[Ints]) -> LossFunction:
        """Return a loss that also stores the scores of each bin here, given in the order of `bins`."""
        left = iter(bins)

        def sums(scores: Scores, batch: Batch) -> LossSums:
            if not batch.is_empty:
                self.put(next(left), scores)
            return loss.sums(scores, batch)

        return LossFunction(loss.outputs, sums)


def bins_to_score(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    """Return the units that this rank scores, a bin at a time: each unit in the first bin that holds it.

    Bins are left out if no step from `first_step` on trains on their units; the others are not changed. Every rank gets
    the same number of bins; the last one may be empty.
    """
    everyone = [_turns_of_rank(data, first_step, num_steps, rank, dp_size) for rank in range(dp_size)]
    longest = max(len(own) for own in everyone)
    return everyone[dp_rank] + [NO_UNITS] * (longest - len(everyone[dp_rank]))


def share_of_rank(data: PackedBatches, num_steps: int, dp_rank: int, dp_size: int) -> NDArray[np.float64]:
    """Return for each unit 1 / (number of ranks that score it), or 0 if this rank does not: [U]."""
    held_RU = np.zeros((dp_size, data.units.header.num_units))
    for rank in range(dp_size):
        for units in _bins(data, range(num_steps), rank, dp_size):
            held_RU[rank, units] = 1
    share_U: NDArray[np.float64] = held_RU[dp_rank] / np.maximum(held_RU.sum(axis=0), 1)
    return share_U


def _turns_of_rank(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    met: set[int] = set()
    fresh: list[Ints] = []
    for units in _bins(data, range(num_steps), dp_rank, dp_size):
        fresh.append(np.array([unit for unit in units if int(unit) not in met], dtype=np.int64))
        met.update(units.tolist())
    ahead = {int(unit) for units in _bins(data, range(first_step, num_steps), dp_rank, dp_size) for unit in units}
    return [units for units in fresh if any(int(unit) in ahead for unit in units)]


def _bins(data: PackedBatches, steps: range, dp_rank: int, dp_size: int) -> Iterator[Ints]:
    return (units for step in steps for units in data.bins_of_rank(step, dp_rank, dp_size))
