"""Sequences that share prefixes, as one bin of trees or as a bin of chains each, and a loss that reads every column."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_worker.engine import Batch, LossFunction, LossSums, Outputs, Scores
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.training.batches import to_batch
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, RouteShape, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, build_tree
from tests.megatron_worker.engines import furthest, gradient
from tests.megatron_worker.rows import VOCAB_SIZE
from tests.megatron_worker.scores import logprobs


def random_sequences(seed: int, num_groups: int = 2, num_sequences: int = 5) -> list[SequenceRow]:
    """Groups that part at a template, a prompt, in the middle of what was sampled, and not at all; one stands alone."""
    generator = np.random.default_rng(seed)

    def ids(longest: int) -> list[int]:
        return generator.integers(3, VOCAB_SIZE, generator.integers(1, longest + 1)).tolist()

    template, rows = ids(9), [_row(ids(40), 1, generator)]
    for _ in range(num_groups):
        prompt, turn = template + ids(60), ids(20)
        for number in range(num_sequences):
            ends = [turn + ids(12) + ids(30), ids(30), turn + ids(30), turn, turn]
            rows.append(_row(prompt + ends[number % len(ends)], len(prompt), generator))
    return rows


def _row(ids: list[int], start: int, generator: np.random.Generator) -> SequenceRow:
    """Three of four tokens from `start` on are targets."""
    mask_L = (np.arange(len(ids)) >= start) & (generator.random(len(ids)) < 0.75)
    mask_L[-1], mask_L[0] = len(ids) > 1, False
    weight_L, advantage_L = generator.choice([0.5, 1.0], len(ids)), generator.standard_normal(len(ids))
    scores_2L = -generator.random((2, len(ids)))
    return SequenceRow(np.array(ids), mask_L, weight_L, advantage_L, *scores_2L)


def as_tree(rows: Sequence[SequenceRow], routes: RouteShape | None = None) -> Batch:
    """All rows in one bin; what they share stands once. `routes`: of the rows' own, if they have any."""
    return as_batch([build_tree(rows)], routes)


def as_chain(row: SequenceRow, routes: RouteShape | None = None) -> Batch:
    """One row in a bin of its own."""
    return as_batch([build_tree([row])], routes)


def as_batch(units: Sequence[TreeUnit], routes: RouteShape | None = None) -> Batch:
    """Units in one bin, by way of the disk as everything that is trained."""
    with tempfile.TemporaryDirectory() as folder:
        writer = UnitsWriter(Path(folder), (*TOKEN_COLUMNS, *TARGET_COLUMNS), routes)
        for unit in units:
            writer.append(**unit.columns())
        writer.close()
        with Units(Path(folder)) as stored:
            return to_batch(stored.read_bin(np.arange(len(units))), torch.device("cpu"))


def _sums(scores: Scores, batch: Batch) -> LossSums:
    assert scores.logprob_N is not None
    ratio_N = (scores.logprob_N - batch.old_logprob_N).clamp(max=1).exp()
    loss = -(batch.weight_N * (batch.advantage_N * ratio_N + (scores.logprob_N - batch.ref_logprob_N) ** 2)).sum()
    return LossSums(loss, batch.weight_N.sum())


LOSS = LossFunction(Outputs(), _sums)


def as_one_sequence(parent_T: Tensor) -> Tensor:
    """Parents of the same tokens if nothing began anew."""
    return torch.arange(len(parent_T)) - 1


def as_chains(parent_T: Tensor) -> Tensor:
    """Parents of the same tokens if each branch began anew."""
    before_T = torch.arange(len(parent_T)) - 1
    return torch.where(parent_T == before_T, before_T, -1)


def trees_beside_chains(driven: Engine, folder: Path) -> tuple[float, float]:
    """How far two trees are from their sequences alone: a logprob, in nats; a gradient, by its largest element."""
    results = []
    for name, bins in (
        ("trees", [as_tree(random_sequences(seed)) for seed in range(2)]),
        ("chains", [as_chain(row) for seed in range(2) for row in random_sequences(seed)]),
    ):
        logprob_N = torch.cat([logprobs(driven, batch) for batch in bins])
        for batch in bins:
            driven.forward_backward(batch, LOSS)
        results.append((logprob_N, gradient(driven, folder / name)))
    (tree_N, by_tree), (chain_N, by_chain) = results
    largest = max(float(each.abs().max()) for each in by_chain.values())
    return float((tree_N - chain_N).abs().max()), furthest(by_tree, by_chain) / largest
