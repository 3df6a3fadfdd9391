"""What is written is what is read, indices shifted; and damaged files are noticed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import CorruptArtifact
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, PackedBin, Plan, PlanWriter, Units, UnitsWriter

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
