"""Micro-batches of a job that has a memory budget: how many tokens fit is measured, and steps are cut accordingly.

Shape suffix: T tokens of a micro-batch.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from megatron_worker.engine import Batch, Engine, LossFunction
from megatron_worker.tensors.pass_costs import PassCost, measure, two_sequences
from megatron_worker.tree_attention import longest_masked
from shared.jobs.packed import Ints, Units

_FIRST_TOKENS = {"cpu": 8, "cuda": 512}
_TOKENS = {device: tuple(int(first * 1.5**n) for n in range(24)) for device, first in _FIRST_TOKENS.items()}
_MOST_TOKENS = 1 << 40
_MARGIN = 0.08  # many short sequences take somewhat more memory than a probe's two


def measure_passes(
    engine: Engine, loss: LossFunction, budget_bytes: int, has_branches: bool, most_tokens: int | None = None
) -> PassCost:
    """Measure what forward_backward of so many tokens holds, if all of them are targets; of `most_tokens` at most.

    The slot that is active must hold no gradients: those of the passes that measure are dropped. Collective.
    """
    device, world_size = engine.facts.device, engine.facts.layout.world_size

    def probe(num_tokens: int) -> Iterator[float]:
        batch = _pairs(num_tokens, has_branches, device)
        yield 0
        engine.forward_backward(batch, loss)
        yield 0
        yield 0

    rising = _TOKENS[device.type]
    sizes = rising[:1] + tuple(size for size in rising[1:] if most_tokens is None or size <= most_tokens)
    cost = measure(probe, sizes, device, world_size, budget_bytes)
    engine.zero_grad()
    return cost


def tokens_that_fit(cost: PassCost, budget_bytes: float, mask_bytes: float = 0.0) -> int:
    """Return the tokens of the largest pass within the budget. `mask_bytes`: for each token, besides the cost."""

    def fits(num_tokens: int) -> bool:
        return (cost.at(num_tokens).forward + num_tokens * mask_bytes) * (1 + _MARGIN) <= budget_bytes

    too_many = 1
    while too_many < _MOST_TOKENS and fits(too_many):
        too_many *= 2
    fit = too_many // 2
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if fits(middle) else (fit, middle)
    return fit


def most_mask_bytes(units: Units, element_bytes: int) -> float:
    """Return an upper bound of the mask bytes for each token of trees on the CPU, where L tokens have a mask [L, L]."""
    parent_T = units.columns.get("parent")
    if parent_T is None or not len(parent_T):
        return 0.0
    length_U = np.diff(units.token_offsets).astype(np.int64)
    begin_U = units.token_offsets[:-1].astype(np.int64)
    index_T = np.arange(len(parent_T)) - np.repeat(begin_U, length_U)
    num_begun_U = np.add.reduceat(parent_T != index_T - 1, begin_U[length_U > 0])  # branches but the first
    if not num_begun_U.any():
        return 0.0
    return element_bytes * float(np.minimum(length_U[length_U > 0], longest_masked(2 * num_begun_U + 1)).max())


def _pairs(num_tokens: int, branches: bool, device: torch.device) -> Batch:
    """Make a bin of two sequences for which every loss has a value; with `branches`, they share a short prefix."""
    index_T = torch.arange(num_tokens, device=device)
    position_T, parent_T, second = two_sequences(num_tokens, branches, device)
    sequence_T = (index_T >= second).long()
    batch = Batch.to_score(torch.zeros_like(index_T), position_T, parent_T, index_T, torch.zeros_like(index_T))
    advantage_T = 1.0 - 2.0 * sequence_T
    return dataclasses.replace(
        batch, weight_N=torch.ones_like(advantage_T), advantage_N=advantage_T, sequence_N=sequence_T
    )


def cut(units: Ints, num_tokens: Ints, most_tokens: int) -> Iterator[Ints]:
    """Yield units in their order, as many at a time as stay within `most_tokens`.

    Args:
        num_tokens: of each of `units`, none of which is beyond `most_tokens`.
    """
    begin, total = 0, 0
    for place, tokens in enumerate(num_tokens.tolist()):
        if total + tokens > most_tokens:
            yield units[begin:place]
            begin, total = place, 0
        total += tokens
    if begin < len(units):
        yield units[begin:]
