"""Formats of datasets: one FormatSpec each, which turns a row into a training example or into a prompt for rollouts.

The prompt of a row equals what its training example has before the answer, so that a model is asked in the form that it
was trained in. Graders get the whole row as the item.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activities.formats.examples import Chat, Example, PromptCompletion, Question, Text, TokenIds
from activities.formats.messages import message_of, messages_of, tools_of
from activities.formats.preferences import openai_preference, preference
from activities.formats.rows import (
    JSON,
    Row,
    list_of_objects,
    refuse_missing,
    text_of,
    type_name,
    weight_of,
)
from shared.errors import InvalidInput
from shared.runs.sources import PAIR_FORMATS, Format

_ASKING = ("user", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, eq=False)
class FormatSpec:
    """One format. A new one needs an entry in `FORMATS`, and its name in `Format` (shared/runs/sources.py).

    Attributes:
        fields: a row that has all of them is of this format. The first one holds the prompt.
        example: makes a row's training example. Raises InvalidInput for a row that breaks a rule.
        question: makes a row's prompt; None if rows of this format have none. Raises as `example` does.
        more: other columns that `example` reads.
        note: text that errors show after the names of the format's fields.
    """

    name: Format
    fields: tuple[str, ...]
    example: Callable[[Row], Example]
    question: Callable[[Row], Question] | None = None
    more: tuple[str, ...] = ()
    note: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a Parquet file that `example` reads."""
        return (*self.fields, *self.more, "weight")

    @property
    def has_pairs(self) -> bool:
        return self.name in PAIR_FORMATS

    def __str__(self) -> str:
        return " + ".join(self.fields) + self.note


def _conversation(row: Row, field: str, messages: list[dict[str, Any]], weights: list[float]) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput(f"{field} has no assistant turn, so there is nothing to learn", row.place)
    scale = _row_weight(row)
    return Chat(row.place, messages, tools_of(row), [weight * scale for weight in weights])


def _asked(row: Row, field: str, messages: list[dict[str, Any]]) -> Question:
    """Make the prompt of a conversation. A final assistant's turn is left out; graders still see it in the row."""
    had_answer = messages[-1]["role"] == "assistant"
    asked = messages[:-1] if had_answer else messages
    if not asked or asked[-1]["role"] not in _ASKING:
        role = f"is the {asked[-1]['role']}'s" if asked else "is missing"
        raise InvalidInput(
            f"{field}: the message to answer {role}: a user's or a tool's must be the last, or stand before the answer",
            row.place,
        )
    return Question(row.place, asked, tools_of(row), _item(row), had_answer=had_answer)


def _asked_text(row: Row, text: str) -> Question:
    return Question(row.place, [{"role": "user", "content": text}], None, _item(row), text)


def _item(row: Row) -> dict[str, JSON]:
    """The whole row as JSON."""
    if not row.has_schema:
        return row.fields
    return {name: _as_json(value, row.place, name) for name, value in row.fields.items()}


def _as_json(value: Any, place: str, field: str) -> JSON:
    """Convert a value of a Parquet column to JSON. NaN, which pandas writes for missing values, becomes null."""
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


def _row_weight(row: Row) -> float:
    """The loss weight of a whole example: 1 unless its row has a `weight`."""
    return weight_of(row, "weight", row.fields.get("weight"))


# The examples and prompts of each format.


def _chat(row: Row) -> Chat:
    turns = list_of_objects(row, "messages")
    messages = [message_of(row, f"messages[{i}]", turn) for i, turn in enumerate(turns)]
    return _conversation(row, "messages", messages, [_turn_weight(row, i, turn) for i, turn in enumerate(turns)])


def _turn_weight(row: Row, i: int, turn: dict[str, JSON]) -> float:
    """A message's loss weight: 1 for an assistant's unless it says otherwise, 0 for all others."""
    weight = weight_of(row, f"messages[{i}].weight", turn.get("weight"))
    return weight if turn.get("role") == "assistant" else 0.0


def _sharegpt(row: Row) -> Chat:
    messages = _sharegpt_messages(row)
    weights = [1.0 if message["role"] == "assistant" else 0.0 for message in messages]
    return _conversation(row, "conversations", messages, weights)


def _sharegpt_messages(row: Row) -> list[dict[str, Any]]:
    """Convert `conversations` to messages. Raises InvalidInput for a turn that is none."""
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(list_of_objects(row, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise InvalidInput(f"conversations[{i}].from must be one of {known}, not {speaker!r:.40}", row.place)
        if not isinstance(value, str):
            raise InvalidInput(f"conversations[{i}].value must be text, not {type_name(value)}", row.place)
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": value})
    return messages


def _alpaca_prompt(row: Row) -> str:
    """The instruction, and what it is about. Raises InvalidInput when either is no text."""
    instruction = text_of(row, "instruction")
    context = text_of(row, "input") if row.fields.get("input") is not None else ""
    return f"{instruction}\n\n{context}" if context else instruction


def _tokenized(row: Row) -> TokenIds:
    input_ids = _int_array(row, "input_ids")
    labels = input_ids if row.fields.get("labels") is None else _int_array(row, "labels")
    if len(labels) != len(input_ids):
        raise InvalidInput(f"labels has {len(labels)} entries, input_ids {len(input_ids)}", row.place)
    return TokenIds(row.place, input_ids, labels, _row_weight(row))


def _int_array(row: Row, field: str) -> NDArray[np.int64]:
    values = row.fields.get(field)
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, list) and all(type(v) is int and abs(v) < 2**62 for v in values):
        array = np.array(values, dtype=np.int64)
    else:
        raise InvalidInput(f"{field} must be a list of whole numbers", row.place)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(f"{field} must be a list of whole numbers", row.place)
    return array.astype(np.int64)


def prompt_completion(prompt: str = "prompt", completion: str = "completion") -> FormatSpec:
    """Rows of a prompt and its completion, in fields of these names."""

    def example(row: Row) -> PromptCompletion:
        return PromptCompletion(row.place, text_of(row, prompt), text_of(row, completion), _row_weight(row))

    def question(row: Row) -> Question:
        refuse_missing(row, prompt)
        if isinstance(row.fields[prompt], str):
            return _asked_text(row, text_of(row, prompt))
        return _asked(row, prompt, messages_of(row, prompt))

    return FormatSpec("prompt_completion", (prompt, completion), example, question)


FORMATS = (
    FormatSpec(
        "chat",
        ("messages",),
        _chat,
        lambda row: _asked(row, "messages", messages_of(row, "messages")),
        more=("tools",),
    ),
    FormatSpec(
        "sharegpt",
        ("conversations",),
        _sharegpt,
        lambda row: _asked(row, "conversations", _sharegpt_messages(row)),
        more=("tools",),
    ),
    FormatSpec(
        "alpaca",
        ("instruction", "output"),
        lambda row: PromptCompletion(row.place, _alpaca_prompt(row), text_of(row, "output"), _row_weight(row)),
        lambda row: _asked_text(row, _alpaca_prompt(row)),
        more=("input",),
    ),
    prompt_completion(),
    FormatSpec("tokenized", ("input_ids",), _tokenized, more=("labels",)),
    FormatSpec("text", ("text",), lambda row: Text(row.place, text_of(row, "text"), _row_weight(row))),
    FormatSpec(
        "preference", ("chosen", "rejected"), preference, more=("prompt", "tools"), note=", with or without prompt"
    ),
    FormatSpec(
        "openai_preference",
        ("preferred_output", "non_preferred_output"),
        openai_preference,
        more=("input",),
        note=" + input",
    ),
)
