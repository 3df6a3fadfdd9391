"""Advantages against formulas written again with exact fractions, one trajectory at a time, and their limits."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.trajectories.pack_trajectories import advantages_of, group_mean, group_normalized, leave_one_out

REWARDS = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=2, max_size=12)


def exact_std(values: list[Fraction]) -> float:
    mean = sum(values) / len(values)
    return float(sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5


@given(REWARDS)
def test_group_mean_is_the_distance_from_the_mean(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    expected = [float(r - sum(exact) / len(exact)) for r in exact]
    assert group_mean(np.array(rewards)) == pytest.approx(expected, abs=1e-10)


@given(REWARDS)
def test_group_normalized_is_in_units_of_the_standard_deviation(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    std, mean = exact_std(exact), sum(exact) / len(exact)
    expected = [float(r - mean) / (std + 1e-6) for r in exact]  # GRPO's own constant
    assert group_normalized(np.array(rewards)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(REWARDS)
def test_leave_one_out_compares_with_the_others_alone(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    expected = [float(r - sum(exact[:i] + exact[i + 1 :]) / (len(exact) - 1)) for i, r in enumerate(exact)]
    assert leave_one_out(np.array(rewards)) == pytest.approx(expected, abs=1e-9)


@given(REWARDS)
def test_leave_one_out_is_the_group_mean_stretched(rewards: list[float]) -> None:
    """RLOO = G / (G - 1) times Dr. GRPO's, an identity of the two papers' formulas."""
    stretch = len(rewards) / (len(rewards) - 1)
    assert leave_one_out(np.array(rewards)) == pytest.approx(group_mean(np.array(rewards)) * stretch, abs=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_batch_normalized_has_mean_0_and_spread_1_over_all_groups(groups: list[list[float]]) -> None:
    found = np.concatenate(advantages_of("batch_normalized", [np.array(g) for g in groups], []))
    exact = [Fraction(r) for g in groups for r in g]
    std, mean = exact_std(exact), sum(exact) / len(exact)
    assert found == pytest.approx([float(r - mean) / (std + 1e-6) for r in exact], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["group_mean", "group_normalized", "leave_one_out"])
def test_equal_rewards_say_nothing(kind) -> None:
    [found] = advantages_of(kind, [np.full(5, 0.3)], [])
    assert found == pytest.approx(np.zeros(5), abs=1e-9)


def test_given_advantages_are_taken_as_they_are() -> None:
    [found] = advantages_of("given", [np.array([9.0, 9.0])], [np.array([0.25, -4.0])])
    assert found.tolist() == [0.25, -4.0]


def test_groups_are_compared_within_themselves() -> None:
    found = advantages_of("group_mean", [np.array([0.0, 2.0]), np.array([10.0, 14.0])], [])
    assert [a.tolist() for a in found] == [[-1.0, 1.0], [-2.0, 2.0]]


def test_a_batch_scales_what_groups_compare() -> None:
    groups = [np.array([0.0, 2.0]), np.array([10.0, 14.0, 12.0])]
    whole = np.concatenate(groups)
    scaled = np.concatenate(advantages_of("batch_scaled", groups, []))
    centred = np.array([-1.0, 1.0, -2.0, 2.0, 0.0])
    np.testing.assert_allclose(scaled, centred / whole.std(), rtol=1e-6)
    normalized = np.concatenate(advantages_of("group_mean_normalized", groups, []))
    np.testing.assert_allclose(normalized, centred / centred.std(), rtol=1e-6)
