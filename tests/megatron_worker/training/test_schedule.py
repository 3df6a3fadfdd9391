"""The schedule against its formula, and against torch's decay."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from megatron_worker.planned import learning_rate
from shared.jobs.job import Schedule


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
