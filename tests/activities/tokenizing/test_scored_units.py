"""Rows for reward models as units: what is scored, at which token, and what is refused by name."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from activities.formats.dataset import open_dataset
from activities.tokenizing.tokenize import keep_scored
from activities.tokenizing.units import TokenBlock
from longshore.training import Full, Lora, ScalarHead
from shared.errors import InvalidInput
from shared.runs.dataset_runs import DatasetSource
from shared.runs.requests import RewardRun

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
            path = [hidden]
            while unit.parent_T[path[-1]] >= 0:
                path.append(int(unit.parent_T[path[-1]]))
            assert [int(unit.token_id_T[at]) for at in reversed(path)] == row
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
