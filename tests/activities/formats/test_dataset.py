"""Each format becomes the examples or pairs it means; each mistake is refused with its place, field and rule."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from activities.formats import rows
from activities.formats.dataset import open_dataset
from activities.formats.rows import Chat, Example, PreferencePair, PromptCompletion, Row, Text, TokenIds, WeighedText
from activities.formats.specs import FORMATS, preference
from longshore.dataset_runs import DatasetSource, Format
from shared.errors import InvalidInput

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(folder: Path, format: Format = "auto", **fields: str) -> list[Example]:
    return list(open_dataset(folder, DatasetSource(uri="file:///data", format=format, **fields)))


def lines(folder: Path, *values: Any, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(f"{v if isinstance(v, str) else json.dumps(v)}\n" for v in values))
    return folder


def refusal(folder: Path, format: Format = "auto", **fields: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        read(folder, format, **fields)
    return str(refused.value)


def test_every_format_that_a_run_may_name_has_its_spec() -> None:
    assert {spec.name for spec in FORMATS} == set(get_args(Format)) - {"auto"}


def test_chat_with_tools_parts_and_weights(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}]
    messages = [USER, ASSISTANT | {"weight": 0.5}, USER | {"weight": 1}, {"role": "assistant", "content": parts}]
    [chat] = read(lines(tmp_path, {"messages": messages, "tools": [{"name": "t"}], "id": 7}))
    assert isinstance(chat, Chat) and chat.place == "rows.jsonl:1"
    assert chat.weights == [0, 0.5, 0, 1] and chat.tools == [{"type": "function", "function": {"name": "t"}}]
    assert chat.messages[1] == chat.messages[3] == ASSISTANT


def test_of_a_conversation_the_last_answer_alone_can_be_trained(tmp_path: Path) -> None:
    lines(tmp_path, {"messages": [USER, ASSISTANT, USER, ASSISTANT | {"weight": 0.5}]})
    [chat] = read(tmp_path, assistant_turns="last")
    assert isinstance(chat, Chat) and chat.weights == [0, 0, 0, 0.5]
    lines(tmp_path, {"messages": [USER, ASSISTANT, USER]})
    assert "rows.jsonl:1" in (told := refusal(tmp_path, assistant_turns="last")) and "the user's" in told
    lines(tmp_path, {"prompt": "p", "completion": "c"})
    assert read(tmp_path, assistant_turns="last") == read(tmp_path)
    lines(tmp_path, {"text": "t"})
    assert "assistant_turns is of conversations" in refusal(tmp_path, assistant_turns="last")


def test_answers_that_a_pattern_is_found_in_are_trained_alone(tmp_path: Path) -> None:
    said = [USER, {"role": "assistant", "content": "<final> 7"}, USER, {"role": "assistant", "content": "hm"}]
    lines(tmp_path, {"messages": said}, {"messages": [*said[2:], USER, said[1] | {"weight": 0.5}]})
    found = read(tmp_path, assistant_pattern=r"^<final>\s\d$")
    assert [chat.weights for chat in found if isinstance(chat, Chat)] == [[0, 1, 0, 0], [0, 0, 0, 0.5]]
    assert found == read(tmp_path, assistant_pattern="final")
    found = read(tmp_path, assistant_pattern="<final>", assistant_turns="last")
    assert [chat.weights for chat in found if isinstance(chat, Chat)] == [[0, 0, 0, 0], [0, 0, 0, 0.5]]
    lines(tmp_path, {"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "d"})
    assert [row.weight for row in read(tmp_path, assistant_pattern="c") if isinstance(row, PromptCompletion)] == [1, 0]
    assert "assistant_pattern: it is no regular expression: missing )" in refusal(tmp_path, assistant_pattern="(")
    lines(tmp_path, {"text": "t"})
    assert "assistant_pattern needs conversations" in refusal(tmp_path, assistant_pattern="t")


def test_parts_have_weights_in_answers_of_chats_alone(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a", "weight": 1}, {"type": "text", "text": "b", "weight": 0.0}]
    lines(tmp_path, {"messages": [USER, {"role": "assistant", "content": parts}]})
    [chat] = read(tmp_path)
    assert isinstance(chat, Chat) and isinstance(content := chat.messages[1]["content"], WeighedText)
    assert content == "ab" and content.parts == ((1, 1.0), (1, 0.0))
    asked = refusal(lines(tmp_path, {"messages": [{"role": "user", "content": parts}, ASSISTANT]}))
    assert "rows.jsonl:1" in asked and "messages[0].content[1].weight: parts have weights in an assistant's" in asked
    chosen = {"chosen": [USER, {"role": "assistant", "content": parts}], "rejected": [USER, ASSISTANT]}
    assert "chosen[1].content[1].weight: parts have weights in an" in refusal(lines(tmp_path, chosen))
    bad = [parts[0], parts[1] | {"weight": -1}]
    lines(tmp_path, {"messages": [USER, {"role": "assistant", "content": bad}]})
    assert "messages[1].content[1].weight must be a number of at least 0, not -1" in refusal(tmp_path)


def test_prompt_and_completion_by_default_and_by_any_name(tmp_path: Path) -> None:
    lines(tmp_path, {"prompt": "p", "completion": "c", "question": "q", "answer": "a"})
    assert read(tmp_path) == [PromptCompletion("rows.jsonl:1", "p", "c")]
    assert read(tmp_path, prompt_field="question", completion_field="answer") == [
        PromptCompletion("rows.jsonl:1", "q", "a")
    ]


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    lines(tmp_path, {"instruction": "i", "input": "x", "output": "o"}, {"instruction": "i", "input": "", "output": "o"})
    assert read(tmp_path) == [
        PromptCompletion("rows.jsonl:1", "i\n\nx", "o"),
        PromptCompletion("rows.jsonl:2", "i", "o"),
    ]


def test_text_from_jsonl_and_from_lines_of_txt(tmp_path: Path) -> None:
    lines(tmp_path, {"text": "one"}, name="a.jsonl")
    (tmp_path / "b.txt").write_bytes(b"two  \r\n\r\nthree\n")
    assert read(tmp_path) == [Text("a.jsonl:1", "one"), Text("b.txt:1", "two  "), Text("b.txt:3", "three")]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xa9"}\r\n\r\n  \n{"text": "b"}')
    assert read(tmp_path) == [Text("rows.jsonl:1", "é"), Text("rows.jsonl:4", "b")]


def test_pretokenized_rows_from_jsonl_and_parquet_are_the_same(tmp_path: Path) -> None:
    table = {"input_ids": [[5, 6, 7], [8]], "labels": [[-100, 6, 7], [8]]}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lines(tmp_path / "a", *[{k: v[i] for k, v in table.items()} for i in range(2)])
    parquet.write_table(pyarrow.table(table), tmp_path / "b" / "rows.parquet")
    for examples in (read(tmp_path / "a"), read(tmp_path / "b")):
        for example, ids, labels in zip(examples, table["input_ids"], table["labels"], strict=True):
            assert isinstance(example, TokenIds)
            np.testing.assert_array_equal(example.input_ids, ids)
            np.testing.assert_array_equal(example.labels, labels)


def test_parquet_holds_the_same_shapes_as_columns(tmp_path: Path) -> None:
    messages = [[USER, ASSISTANT], [USER, ASSISTANT | {"name": "pilot"}]]
    table = pyarrow.table({"messages": messages, "other": [1, 2]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    first, second = read(tmp_path)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert first.messages == [USER, ASSISTANT], "nulls that the schema adds are no fields"
    assert second.messages[1]["name"] == "pilot" and second.place == "rows.parquet: row 2"


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    assert "no files" in refusal(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n\n")
    assert "file:///data: the dataset is empty" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ("{not json}", "rows.jsonl:2: invalid JSON: Expecting property name"),
        ('{"messages": NaN}', "rows.jsonl:2: invalid JSON: NaN"),
        ("[1, 2]", "rows.jsonl:2: a line holds one JSON object, not an array"),
        ("7", "rows.jsonl:2: a line holds one JSON object"),
        ('{"messages": ' + "[" * 300 + "]" * 300 + "}", "rows.jsonl:2: the JSON is nested deeper than 100"),
        ('{"messages": ' + "[" * 99999 + "]" * 99999 + "}", "rows.jsonl:2: the JSON is nested deeper than 100"),
        ('{"messages": 7}', "rows.jsonl:2: messages must be a list, not a number"),
        ('{"messages": []}', "rows.jsonl:2: messages is empty"),
        ('{"messages": ["q"]}', "rows.jsonl:2: messages[0] must be an object, not text"),
        ('{"other": 1}', "rows.jsonl:2: the row matches no format: it has the fields 'other'"),
        ('{"messages": [{"role": "bot", "content": "q"}]}', "rows.jsonl:2: messages[0].role must be one of system,"),
        ('{"messages": [{"role": "user"}]}', "rows.jsonl:2: messages[0].content is missing"),
        ('{"messages": [{"role": "user", "content": 7}]}', "messages[0].content must be text, not a number"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "messages[0].content[0] must be a text part",
        ),
        ('{"messages": [{"role": "user", "content": "q"}]}', "rows.jsonl:2: messages has no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": "q", "weight": -1}]}', "messages[0].weight must be a number"),
        (
            '{"messages": [{"role": "assistant", "content": "q", "weight": true}]}',
            "messages[0].weight must be a number",
        ),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "t"}', "tools must be a list of objects"),
        (
            '{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
            "rows.jsonl:2: a text holds half of a surrogate",
        ),
    ],
)
def test_a_bad_row_is_named_with_field_and_rule(tmp_path: Path, second_line: str, message: str) -> None:
    assert message in refusal(lines(tmp_path, {"messages": [USER, ASSISTANT]}, second_line))


def test_a_bad_row_is_found_behind_the_rows_that_were_looked_at_first(tmp_path: Path) -> None:
    good = [{"prompt": "p", "completion": "c"}] * 5000
    assert "rows.jsonl:5001: completion must be text, not nothing" in refusal(
        lines(tmp_path, *good, {"prompt": "p", "completion": None})
    )


def test_rows_that_match_two_formats_or_change_format_are_refused(tmp_path: Path) -> None:
    both = {"text": "t", "messages": [USER, ASSISTANT]}
    assert "rows.jsonl:1: the row matches chat and text: say which with format" in refusal(lines(tmp_path, both))
    assert isinstance(read(tmp_path, "text")[0], Text)
    change = refusal(lines(tmp_path, {"text": "t"}, {"prompt": "p", "completion": "c"}))
    assert change == "rows.jsonl:2: this row looks like prompt_completion, but rows.jsonl:1 looks like text"


def test_missing_fields_are_named(tmp_path: Path) -> None:
    lines(tmp_path, {"question": "q"})
    message = refusal(tmp_path, prompt_field="question", completion_field="answer")
    assert message == "rows.jsonl:1: the row has no field 'answer'; it has 'question'"
    assert "'prompt'" in refusal(tmp_path, "prompt_completion")
    assert "go with format prompt_completion" in refusal(tmp_path, "chat", prompt_field="q", completion_field="a")


def test_pretokenized_mistakes_are_refused(tmp_path: Path) -> None:
    assert "labels has 1 entries, input_ids 2" in refusal(lines(tmp_path, {"input_ids": [1, 2], "labels": [1]}))
    assert "input_ids must be a list of whole numbers" in refusal(lines(tmp_path, {"input_ids": [1.5]}))
    assert "input_ids must be a list of whole numbers" in refusal(lines(tmp_path, {"input_ids": [2**70]}))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xff"}\n')
    assert refusal(tmp_path) == "rows.jsonl:1: byte 11 of the line is not UTF-8"
    (tmp_path / "rows.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    assert "UTF-16" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("rows.zip", b"PK\x03\x04rows", "an archive"),
        ("rows.csv", b"prompt,completion\na,b\n", "CSV"),
        ("rows.tsv", b"prompt\tcompletion\na\tb\n", "CSV"),
        ("rows.json", b'[\n {"text": "a"}\n]\n', "JSON over several lines"),
        ("rows.json", b'\xef\xbb\xbf{\r\n "text": "a"}\r\n', "JSON over several lines"),
        ("rows.db", b"SQLite format 3\x00", "a database"),
    ],
)
def test_files_of_other_kinds_are_refused_as_what_they_are(tmp_path: Path, name: str, data: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert (
        refusal(tmp_path) == f"{name}: the file is {kind}: make it JSON lines (an object a line, in UTF-8) or Parquet"
    )


def test_arrow_files_are_read_as_parquet_is(tmp_path: Path) -> None:
    """As files and as streams, of which `save_to_disk` of `datasets` makes a folder."""
    table = pyarrow.Table.from_pylist(
        [{"messages": [USER, ASSISTANT | {"content": f"a{k}"}], "loss_mask": None} for k in range(600)]
    )
    found = []
    for make in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream, None):
        path = tmp_path / f"{make.__name__ if make else 'parquet'}" / "train" / "data-00000-of-00001.arrow"
        path.parent.mkdir(parents=True)
        if make is None:
            parquet.write_table(table, path)
        else:
            with make(path, table.schema) as writer:
                writer.write_table(table)
        found.append(read(path.parents[1]))
    assert len(found[0]) == 600 and found[0] == found[1] == found[2]
    assert found[0][599].place == "train/data-00000-of-00001.arrow: row 600"
    data = (tmp_path / "new_file" / "train" / "data-00000-of-00001.arrow").read_bytes()
    for damaged in (data[: len(data) // 2], data[:8] + bytes(2000) + data[2008:]):
        path.write_bytes(damaged)
        assert "data-00000-of-00001.arrow: the Arrow file cannot be read" in refusal(path.parent)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["some text"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "rows.parquet: the Parquet file cannot be read" in refusal(tmp_path)


def test_an_absurdly_long_line_is_refused_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    lines(tmp_path, {"text": "ok"}, {"text": "x" * (2 << 20)})
    assert "rows.jsonl:2: the line is longer than 1 MiB" in refusal(tmp_path)


ASK = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
OPENAI = {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}


def read_pairs(folder: Path, *rows: Any, format: Format = "auto", pairs: bool | None = None) -> list[Example]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_dataset(folder, DatasetSource(uri="file:///data", format=format), pairs))


def refusal_of_pairs(folder: Path, *rows: Any, **how: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        read_pairs(folder, *rows, **how)
    return str(refused.value)


def chats(pair: Example) -> tuple[Chat, Chat]:
    assert isinstance(pair, PreferencePair) and isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
    return pair.chosen, pair.rejected


def test_openais_rows(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"messages": [{"role": "system", "content": "s"}, ASK], "tools": tools, "parallel_tool_calls": True}
    [pair] = read_pairs(tmp_path, OPENAI | {"input": given})
    chosen, rejected = chats(pair)
    assert pair.place == chosen.place == "rows.jsonl:1"
    assert chosen.messages == [{"role": "system", "content": "s"}, ASK, GOOD] and chosen.weights == [0, 0, 1]
    assert rejected.messages == [{"role": "system", "content": "s"}, ASK, BAD] and rejected.weights == [0, 0, 1]
    assert chosen.tools == rejected.tools == tools


def test_trls_rows_with_a_prompt(tmp_path: Path) -> None:
    [texts] = read_pairs(tmp_path, {"prompt": "q", "chosen": "good", "rejected": "bad"})
    place = "rows.jsonl:1"
    assert texts == PreferencePair(place, PromptCompletion(place, "q", "good"), PromptCompletion(place, "q", "bad"))
    for prompt in ([ASK], "q"):
        [pair] = read_pairs(tmp_path, {"prompt": prompt, "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "t"}]})
        chosen, rejected = chats(pair)
        assert (chosen.messages, rejected.messages) == ([ASK, GOOD], [ASK, BAD])
        assert chosen.weights == [0, 1] and chosen.tools == [{"type": "function", "function": {"name": "t"}}]


def test_trls_rows_whose_prompt_is_what_both_begin_with(tmp_path: Path) -> None:
    """Also where a text says the prompt again, and where assistants spoke in it."""
    before = [ASK, GOOD, {"role": "user", "content": "more"}]
    row = {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    for more in ({}, {"prompt": "q"}, {"prompt": None}):
        [pair] = read_pairs(tmp_path, row | more)
        chosen, rejected = chats(pair)
        assert chosen.messages == [*before, GOOD] and rejected.messages == [*before, BAD]
        assert chosen.weights == rejected.weights == [0, 0, 0, 1]


def test_an_answer_may_call_tools_on_its_way(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    told = {"role": "tool", "content": "7"}
    [pair] = read_pairs(tmp_path, {"prompt": [ASK], "chosen": [call, told, GOOD], "rejected": [BAD]})
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
def test_a_bad_pair_is_named_with_field_and_rule(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = OPENAI if "preferred_output" in row else {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert f"rows.jsonl:2: {message}" in refusal_of_pairs(tmp_path, good, row)


def test_what_is_recognised_depends_on_whether_pairs_are_wanted(tmp_path: Path) -> None:
    """Rows that hold both, as published preference sets do, are a tie only where nobody says what is wanted."""
    both = {"messages": [ASK, GOOD], "prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert "rows.jsonl:1: the row matches chat and preference: say which with format" in refusal_of_pairs(
        tmp_path, both
    )
    assert isinstance(read_pairs(tmp_path, both, pairs=True)[0], PreferencePair)
    assert isinstance(read_pairs(tmp_path, both, pairs=False)[0], Chat)
    assert isinstance(read_pairs(tmp_path, both, format="preference")[0], PreferencePair)
    assert "the row looks like openai_preference; pairs are what dpo learns from" in refusal_of_pairs(
        tmp_path, OPENAI, pairs=False
    )
    said = refusal_of_pairs(tmp_path, {"messages": [ASK, GOOD]}, pairs=True)
    assert "rows.jsonl:1: the row looks like chat; dpo learns from pairs, as reward does: chosen + rejected" in said
    assert "known are chosen + rejected" in refusal_of_pairs(tmp_path, {"colour": "red"}, pairs=True)
    assert "chosen + rejected" not in refusal_of_pairs(tmp_path, {"colour": "red"}, pairs=False)
