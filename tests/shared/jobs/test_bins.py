"""Bins hold every unit of a step whole; packed files are read as they were written, and damage is noticed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.sampling.completions import Rows, numbers_of
from activities.tokenizing.units import PackRequest, write_plan
from longshore.fields import Artifact
from longshore.views import Cut
from shared.errors import CorruptArtifact
from shared.jobs import bins
from shared.jobs.bins import (
    best_fit_decreasing,
    epoch_order,
    fullest_subset,
    length_of,
    length_of_draws,
    pack_bins,
    steps_by_count,
    steps_by_tokens,
)
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, PackedBin, Plan, PlanWriter, Units, UnitsWriter

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


UNITS = Artifact(uri="file:///units", sha256="0" * 64)


@settings(deadline=None, max_examples=100)
@given(
    num_tokens=st.lists(st.integers(2, 64), min_size=1, max_size=60),
    length=st.one_of(
        st.builds(lambda n: {"epochs": n}, st.floats(0.01, 4)), st.builds(lambda n: {"steps": n}, st.integers(1, 30))
    ),
    batch=st.one_of(
        st.builds(lambda n: {"batch_size": n}, st.integers(1, 20)),
        st.builds(lambda n: {"batch_tokens": n}, st.integers(64, 300)),
    ),
    seed=st.integers(0, 9),
)
def test_a_length_is_its_plan_s_to_the_token(
    num_tokens: list[int],
    length: dict[str, Any],
    batch: dict[str, Any],
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokens_U = np.array(num_tokens)
    cut = {"seed": seed, **length, **batch}
    found = length_of(tokens_U, Cut(**cut))
    request = PackRequest(units=UNITS, bin_tokens=64, **cut)
    header = write_plan(tokens_U, request, tmp_path_factory.mktemp("plan"))
    assert found.is_exact and (found.steps, found.tokens) == (header.num_steps, header.num_tokens)


@settings(deadline=None, max_examples=50)
@given(
    num_tokens=st.lists(st.integers(2, 64), min_size=1, max_size=40),
    num_steps=st.integers(1, 12),
    per_step=st.integers(1, 50),
    seed=st.integers(0, 9),
)
def test_the_prompts_of_an_estimate_are_those_that_rollouts_draw(
    num_tokens: list[int], num_steps: int, per_step: int, seed: int
) -> None:
    tokens_U = np.array(num_tokens)
    found = length_of_draws(tokens_U, Cut(seed=seed, steps=num_steps, batch_size=per_step))
    drawn = [
        number
        for step in range(num_steps)
        for number in numbers_of(Rows(first=step * per_step, count=per_step, seed=seed), len(tokens_U))
    ]
    assert (found.steps, found.tokens) == (num_steps, tokens_U[drawn].sum())
    assert found.epochs == pytest.approx(len(drawn) / len(tokens_U))


@pytest.mark.parametrize("length", [{"epochs": 3.5}, {"steps": 90}])
def test_beyond_what_is_counted_one_by_one_steps_of_tokens_are_about(
    length: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_U = np.random.default_rng(0).integers(8, 64, 800)
    cut = Cut(seed=1, batch_tokens=1024, **length)
    exact = length_of(tokens_U, cut)
    monkeypatch.setattr(bins, "_MOST_COUNTED", 300)
    found = length_of(tokens_U, cut)
    assert exact.is_exact and not found.is_exact
    assert found.steps == pytest.approx(exact.steps, rel=0.06) and found.tokens == pytest.approx(exact.tokens, rel=0.06)
    assert "epochs" not in length or found.tokens == exact.tokens


def test_of_nothing_there_is_no_step() -> None:
    nothing = length_of(np.array([], dtype=np.int64), Cut(seed=0, epochs=1, batch_size=1))
    assert (nothing.steps, nothing.tokens) == (0, 0)


Unit = tuple[list[int], list[int]]  # token ids, and which of them are targets
units = st.lists(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6).flatmap(
        lambda ids: st.tuples(st.just(ids), st.lists(st.integers(1, max(1, len(ids) - 1)), max_size=4 * (len(ids) > 1)))
    ),
    max_size=6,
)


def columns(unit: Unit) -> dict[str, np.ndarray]:
    ids, targets = np.array(unit[0], dtype=np.int64), np.array(sorted(unit[1]), dtype=np.int64)
    return {"token_id": ids, "hidden_index": targets - 1, "label": ids[targets], "weight": targets / 2}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(units, st.randoms())
def test_bins_are_units_with_shifted_indices(tmp_path: Path, written: list[Unit], random) -> None:
    writer = UnitsWriter(tmp_path)
    for unit in written:
        writer.append(**columns(unit))
    header = writer.close()
    assert header.num_units == len(written) and header.num_tokens == sum(len(ids) for ids, _ in written)
    order = random.sample(range(len(written)), len(written))
    with Units(tmp_path) as read:
        np.testing.assert_array_equal(np.diff(read.token_offsets), [len(ids) for ids, _ in written])
        np.testing.assert_array_equal(Units.read_lengths(tmp_path), np.diff(read.token_offsets))
        packed = read.read_bin(np.array(order, dtype=np.int64))
    at = targets_at = 0
    for unit in order:
        expected, num_tokens = columns(written[unit]), len(written[unit][0])
        tokens, targets = slice(at, at + num_tokens), slice(targets_at, targets_at + len(expected["label"]))
        np.testing.assert_array_equal(packed.token_id_T[tokens], expected["token_id"])
        np.testing.assert_array_equal(packed.position_T[tokens], np.arange(num_tokens))
        np.testing.assert_array_equal(packed.parent_T[tokens], [-1, *range(at, at + num_tokens - 1)])
        np.testing.assert_array_equal(packed.hidden_index_N[targets], expected["hidden_index"] + at)
        np.testing.assert_array_equal(packed.label_N[targets], expected["label"])
        np.testing.assert_array_equal(packed.weight_N[targets], expected["weight"])
        at, targets_at = tokens.stop, targets.stop
    assert len(packed.token_id_T) == at and len(packed.label_N) == targets_at
    assert not packed.advantage_N.any() and not packed.ref_logprob_N.any()


def test_many_units_at_once_give_the_same_bytes_as_one_by_one(tmp_path: Path) -> None:
    written: list[Unit] = [([5, 6, 7], [1, 2]), ([8], []), ([9, 10], [1])]
    one, many = UnitsWriter(tmp_path / "one"), UnitsWriter(tmp_path / "many")
    for unit in written:
        one.append(**columns(unit))
    joined = [columns(unit) for unit in written]
    many.extend([3, 1, 2], [2, 0, 1], **{name: np.concatenate([c[name] for c in joined]) for name in joined[0]})
    assert one.close() == many.close()
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "many" / file.name).read_bytes()


def a_tree(folder: Path) -> PackedBin:
    """A prefix of two tokens with two branches of one, as two sequences; then the same again."""
    writer = UnitsWriter(folder, (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    for _ in range(2):
        writer.append(
            token_id=np.array([1, 2, 3, 4]),
            position=np.array([0, 1, 2, 2]),
            parent=np.array([-1, 0, 1, 1]),
            hidden_index=np.array([1, 1]),
            label=np.array([3, 4]),
            weight=np.array([1.0, 1.0]),
            advantage=np.array([0.5, -0.5]),
            old_logprob=np.array([-1.0, -2.0]),
            ref_logprob=np.array([-1.5, -2.5]),
            sequence=np.array([0, 1]),
        )
    writer.close()
    with Units(folder) as units:
        return units.read_bin(np.array([0, 1]))


def test_a_forest_keeps_its_parents_positions_and_sequences(tmp_path: Path) -> None:
    packed = a_tree(tmp_path)
    assert packed.position_T.tolist() == [0, 1, 2, 2, 0, 1, 2, 2]
    assert packed.parent_T.tolist() == [-1, 0, 1, 1, -1, 4, 5, 5]
    assert packed.hidden_index_N.tolist() == [1, 1, 5, 5]
    assert packed.sequence_N.tolist() == [0, 1, 2, 3]
    assert packed.old_logprob_N.tolist() == [-1, -2, -1, -2] and packed.advantage_N.tolist() == [0.5, -0.5] * 2


def test_a_plan_reads_back_and_counts_its_tokens(tmp_path: Path) -> None:
    steps = [[[2, 0], [1]], [[0]], [[1, 2]]]
    writer = PlanWriter(tmp_path, bin_tokens=10)
    for step in steps:
        writer.append_step([np.array(each) for each in step])
    header = writer.close(np.array([5, 6, 5]))
    assert (header.num_steps, header.num_bins, header.num_tokens) == (3, 4, 32)
    assert header.packing_efficiency == 32 / 40
    plan = Plan(tmp_path)
    assert [[each.tolist() for each in plan.bins(k)] for k in range(3)] == steps
    plan.close()


@pytest.mark.parametrize("name", ["token_id.bin", "label.bin", "token_offsets.bin", "target_offsets.bin"])
@pytest.mark.parametrize("lost_bytes", [1, 8])
def test_a_file_that_was_cut_is_noticed(tmp_path: Path, name: str, lost_bytes: int) -> None:
    a_tree(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    with pytest.raises(CorruptArtifact):
        Units(tmp_path)


def test_an_id_that_a_column_cannot_hold_is_a_bug_and_no_other_id(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        UnitsWriter(tmp_path).append(**{**columns(([1, 2], [1])), "token_id": np.array([-1, 2])})


def test_closing_lets_go_of_the_files(tmp_path: Path) -> None:
    a_tree(tmp_path)
    units = Units(tmp_path)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    units.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
