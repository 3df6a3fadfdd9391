"""Pairs, scored rows and answers of weighed parts as units that their losses accept, or refused by name."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

from activities.formats.dataset import open_dataset
from activities.tokenizing.tokenize import keep_scored
from activities.tokenizing.tokenizer import ModelTokenizer
from activities.tokenizing.units import PAIR_COLUMNS, Tally, TokenBlock, keep_pairs, pair_unit
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.losses import DPO
from longshore.runs import RewardRun
from longshore.training import Full, Lora, ScalarHead
from megatron_worker.losses import check_columns
from shared.errors import InvalidInput
from shared.jobs.packed import Units, UnitsWriter
from tests.activities.templates import TEMPLATES, open_model, write_model
from tests.activities.tokenizing.test_tokenize import ids_up_to, tokenize

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
                assert ids_up_to(packed, packed.hidden_index_N[own][-1]) == [*prompt, *answer[:-1]]


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


SOURCE = DatasetSource(uri="file:///rows")
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
SCORED = {"prompt": "q", "completion": "a", "score": 1.5}


def block(*rows: list[int], places: list[str]) -> TokenBlock:
    ids = np.array([token for row in rows for token in row], dtype=np.int64)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return TokenBlock(places, ids, ids, np.ones(len(ids), dtype=np.float32), lengths)


def test_a_pair_is_scored_at_the_last_token_of_each_answer() -> None:
    """The second pair's chosen answer is how its rejected one begins; of the third both are the same."""
    rows = [[1, 2, 3], [1, 2, 4, 5], [1, 6], [1, 6, 7], [8, 9], [8, 9]]
    given = block(*rows, places=[place for place in "abc" for _ in range(2)])
    kept = keep_scored(given, {"a": (0.5,), "b": (0.0,), "c": (0.0,)}, 4, are_pairs=True)
    assert [pair.fits for pair in kept.pairs] == [False, True, True]  # the first has five tokens
    assert kept.pairs[2].unit is None and "nothing to prefer" in kept.pairs[2].reason
    for pair, number in ((kept.pairs[0], 0), (kept.pairs[1], 2)):
        unit = pair.unit
        assert unit is not None and unit.sequence_N.tolist() == [0, 1] and unit.weight_N.tolist() == [1, 1]
        for hidden, row in zip(unit.hidden_index_N.tolist(), rows[number : number + 2], strict=True):
            assert ids_up_to(unit, hidden) == row
    assert kept.pairs[0].unit.advantage_N.tolist() == [0.5, 0.0]


def test_an_answer_has_a_target_for_each_of_its_scores() -> None:
    kept = keep_scored(block([3, 4, 5], places=["a"]), {"a": (0.5, -2.0)}, 3, are_pairs=False)
    (unit,) = kept.units
    assert unit.hidden_index_N.tolist() == [2, 2] and unit.label_N.tolist() == [0, 1]
    assert unit.advantage_N.tolist() == [0.5, -2.0] and unit.sequence_N.tolist() == [0, 0]


