"""Bins as batches: every bin to exactly one rank, the right dtypes, no memory map held."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.training.batches import PackedBatches, to_batch
from shared.errors import CorruptArtifact
from shared.jobs.packed import Units
from tests.megatron_worker.workshop import write_plan, write_units

CPU = torch.device("cpu")


def a_batch(weight: Tensor) -> Batch:
    """A chain with one target after each of its tokens but the last."""
    num_targets = len(weight)
    chain_T, index_N, zeros_N = torch.arange(num_targets + 1), torch.arange(num_targets), torch.zeros(num_targets)
    return Batch(
        token_id_T=chain_T,
        position_T=chain_T,
        parent_T=chain_T - 1,
        hidden_index_N=index_N,
        label_N=index_N + 1,
        weight_N=weight,
        advantage_N=zeros_N,
        old_logprob_N=zeros_N,
        ref_logprob_N=zeros_N,
        sampler_logprob_N=zeros_N,
        sequence_N=torch.zeros(num_targets, dtype=torch.int64),
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_units(tmp_path / "units", num_units=9)
    write_plan(tmp_path / "plan", tmp_path / "units", [[[0, 1], [2], [3], [4], [5]], [[8], [6, 7]]])
    return tmp_path


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8])
def test_every_bin_goes_to_exactly_one_rank(packed: Path, dp_size: int):
    with PackedBatches.open(packed / "units", packed / "plan") as data:
        for step, expected in enumerate(([[0, 1], [2], [3], [4], [5]], [[8], [6, 7]])):
            dealt = [b.tolist() for rank in range(dp_size) for b in data.bins_of_rank(step, rank, dp_size)]
            assert sorted(dealt) == sorted(expected)
            sizes = [len(data.bins_of_rank(step, rank, dp_size)) for rank in range(dp_size)]
            assert max(sizes) - min(sizes) <= 1


def test_a_batch_holds_what_the_units_hold(packed: Path):
    with PackedBatches.open(packed / "units", packed / "plan") as data, Units(packed / "units") as units:
        first = next(data.batches(0, 0, 1, CPU))
        one, two = np.split(units.columns["token_id"], units.token_offsets[1:-1])[:2]
        assert first.token_id_T.tolist() == [*one, *two]
        assert first.position_T.tolist() == [*range(len(one)), *range(len(two))]
        assert first.parent_T.tolist() == [*range(-1, len(one) - 1), -1, *range(len(one), len(one) + len(two) - 1)]
        assert first.label_N.tolist() == [*one[1:], *two[1:]]
        assert first.token_id_T[first.hidden_index_N].tolist() == [*one[:-1], *two[:-1]]
        assert first.sequence_N.tolist() == [0] * (len(one) - 1) + [1] * (len(two) - 1)


def test_indices_are_int64_and_scores_float32(packed: Path):
    with PackedBatches.open(packed / "units", packed / "plan") as data:
        batch = next(data.batches(0, 0, 1, CPU))
    kinds = {name: tensor.dtype for name, tensor in vars(batch).items() if tensor is not None}
    floats = {"weight_N", "advantage_N", "old_logprob_N", "ref_logprob_N", "sampler_logprob_N"}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == floats
    assert {kind for name, kind in kinds.items() if name not in floats} == {torch.int64}


def test_a_batch_outlives_the_maps(packed: Path):
    with PackedBatches.open(packed / "units", packed / "plan") as data:
        batch = next(data.batches(0, 0, 1, CPU))
        assert str(packed) in Path("/proc/self/maps").read_text()
    assert str(packed) not in Path("/proc/self/maps").read_text()
    assert batch.token_id_T.sum() > 0


def test_a_batch_shares_no_memory_with_its_bin(packed: Path):
    with Units(packed / "units") as units:
        read = units.read_bin(np.array([0]))
        batch = to_batch(read, CPU)
        before = read.position_T.copy()
        batch.position_T.add_(1)
        assert (read.position_T == before).all()


def test_a_plan_of_other_units_is_refused(packed: Path):
    write_units(packed / "fewer", num_units=3)
    with PackedBatches.open(packed / "fewer", packed / "plan") as data, pytest.raises(CorruptArtifact, match="unit 8"):
        list(data.batches(1, 0, 1, CPU))
