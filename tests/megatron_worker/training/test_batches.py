"""Bins as batches, each to exactly one rank; the schedule against torch's; a tiny pass that tries a device."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from megatron_worker.engine import Batch
from megatron_worker.planned import learning_rate
from megatron_worker.training import trial
from megatron_worker.training.batches import PackedBatches, to_batch
from shared.errors import CorruptArtifact
from shared.jobs.job import Schedule
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


def rates(kind: str, num_steps: int, warmup_steps: int = 0) -> list[float]:
    schedule = Schedule(kind=kind, learning_rate=0.1, warmup_steps=warmup_steps)
    return [learning_rate(schedule, step, num_steps) for step in range(num_steps)]


def test_warmup_rises_by_equal_parts_to_the_full_rate():
    assert rates("constant", 6, warmup_steps=3) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_linear_decay_ends_one_part_above_zero():
    assert rates("linear", 6, warmup_steps=1) == pytest.approx([0.05, 0.1, 0.08, 0.06, 0.04, 0.02])


def test_cosine_is_half_way_down_in_the_middle():
    assert rates("cosine", 4)[:3] == pytest.approx([0.1, 0.1 * (1 + math.sqrt(0.5)) / 2, 0.05])


def test_rates_of_all_steps_take_the_place_of_a_schedule():
    schedule = Schedule(kind="linear", learning_rate=0.3, rates=(0.1, 0.3, 0.0))
    assert [learning_rate(schedule, step, 3) for step in range(3)] == [0.1, 0.3, 0.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_is_that_of_torch(kind: str):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = LinearLR(optimizer, 1.0, 0.0, 20) if kind == "linear" else CosineAnnealingLR(optimizer, 20)
    for rate in rates(kind, 20):
        assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    num_steps=st.integers(1, 300),
    warmup_steps=st.integers(0, 400),
)
def test_every_step_learns_and_none_beyond_the_full_rate(kind: str, num_steps: int, warmup_steps: int):
    assert all(0 < rate <= 0.1 for rate in rates(kind, num_steps, warmup_steps))


def test_a_run_of_several_jobs_decays_over_all_of_them():
    schedule = Schedule(kind="linear", learning_rate=0.4, num_steps=8)
    assert [learning_rate(schedule, step, 2 * (step // 2 + 1)) for step in (0, 2, 7)] == pytest.approx([0.4, 0.3, 0.05])


def test_a_device_that_fails_is_named_with_its_error() -> None:
    assert trial._tried(torch.device("cpu")) is None
    told = trial._tried(torch.device("meta"))
    assert told is not None and told.startswith("meta fails at a tiny pass: ")


def test_a_device_that_computes_wrongly_is_named(monkeypatch) -> None:
    exact = torch.Tensor.square
    monkeypatch.setattr(torch.Tensor, "square", lambda given: exact(given) + given)
    assert trial._tried(torch.device("cpu")) == "cpu computes a tiny pass wrongly"


def test_packages_that_do_not_load_are_told(monkeypatch) -> None:
    monkeypatch.setattr(trial, "_MODULES", {"gpu": ("no_such_module",)})
    assert trial.lacks("gpu") == ["its packages do not load: No module named 'no_such_module'"]