def test_turns_are_scored_at_the_tokens_that_end_them() -> None:
    given = block([1, 2, 3, 4, 5, 6, 7], [1, 2, 3], places=["a", "b"])
    given.weight_T[:] = [0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    kept = keep_scored(given, {"a": (1.0, 0.0), "b": (1.0, 0.0)}, 9, are_pairs=False, per_turn=True)
    (unit,) = kept.units
    assert unit.hidden_index_N.tolist() == [3, 5] and unit.label_N.tolist() == [0, 0]
    assert unit.advantage_N.tolist() == [1.0, 0.0] and kept.pairs[1].reason == "2 labels for 1 answers"


TURNS = [{"role": role, "content": "t"} for role in ("user", "assistant", "user", "assistant")]


@pytest.mark.parametrize("as_parquet", [False, True])
def test_labels_of_turns_are_read(tmp_path, as_parquet) -> None:
    rows = [{"prompt": TURNS[:1], "completion": TURNS[1:], "labels": labels} for labels in ([1, 0], [0, 1])]
    assert [*read(tmp_path / "rows", rows, False, ("labels",), as_parquet).values()] == [(1, 0), (0, 1)]
    told = [{"prompt": TURNS[:3], "completion": TURNS[3:], "labels": [True]}]  # the prompt's answer has none
    assert [*read(tmp_path / "told", told, False, ("labels",), as_parquet).values()] == [(1,)]
    assert [*read(tmp_path / "score", [{"messages": TURNS, "score": 2.0}], False, ("score",)).values()] == [(2,)]
    with pytest.raises(InvalidInput, match="for each of the 2 turns"):
        read(tmp_path / "few", [{"messages": TURNS, "labels": [1]}], False, ("labels",))
    with pytest.raises(InvalidInput, match=r"labels\[1\] must be a number, not text"):
        read(tmp_path / "text", [{"messages": TURNS, "labels": [1, "2"]}], False, ("labels",))


def read(folder: Path, rows: list[dict], pairs: bool, fields: tuple[str, ...], as_parquet: bool = False) -> dict:
    folder.mkdir(exist_ok=True)
    if as_parquet:
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = open_dataset(folder, SOURCE, pairs, fields=fields)
    assert len(list(opened)) == len(rows) and not opened.unread.columns
    return opened.numbers


@pytest.mark.parametrize("as_parquet", [False, True])
def test_margins_and_scores_are_read(tmp_path, as_parquet) -> None:
    numbers = read(tmp_path / "pairs", [PAIR | {"margin": 2}, PAIR | {"margin": None}], True, ("margin",), as_parquet)
    assert [*numbers.values()] == [(2.0,), (0.0,)]
    rows = [SCORED | {"short": 3}, SCORED | {"short": 0}]
    assert [*read(tmp_path / "scores", rows, False, ("score", "short"), as_parquet).values()] == [(1.5, 3.0), (1.5, 0)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (SCORED | {"score": float("nan")}, "score must be a finite number, not nan"),
        (SCORED | {"score": 1e38}, "score must be a finite number"),
        (SCORED | {"score": None}, "score must be a number, not nothing"),
        (SCORED | {"weight": 0.5}, "weight must be 1 or absent"),
        (
            {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}], "score": 1.0},
            "the last message is the user's",
        ),
        ({"text": "t", "score": 1.0}, "this row has no answer"),
        (
            {"messages": [{"role": "assistant", "content": [{"text": "a", "weight": 2}]}], "score": 1.0},
            "weight must be 1 or absent",
        ),
        (PAIR | {"score": 1.0}, "pairs are what dpo learns from, and a reward model"),
    ],
)
def test_rows_without_a_score_are_refused_by_name(tmp_path, row, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        read(tmp_path / "rows", [row], False, ("score",), as_parquet=True)


def reward(**fields) -> RewardRun:
    return RewardRun.model_validate({"model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1, **fields})


def test_the_head_is_of_the_objective() -> None:
    assert reward().trainable == Lora(head=ScalarHead(names=("reward",), per="sequence"))
    named = reward(objective="squared_error", score_fields=["true", "short"], trainable={"kind": "full"})
    assert named.trainable == Full(head=ScalarHead(names=("true", "short"), per="sequence"))
    assert RewardRun.model_validate_json(named.model_dump_json()) == named
    assert reward(trainable=Lora(rank=2)).trainable.head == reward().head
    turns = reward(objective="squared_error", per_turn=True)
    assert turns.trainable == Lora(head=ScalarHead(names=("reward",))) and turns.number_fields == ("labels",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"trainable": {"kind": "lora", "head": {"names": ["value"]}}}, r"trainable\.head: objective and score_fields"),
        ({"score_fields": ["score"]}, "score_fields are of squared_error without per_turn"),
        ({"objective": "squared_error", "per_turn": True, "score_fields": ["a"]}, "score_fields are of squared_error"),
        ({"per_turn": True}, "per_turn is of squared_error"),
        ({"objective": "squared_error", "center": 0.1}, "center would be ignored by squared_error"),
        ({"num_samples": 1, "eval_dataset": {"uri": "v"}}, "num_samples: a head of scalars writes no text"),
        ({"dataset": {"uri": "u", "format": "chat"}}, "as reward does"),
        ({"dataset": {"uri": "u", "format": "text"}, "objective": "squared_error"}, "no answers"),
        ({"trainable": {"kind": "lora", "targets": ["lm_head"]}}, "replaces lm_head"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields, words) -> None:
    with pytest.raises(ValidationError, match=words):
        reward(**fields)


ENDS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "qwen": "<|im_end|>", "mistral": "</s>", "blocks": "<|im_end|>"}


def chat(*parts: tuple[str, float | None], weight: float | None = None) -> dict[str, Any]:
    content = [{"type": "text", "text": text} | ({} if w is None else {"weight": w}) for text, w in parts]
    answer = {"role": "assistant", "content": content} | ({} if weight is None else {"weight": weight})
    said = {"role": "assistant", "content": "before"}
    return {"messages": [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}, answer]}


