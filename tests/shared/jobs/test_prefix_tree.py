"""Prefix trees against a dictionary of prefixes: the plainest trie there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, build_tree, split_tree


def row(ids, targets=None, seed=0):
    """A sequence whose scores tell its places apart; all but the first token are targets unless said."""
    generator = np.random.default_rng([seed, len(ids)])
    mask = np.array([i > 0 for i in range(len(ids))] if targets is None else [i in targets for i in range(len(ids))])
    return SequenceRow(np.array(ids), mask, *generator.standard_normal((4, len(ids))).astype(np.float32))


@st.composite
def groups(draw):
    """Sequences over three ids, so that they share by chance; some are prefixes of others, or the same."""
    sequences = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9))
    for _ in range(draw(st.integers(0, 3))):
        parent = draw(st.sampled_from(sequences))
        sequences.append(parent + draw(st.lists(st.integers(0, 2), max_size=4)))
    rows = []
    for number, ids in enumerate(sequences):
        targets = draw(st.sets(st.integers(1, max(1, len(ids) - 1)))) if len(ids) > 1 else set()
        rows.append(row(ids, targets, seed=number))
    return rows


def prefixes(rows):
    return {tuple(r.token_ids[: i + 1]) for r in rows for i in range(len(r.token_ids))}


def way(unit, index):
    """The ids from the root to a token."""
    ids = []
    while index >= 0:
        ids.append(int(unit.token_id_T[index]))
        index = int(unit.parent_T[index])
    return tuple(reversed(ids))


def check_unit(unit, rows):
    """Everything that a unit promises of the sequences in it."""
    ways = [way(unit, i) for i in range(unit.num_tokens)]
    assert set(ways) == prefixes(rows) and len(set(ways)) == len(ways)  # each shared part stands once
    assert [len(w) - 1 for w in ways] == unit.position_T.tolist()
    for i in range(unit.num_tokens):  # depth first: a subtree stands in one piece behind its root
        inside = [j for j, w in enumerate(ways) if w[: len(ways[i])] == ways[i]]
        assert inside == list(range(i, i + len(inside)))
    expected = []
    for number, r in enumerate(rows):
        for i in np.flatnonzero(r.target_mask):
            scores = [float(c[i]) for c in (r.weight, r.advantage, r.old_logprob, r.ref_logprob)]
            expected.append((number, tuple(r.token_ids[:i]), int(r.token_ids[i]), *scores))
    found = [
        (int(s), ways[h], int(label), float(w), float(a), float(o), float(ref))
        for s, h, label, w, a, o, ref in zip(
            unit.sequence_N,
            unit.hidden_index_N,
            unit.label_N,
            unit.weight_N,
            unit.advantage_N,
            unit.old_logprob_N,
            unit.ref_logprob_N,
            strict=True,
        )
    ]
    assert found == expected


@given(groups())
def test_a_tree_holds_each_prefix_once_and_every_target(rows):
    unit = build_tree(rows)
    check_unit(unit, rows)
    assert unit.members == tuple(range(len(rows)))


@given(groups(), st.integers(0, 12))
def test_units_hold_whole_sequences_within_the_budget(rows, spare):
    bin_tokens = max(len(r.token_ids) for r in rows) + spare
    units = split_tree(rows, bin_tokens)
    assert sorted(m for unit in units for m in unit.members) == list(range(len(rows)))
    for unit in units:
        assert unit.num_tokens <= bin_tokens
        check_unit(unit, [rows[m] for m in unit.members])


@given(groups())
def test_what_fits_is_not_split(rows):
    roots = {int(r.token_ids[0]) for r in rows}
    units = split_tree(rows, len(prefixes(rows)))
    assert len(units) == len(roots)
    assert sum(unit.num_tokens for unit in units) == len(prefixes(rows))


def test_a_shared_sampled_token_is_two_targets():
    unit = build_tree([row([7, 8, 9, 1], {2, 3}), row([7, 8, 9, 2], {2, 3})])
    assert unit.num_tokens == 5
    shared = unit.label_N == 9
    assert unit.hidden_index_N[shared].tolist() == [1, 1]
    assert unit.sequence_N[shared].tolist() == [0, 1]
    # Each branch's first token is scored from the node above.
    assert unit.hidden_index_N[~shared].tolist() == [2, 2]


def test_groups_that_share_a_template_part_at_their_questions_when_split():
    """A bin too small for both groups: each group's prefix stands once, the template before them twice."""
    groups = [[row([1, 2, *[10 + g] * 20, 30 + c, 30 + c]) for c in range(4)] for g in range(3)]
    interleaved = [r for rows in zip(*groups, strict=True) for r in rows]
    units = split_tree(interleaved, 60)
    assert [unit.num_tokens for unit in units] == [2 + 2 * 28, 2 + 28]
    assert [{int(interleaved[m].token_ids[2]) for m in unit.members} for unit in units] == [{10, 11}, {12}]


