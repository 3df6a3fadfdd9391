"""Preference rows as OpenAI and TRL write them, as pairs; each mistake is refused with its place, field and rule."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from activities.formats.dataset import open_dataset
from activities.formats.rows import Chat, Example, PreferencePair, PromptCompletion, Row
from activities.formats.specs import preference
from longshore.dataset_runs import DatasetSource, Format
from shared.errors import InvalidInput

ASK = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
OPENAI = {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}


def read(folder: Path, *rows: Any, format: Format = "auto", pairs: bool | None = None) -> list[Example]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_dataset(folder, DatasetSource(uri="file:///data", format=format), pairs))


def refusal(folder: Path, *rows: Any, **how: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        read(folder, *rows, **how)
    return str(refused.value)


def chats(pair: Example) -> tuple[Chat, Chat]:
    assert isinstance(pair, PreferencePair) and isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
    return pair.chosen, pair.rejected


def test_openais_rows(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"messages": [{"role": "system", "content": "s"}, ASK], "tools": tools, "parallel_tool_calls": True}
    [pair] = read(tmp_path, OPENAI | {"input": given})
    chosen, rejected = chats(pair)
    assert pair.place == chosen.place == "rows.jsonl:1"
    assert chosen.messages == [{"role": "system", "content": "s"}, ASK, GOOD] and chosen.weights == [0, 0, 1]
    assert rejected.messages == [{"role": "system", "content": "s"}, ASK, BAD] and rejected.weights == [0, 0, 1]
    assert chosen.tools == rejected.tools == tools


def test_trls_rows_with_a_prompt(tmp_path: Path) -> None:
    [texts] = read(tmp_path, {"prompt": "q", "chosen": "good", "rejected": "bad"})
    place = "rows.jsonl:1"
    assert texts == PreferencePair(place, PromptCompletion(place, "q", "good"), PromptCompletion(place, "q", "bad"))
    for prompt in ([ASK], "q"):
        [pair] = read(tmp_path, {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "t"}]})
        chosen, rejected = chats(pair)
        assert (chosen.messages, rejected.messages) == ([ASK, GOOD], [ASK, BAD])
        assert chosen.weights == [0, 1] and chosen.tools == [{"type": "function", "function": {"name": "t"}}]


def test_trls_rows_whose_prompt_is_what_both_begin_with(tmp_path: Path) -> None:
    """Also where a text says the prompt again, and where assistants spoke in it."""
    before = [ASK, GOOD, {"role": "user", "content": "more"}]
    row = {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    for more in ({}, {"prompt": "q"}, {"prompt": None}):
        [pair] = read(tmp_path, row | more)
        chosen, rejected = chats(pair)
        assert chosen.messages == [*before, GOOD] and rejected.messages == [*before, BAD]
        assert chosen.weights == rejected.weights == [0, 0, 0, 1]


def test_an_answer_may_call_tools_on_its_way(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    told = {"role": "tool", "content": "7"}
    [pair] = read(tmp_path, {"prompt": [ASK], "chosen": [call, told, GOOD], "rejected": [BAD]})
    chosen, _ = chats(pair)
    assert chosen.messages == [ASK, call, told, GOOD] and chosen.weights == [0, 1, 0, 1]


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    rows = [
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score": 2.0},
        {"chosen": [ASK | {"name": "x"}, GOOD], "rejected": [ASK | {"name": "x"}, BAD], "score": 1.0},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = open_dataset(tmp_path, DatasetSource(uri="u"))
    assert chats(first)[0].messages == [ASK, GOOD], "nulls that the schema adds are no fields"
    assert chats(second)[1].messages == [ASK | {"name": "x"}, BAD] and second.place == "rows.parquet: row 2"
    (tmp_path / "rows.parquet").unlink()
    parquet.write_table(pyarrow.Table.from_pylist([OPENAI]), tmp_path / "openai.parquet")
    [pair] = open_dataset(tmp_path, DatasetSource(uri="u"))
    assert chats(pair)[1].messages == [ASK, BAD]


TEXTS = st.sampled_from(["a", "b", "c"])
TURNS = st.lists(st.builds(lambda c: {"role": "user", "content": c}, TEXTS), min_size=1, max_size=3)
ANSWERS = st.builds(lambda c: {"role": "assistant", "content": c}, TEXTS)


@settings(max_examples=100, deadline=None)
@given(prompt=TURNS, chosen=ANSWERS, rejected=ANSWERS)
def test_the_prompt_apart_or_shared_is_the_same_pair(prompt, chosen, rejected) -> None:
    apart = Row("r:1", {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    shared = Row("r:1", {"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]})
    if chosen == rejected:
        for row in (apart, shared):
            with pytest.raises(InvalidInput, match="r:1: rejected is the same as chosen: nothing to prefer"):
                preference(row)
    else:
        assert preference(apart) == preference(shared)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "rejected is the same as chosen: nothing to prefer"),
        ({"chosen": "q a", "rejected": "q b"}, "chosen is text, and there is no prompt: add it, or give messages"),
        ({"prompt": "q", "chosen": "a", "rejected": 7}, "rejected must be text, not a number"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": "b"}, "rejected must be a list, not text"),
        ({"prompt": 7, "chosen": [GOOD], "rejected": [BAD]}, "prompt must be text or a list, not a number"),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "prompt is empty"),
        ({"prompt": [ASK], "chosen": [], "rejected": [BAD]}, "chosen is empty"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [BAD]}, "chosen has a turn of the user: answers are"),
        ({"prompt": [ASK, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "prompt ends with an assistant's turn"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "chosen and rejected differ from their first message on: they share"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "rejected does not end with an assistant's turn"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "rejected is the same as chosen"),
        (
            {"chosen": [ASK, ASK, GOOD], "rejected": [ASK, {"role": "user", "content": "else"}, BAD]},
            "chosen[1] is the user's, behind what both conversations begin with: the prompts of a pair must",
        ),
        (
            {"prompt": "other", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "prompt is not one of the messages with which chosen and rejected begin",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0.5}, "weight must be 1 or absent"),
        (
            {"prompt": [ASK], "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]},
            "chosen[0].weight must be 1 or absent: dpo weighs all answers alike",
        ),
        (OPENAI | {"non_preferred_output": [GOOD]}, "non_preferred_output is the same as preferred_output"),
        (OPENAI | {"input": [ASK]}, "input must be an object, not a list"),
        (OPENAI | {"input": {}}, "input.messages must be a list, not nothing"),
        (OPENAI | {"input": {"messages": [{"role": "bot"}]}}, "input.messages[0].role must be one of system,"),
        (OPENAI | {"preferred_output": [{"role": "tool", "content": "t"}]}, "preferred_output does not end with an"),
        (OPENAI | {"input": {"messages": [ASK], "tools": "t"}}, "input.tools must be a list of objects, not text"),
        ({"prompt": "q", "completion": "a"}, "this row looks like prompt_completion"),
    ],
)
def test_a_bad_row_is_named_with_field_and_rule(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = OPENAI if "preferred_output" in row else {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert f"rows.jsonl:2: {message}" in refusal(tmp_path, good, row)


def test_what_is_recognised_depends_on_whether_pairs_are_wanted(tmp_path: Path) -> None:
    """Rows that hold both, as published preference sets do, are a tie only where nobody says what is wanted."""
    both = {"messages": [ASK, GOOD], "prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert "rows.jsonl:1: the row matches chat and preference: say which with format" in refusal(tmp_path, both)
    assert isinstance(read(tmp_path, both, pairs=True)[0], PreferencePair)
    assert isinstance(read(tmp_path, both, pairs=False)[0], Chat)
    assert isinstance(read(tmp_path, both, format="preference")[0], PreferencePair)
    assert "the row looks like openai_preference; pairs are what dpo learns from" in refusal(
        tmp_path, OPENAI, pairs=False
    )
    said = refusal(tmp_path, {"messages": [ASK, GOOD]}, pairs=True)
    assert "rows.jsonl:1: the row looks like chat; dpo learns from pairs, as reward does: chosen + rejected" in said
    assert "known are chosen + rejected" in refusal(tmp_path, {"colour": "red"}, pairs=True)
    assert "chosen + rejected" not in refusal(tmp_path, {"colour": "red"}, pairs=False)