def weighed(folder: Path, tokenizer: ModelTokenizer) -> list[tuple[str, float]]:
    """Return the texts of neighbouring targets of one weight, of the only unit."""
    with Units(folder) as units:
        row = units.read_bin(np.array([0]))
    targets = zip(row.hidden_index_N.tolist(), row.label_N.tolist(), row.weight_N.tolist(), strict=True)
    runs = groupby(enumerate(targets), key=lambda each: (each[1][0] - each[0], each[1][2]))
    return [(tokenizer.decode([label for _, (_, label, _) in run]), weight) for (_, weight), run in runs]


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_part_s_tokens_have_its_weight(tmp_path: Path, template: str) -> None:
    """The token that ends the turn weighs as the message; other answers are trained as ever."""
    tokenizer = open_model(write_model(tmp_path / "model", template))
    tokenize(tmp_path, tokenizer, chat(("12 sacks.", 0.5), (" 7 barrels.", 0), (" None", None), weight=2))
    before, *around, first, last = weighed(tmp_path / "units", tokenizer)
    assert "before" in before[0] and before[1] == 1
    assert (first[0].lstrip(), first[1], last) == ("12 sacks.", 1.0, (f" None{ENDS[template]}", 2.0))
    assert {weight for _, weight in around} == (
        {2.0} if template == "qwen" else set()
    )  # no thoughts, which it writes in front


def test_a_token_in_two_parts_has_the_greater_weight(tmp_path: Path) -> None:
    tokenizer = open_model(write_model(tmp_path / "model", "chatml"))
    assert len(tokenizer.tokens_of(" crane")) == 1
    for name, weights in {"falls": (3.0, 0.5), "rises": (0.5, 3.0), "ends": (3.0, 0.0)}.items():
        (folder := tmp_path / name).mkdir()
        tokenize(folder, tokenizer, chat(("The cr", weights[0]), ("ane lifts", weights[1])))
        told = dict(each for each in weighed(folder / "units", tokenizer)[1:])
        assert any(" crane" in text and weight == 3 for text, weight in told.items()), (name, told)


def test_what_does_not_line_up_is_refused(tmp_path: Path) -> None:
    """An answer that the template changes, or that is empty; and fields that are not there."""
    tokenizer = open_model(write_model(tmp_path / "model", "chatml"))
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1.*does not write the answer as it stands here"):
        tokenize(tmp_path, tokenizer, chat((" ", 0.5)))
    run = {"model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1, "neftune_noise_alpha": 5}
    with pytest.raises(ValidationError, match="neftune_noise_alpha"):
        SFTRun.model_validate(run)
