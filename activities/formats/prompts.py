"""Prompts from a user's files: the question that a row asks the model, in the formats that training knows.

What a row asks is what the same row would have before the answer that supervised training learns from, so that a model
meets the prompts that it was taught. The whole row goes along as the item that graders see.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from activities.formats.examples_of import (
    all_rows,
    alpaca_prompt,
    data_files,
    detect,
    list_of_objects,
    listed,
    message_of,
    sharegpt_messages,
    text_of,
    tools_of,
)
from activities.formats.rows import JSON, Row
from shared.errors import InvalidInput
from shared.runs.requests import DatasetSource

PromptKind = Literal["chat", "prompt_completion", "alpaca", "sharegpt"]
Messages = list[dict[str, Any]]

_ASKING = ("user", "tool")


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation whose last message the model answers; `text`: the same as one plain text, where it is one.

    `had_answer`: the row ended in an answer, which is left out of the messages.
    """

    place: str
    messages: Messages
    tools: list[dict[str, Any]] | None
    item: dict[str, JSON]
    text: str | None = None
    had_answer: bool = False


@dataclass(frozen=True)
class PromptDataset:
    """Files whose format is known. Iterating streams their questions, in order of file name and row."""

    folder: Path
    files: tuple[Path, ...]
    kind: PromptKind
    prompt_field: str

    def __iter__(self) -> Iterator[Question]:
        return (self._question(row) for row in all_rows(self.folder, self.files))

    def _question(self, row: Row) -> Question:
        match self.kind:
            case "chat":
                return _conversation(row, "messages", _messages(row, "messages"))
            case "sharegpt":
                return _conversation(row, "conversations", sharegpt_messages(row))
            case "alpaca":
                return _plain(row, alpaca_prompt(row))
            case "prompt_completion" if isinstance(row.fields.get(self.prompt_field), str):
                return _plain(row, text_of(row, self.prompt_field))
            case "prompt_completion":
                _refuse_missing(row, self.prompt_field)
                return _conversation(row, self.prompt_field, _messages(row, self.prompt_field))


def open_prompts(folder: Path, source: DatasetSource) -> PromptDataset:
    """Find a folder's data files, and by its first rows what they ask.

    Raises:
        InvalidInput: no file, no row, first rows that ask nothing, in two ways, or not all in the same.
    """
    files = data_files(folder, source)
    prompt_field = source.prompt_field or "prompt"
    match source.format:
        case "auto" if source.prompt_field is None:
            kind = detect(all_rows(folder, files), _kind_of, source)
        case "auto" | "prompt_completion":
            kind = "prompt_completion"
        case "chat" | "alpaca" | "sharegpt" if source.prompt_field is None:
            kind = source.format
        case other:
            rule = "ask nothing" if other in ("text", "tokenized") else "have no prompt_field"
            raise InvalidInput(f"rows of the format {other} {rule}", "format")
    return PromptDataset(folder, files, kind, prompt_field)


def _kind_of(row: Row) -> PromptKind:
    """By what asks: other fields are the graders' affair."""
    signatures: dict[str, PromptKind] = {
        "messages": "chat",
        "conversations": "sharegpt",
        "instruction": "alpaca",
        "prompt": "prompt_completion",
    }
    match [kind for name, kind in signatures.items() if name in row.fields]:
        case [kind]:
            return kind
        case []:
            raise InvalidInput(
                f"the row asks nothing: it has the fields {listed(row.fields)}; known are messages, conversations, "
                "instruction and prompt (or name prompt_field)",
                row.place,
            )
        case kinds:
            raise InvalidInput(f"the row matches {' and '.join(kinds)}: say which with format", row.place)


def _refuse_missing(row: Row, field: str) -> None:
    if field not in row.fields:
        raise InvalidInput(f"the row has no field {field!r}; it has {listed(row.fields)}", row.place)


def _messages(row: Row, field: str) -> Messages:
    turns = list_of_objects(row, field)
    return [message_of(row, f"{field}[{i}]", turn) for i, turn in enumerate(turns)]


def _plain(row: Row, text: str) -> Question:
    return Question(row.place, [{"role": "user", "content": text}], None, _item(row), text)


def _conversation(row: Row, field: str, messages: Messages) -> Question:
    """A last answer, as rows for supervised training have it, is for graders to see and not for the model."""
    had_answer = messages[-1]["role"] == "assistant"
    asked = messages[:-1] if had_answer else messages
    if not asked or asked[-1]["role"] not in _ASKING:
        role = f"is the {asked[-1]['role']}'s" if asked else "is missing"
        raise InvalidInput(
            f"{field}: the message to answer {role}: a user's or a tool's must be the last, or stand before the answer",
            row.place,
        )
    return Question(row.place, asked, tools_of(row), _item(row), had_answer=had_answer)


def _item(row: Row) -> dict[str, JSON]:
    """The whole row as JSON."""
    if not row.has_schema:
        return row.fields
    return {name: _as_json(value, row.place, name) for name, value in row.fields.items()}


def _as_json(value: Any, place: str, field: str) -> JSON:
    """A value of a Parquet column. Numbers that are none (NaN, which pandas writes for what is missing) become null."""
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case np.ndarray():
            return value.tolist()
        case list():
            return [_as_json(each, place, field) for each in value]
        case dict():
            return {name: _as_json(each, place, f"{field}.{name}") for name, each in value.items()}
        case _:
            kind = type(value).__name__
            raise InvalidInput(
                f"{field} holds a {kind}, which graders cannot be shown: make it text, or drop it", place
            )
