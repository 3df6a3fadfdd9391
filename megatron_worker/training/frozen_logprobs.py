"""Log-probabilities that are computed at the start of a job and then frozen: the reference's and the old policy's.

A unit is scored once, in the first bin of this rank that holds it, however often it is trained on. A job that is gone
on with is scored by the weights that it began with, in the same turns, so that its old log-probabilities are the same.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_worker.engine import Engine, Outputs
from megatron_worker.training.batches import NO_UNITS, PackedBatches
from shared.jobs.job import Reference
from shared.jobs.packed import Ints

REFERENCE = "reference"


def bins_to_score(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    """Return the units that this rank scores, a bin at a time: each unit in the first of its bins.

    Turns whose units no step from `first_step` on trains on are left out; the others stay as they are. All ranks have
    as many: those that come to an end before others have empty ones.
    """
    everyone = [_turns_of_rank(data, first_step, num_steps, rank, dp_size) for rank in range(dp_size)]
    longest = max(len(own) for own in everyone)
    return everyone[dp_rank] + [NO_UNITS] * (longest - len(everyone[dp_rank]))


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


def score(engine: Engine, data: PackedBatches, whose: list[Ints], temperature: float) -> NDArray[np.float32]:
    """Compute log-probabilities of the targets of these units with the current weights; NaN for all others.

    Args:
        temperature: what logits are divided by, for these to be compared with a loss's own.

    Returns: float32, in nats, one for each target on file.
    """
    logprob = np.full(data.units.header.num_targets, np.nan, dtype=np.float32)
    outputs = Outputs(temperature=temperature)
    with torch.no_grad():
        for units in whose:
            logprob_N = engine.forward(data.batch(units, engine.facts.device), outputs).logprob_N
            assert logprob_N is not None
            logprob[data.units.target_indices(units)] = logprob_N.float().cpu().numpy()
    return logprob


def score_reference(
    engine: Engine,
    scored: list[tuple[PackedBatches, list[Ints]]],
    reference: Reference,
    folder: Path | None,
    trained: str | None,
    temperature: float,
) -> None:
    """Fill `ref_logprob`. The base must be as it was published.

    Args:
        scored: data, and the units of it to score, a bin at a time.
        folder: of the reference adapter, if it is one.
        trained: the slot to make active again, None where the base itself is trained.
    """
    if reference == "base":
        engine.set_adapter(None)
    else:
        assert folder is not None
        engine.load_adapter(REFERENCE, folder, None, trainable=False)
    for data, whose in scored:
        data.put("ref_logprob_N", score(engine, data, whose, temperature))
    engine.set_adapter(trained)
