"""A pair becomes a unit that the loss accepts: the prompt once, both answers whole, signs in place; or it is lost."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.tokenizing.units import PAIR_COLUMNS, Tally, TokenBlock, keep_pairs, pair_unit
from megatron_worker.losses import check_columns
from shared.errors import InvalidInput
from shared.jobs.losses import DPO
from shared.jobs.packed import Units, UnitsWriter

Row = tuple[list[int], list[bool]]


def answered(prompt: list[int], answer: list[int]) -> Row:
    """A row of a pair, and which of its tokens are the answer's."""
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def block_of(*rows: Row) -> TokenBlock:
    """Rows as the tokenizer leaves them: two of each place."""
    id_T = np.array([i for ids, _ in rows for i in ids], dtype=np.int64)
    weight_T = np.array([w for _, mask in rows for w in mask], dtype=np.float32)
    places = [f"rows.jsonl:{1 + k // 2}" for k in range(len(rows))]
    return TokenBlock(places, id_T, id_T, weight_T, np.array([len(ids) for ids, _ in rows], dtype=np.int64))


def test_the_prompt_stands_once_and_each_answer_is_a_branch():
    unit = pair_unit(*answered([5, 6, 7], [10, 11]), *answered([5, 6, 7], [12]))
    assert sorted(unit.token_id_T.tolist()) == [5, 6, 7, 10, 11, 12]
    assert unit.label_N.tolist() == [10, 11, 12]
    assert unit.advantage_N.tolist() == [1.0, 1.0, -1.0]
    assert unit.sequence_N.tolist() == [0, 0, 1]
    assert unit.token_id_T[unit.hidden_index_N].tolist() == [7, 10, 7]


def test_a_beginning_that_both_answers_share_is_scored_for_both():
    unit = pair_unit(*answered([5], [10, 11]), *answered([5], [10, 12]))
    assert len(unit.token_id_T) == 4
    assert unit.label_N.tolist() == [10, 11, 10, 12]
    assert unit.advantage_N.tolist() == [1.0, 1.0, -1.0, -1.0]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4), tail=TOKENS)
def test_every_answer_is_read_back_from_its_unit(tmp_path_factory, pairs, tail: list[int]):
    """Walking up from a target gives the row it came from; what stands behind an answer is no target."""
    rows = [answered(prompt, answer) for prompt, *both in pairs for answer in both]
    rows = [([*ids, *tail], [*mask, *[False] * len(tail)]) for ids, mask in rows]
    found = keep_pairs(block_of(*rows), 1000)
    kept = [k for k, (_, chosen, rejected) in enumerate(pairs) if chosen != rejected]
    assert [k for k, pair in enumerate(found.pairs) if pair.is_kept] == kept
    folder = tmp_path_factory.mktemp("units")
    writer, tally = UnitsWriter(folder, PAIR_COLUMNS), Tally("preference", 1000)
    found.write(writer)
    found.count(tally)
    writer.close()
    assert tally.report().num_kept == len(kept) and tally.report().num_lost == len(pairs) - len(kept)
    with Units(folder) as units:
        check_columns(units, DPO())
        assert units.header.num_tokens == tally.report().num_tokens
        assert units.header.num_targets == tally.report().num_targets
        for unit, k in enumerate(kept):
            packed = units.read_bin(np.array([unit]))
            prompt, *answers = pairs[k]
            for sequence, (answer, sign) in enumerate(zip(answers, (1, -1), strict=True)):
                own = packed.sequence_N == sequence
                assert packed.label_N[own].tolist() == answer
                assert set(packed.advantage_N[own]) == {sign}
                at, way = int(packed.hidden_index_N[own][-1]), []
                while at >= 0:
                    way.append(int(packed.token_id_T[at]))
                    at = int(packed.parent_T[at])
                assert way[::-1] == [*prompt, *answer[:-1]]


def test_pairs_that_are_too_long_or_say_nothing_are_lost_and_told():
    block = block_of(
        *(answered([1, 2], [3]), answered([1, 2], [4])),
        *(answered([1, 2], [3, 4]), answered([1, 2], [5, 6])),
        *(answered([1, 2], [3]), answered([1, 2], [3])),
        *(answered([1, 2], [3]), answered([1, 2, 5], [])),
    )
    kept, tally = keep_pairs(block, 5), Tally("preference", 5)
    kept.count(tally)
    report = tally.report()
    assert [pair.is_kept for pair in kept.pairs] == [True, False, False, False]
    assert (report.num_rows, report.num_kept, report.num_too_long, report.num_fully_masked) == (4, 1, 1, 2)
    assert [(lost.place, lost.reason) for lost in report.lost] == [
        ("rows.jsonl:2", "6 tokens are more than max_tokens 5"),
        ("rows.jsonl:3", "both answers become the same tokens: nothing to prefer"),
        ("rows.jsonl:4", "the rejected answer has no token to train on"),
    ]


def test_the_loss_accepts_what_is_written(tmp_path: Path):
    writer = UnitsWriter(tmp_path, PAIR_COLUMNS)
    block = block_of(
        *(answered([5, 6], [10, 11]), answered([5, 6], [12])), *(answered([5], [3]), answered([5], [4, 3, 2]))
    )
    keep_pairs(block, 10).write(writer)
    writer.close()
    with Units(tmp_path) as units:
        check_columns(units, DPO())
        packed = units.read_bin(np.array([1, 0]))
        assert packed.sequence_N.tolist() == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "rule"),
    [
        ([], [1], [2], "its first token is a target"),
        ([1], [], [2], "chosen answer has no token"),
        ([1], [2], [], "rejected answer has no token"),
        ([1], [2, 3], [2, 3], "nothing to prefer"),
    ],
)
def test_what_is_no_pair_is_refused(prompt, chosen, rejected, rule: str):
    with pytest.raises(InvalidInput, match=rule):
        pair_unit(*answered(prompt, chosen), *answered(prompt, rejected))