def test_branches_of_one_length_stand_beside_each_other():
    lengths = [3, 5, 3, 4, 5, 3]
    unit = build_tree([row([9, 9] + [i] * n) for i, n in enumerate(lengths)])
    starts = np.flatnonzero(unit.parent_T[2:] == 1) + 2
    assert np.diff([*starts, unit.num_tokens]).tolist() == sorted(lengths)


def test_units_are_read_back_as_bins_of_forests(tmp_path):
    sequences = [row([5, 6, 7]), row([5, 6, 8, 8]), row([1, 2, 3])]
    units = [build_tree(sequences[:2]), build_tree(sequences[2:])]
    writer = UnitsWriter(tmp_path, (*TOKEN_COLUMNS, *TARGET_COLUMNS))
    for unit in units:
        writer.append(**unit.columns())
    writer.close()
    with Units(tmp_path) as stored:
        packed = stored.read_bin(np.array([1, 0]))
    assert packed.token_id_T.tolist() == [1, 2, 3, 5, 6, 7, 8, 8]
    assert packed.parent_T.tolist() == [-1, 0, 1, -1, 3, 4, 4, 6]
    assert packed.position_T.tolist() == [0, 1, 2, 0, 1, 2, 2, 3]
    assert packed.hidden_index_N.tolist() == [0, 1, 3, 4, 3, 4, 6]
    assert packed.label_N.tolist() == [2, 3, 6, 7, 6, 8, 8]
    assert packed.sequence_N.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert packed.old_logprob_N.tolist() == np.concatenate([u.old_logprob_N for u in reversed(units)]).tolist()


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([], "at least one"),
        ([row([1, 2]), row([])], "sequence 1: it has no tokens"),
        ([row([1, 2], {0})], "sequence 0: its first token is a target"),
        ([SequenceRow(np.array([1, 2]), np.zeros(2, bool), *np.zeros((3, 2)), np.zeros(3))], "ref_logprob has 3"),
    ],
)
def test_what_cannot_be_a_tree_is_refused(rows, rule):
    for build in (build_tree, lambda rows: split_tree(rows, 10)):
        with pytest.raises(InvalidInput, match=rule):
            build(rows)


def test_a_sequence_longer_than_a_bin_is_refused():
    with pytest.raises(InvalidInput, match=r"sequence 1: it has 6 tokens, and a bin holds 5"):
        split_tree([row([1] * 5), row([1] * 6)], 5)


def test_a_thousand_nested_prefixes_are_no_deep_recursion():
    """The deepest tree there is: every sequence is the one before and one token more."""
    ids = list(range(2000))
    unit = build_tree([row(ids[: n + 1], {n}) for n in range(1, 1200)])
    assert unit.num_tokens == 1200 and unit.parent_T.tolist() == list(range(-1, 1199))
    assert unit.hidden_index_N.tolist() == list(range(1199))


def test_ids_of_any_size():
    sequences = [row(list(ids)) for ids in itertools.permutations([1, 256, 65_536, 151_935])]
    check_unit(build_tree(sequences), sequences)
