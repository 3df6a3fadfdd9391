"""Steps hold every unit once an epoch; bins hold every unit of a step, none split, none over, hardly any room lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.jobs.bins import (
    best_fit_decreasing,
    epoch_order,
    fullest_subset,
    pack_bins,
    steps_by_count,
    steps_by_tokens,
)

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=120)


def first_fit_decreasing(tokens: list[int], capacity: int) -> int:
    """An independent packer to compare with: how many bins it takes."""
    free: list[int] = []
    for size in sorted(tokens, reverse=True):
        for b, room in enumerate(free):
            if room >= size:
                free[b] -= size
                break
        else:
            free.append(capacity - size)
    return len(free)


def best_fit_by_the_book(tokens: list[int], capacity: int) -> list[int]:
    """Best fit decreasing, in quadratic time: the loads of its bins."""
    free: list[int] = []
    for size in sorted(tokens, reverse=True):
        fits = [room for room in free if room >= size]
        if fits:
            free.remove(min(fits))
            free.append(min(fits) - size)
        else:
            free.append(capacity - size)
    return sorted(capacity - room for room in free)


@given(lengths, st.integers(100, 300))
def test_best_fit_decreasing_is_exact(tokens: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(tokens, capacity)
    assert sorted(sum(tokens[i] for i in each) for each in bins) == best_fit_by_the_book(tokens, capacity)
    assert sorted(i for each in bins for i in each) == list(range(len(tokens)))


@settings(deadline=None)
@given(lengths, st.integers(100, 300))
def test_packing_holds_every_unit_once_and_never_takes_more_bins_than_first_fit(
    tokens: list[int], capacity: int
) -> None:
    bins = pack_bins(tokens, capacity)
    assert sorted(i for each in bins for i in each) == list(range(len(tokens)))
    assert max(sum(tokens[i] for i in each) for each in bins) <= capacity
    assert all(bins)
    fewest = -(-sum(tokens) // capacity)
    assert fewest <= len(bins) <= first_fit_decreasing(tokens, capacity) + 1
    assert len(bins) <= len(best_fit_decreasing(tokens, capacity)) <= len(bins) * 11 / 9 + 4
    assert bins == pack_bins(tokens, capacity)


def test_refilling_finds_a_perfect_packing_that_best_fit_misses() -> None:
    tokens = [19, 6, 12, 44, 11, 16, 31, 20, 18, 23]
    assert sum(tokens) == 200
    assert len(best_fit_decreasing(tokens, 100)) == 3
    assert [sum(tokens[i] for i in each) for each in pack_bins(tokens, 100)] == [100, 100]


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 80))
def test_the_fullest_subset_is_the_fullest(sizes: list[int], capacity: int) -> None:
    every = [sum(s for k, s in enumerate(sizes) if m >> k & 1) for m in range(1 << len(sizes))]
    assert sum(sizes[k] for k in fullest_subset(sizes, capacity)) == max(s for s in every if s <= capacity)


def test_an_epoch_is_a_permutation_that_never_changes() -> None:
    assert epoch_order(10, 7, 0).tolist() == FROZEN
    order = epoch_order(1000, 7, 1)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() != epoch_order(1000, 7, 2).tolist() != epoch_order(1000, 8, 1).tolist()
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert len(epoch_order(5, 2**63 - 1, 999)) == 5


FROZEN = [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]


@settings(deadline=None)
@given(lengths, st.integers(100, 700), st.integers(0, 5))
def test_steps_hold_every_unit_once_and_no_more_tokens_than_asked(tokens: list[int], batch: int, seed: int) -> None:
    order = epoch_order(len(tokens), seed, 0)
    steps = list(steps_by_tokens(order, np.array(tokens), batch))
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(tokens)))
    assert max(sum(tokens[u] for u in step) for step in steps) <= batch
    by_count = list(steps_by_count(order, 7))
    assert np.concatenate(by_count).tolist() == order.tolist()
    assert all(len(step) == 7 for step in by_count[:-1])


@pytest.mark.parametrize("batch_tokens", [2048, 4096, 10_000, 16384])
@pytest.mark.parametrize(("usual", "spread"), [(150, 0.4), (400, 0.5), (200, 1.0)])
def test_steps_of_tokens_and_their_bins_are_nearly_full(batch_tokens: int, usual: int, spread: float) -> None:
    drawn = np.random.Generator(np.random.PCG64(0)).lognormal(np.log(usual), spread, 8000)
    lengths = np.clip(drawn, 20, 1990).astype(np.int64)
    steps = list(steps_by_tokens(epoch_order(len(lengths), 0, 0), lengths, batch_tokens))
    capacity = batch_tokens // -(-batch_tokens // 2048)  # an even share, as the activity has it
    num_bins = sum(len(pack_bins(lengths[step].tolist(), capacity)) for step in steps)
    assert lengths.sum() / (num_bins * capacity) >= 0.995


def test_looking_ahead_puts_no_unit_off_for_long() -> None:
    """Long units, which rarely fit beside others, come out near their place all the same."""
    lengths = np.array([150, 140, 130, 120, 110] * 200)
    order = epoch_order(len(lengths), 0, 0)
    taken = np.concatenate(list(steps_by_tokens(order, lengths, 256)))
    place = np.empty(len(order), dtype=np.int64)
    place[taken] = np.arange(len(order))
    assert np.abs(place[order] - np.arange(len(order))).max() <= 2 * 64
