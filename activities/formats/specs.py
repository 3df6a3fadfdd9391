"""Formats of datasets: one FormatSpec each, which turns a row into a training example or into a prompt for rollouts.

The prompt of a row equals what its training example has before the answer, so that a model is asked in the form that it
was trained in. Graders get the whole row as the item.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activities.formats.columns import GUARDED, MASKS, PROMPT, SHAREGPT_KEYS, with_context
from activities.formats.examples import MASKED_LABEL, Chat, Example, PromptCompletion, Question, Text, TokenIds
from activities.formats.messages import MEDIA, message_of, messages_of, refuse_media, tools_of, turn_weight
from activities.formats.preferences import openai_preference, preference
from activities.formats.rows import JSON, Row, is_given, list_of_objects, refuse_missing, text_of, type_name, weight_of
from shared.errors import InvalidInput
from shared.runs.sources import PAIR_FORMATS, Format

_ASKING = ("user", "tool")
_PADDING = -(2**62)  # a padding token's temporary label; `_int_array` does not accept this number
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


@dataclass(frozen=True, eq=False)
class FormatSpec:
    """One format. A new one needs an entry in `FORMATS`, and its name in `Format` (shared/runs/sources.py).

    Attributes:
        fields: a row that has all of them has this format. The first field is the prompt.
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
    def read(self) -> frozenset[str]:
        """The columns that `example` reads."""
        has_answers = self.question is not None or self.has_pairs
        context = (*PROMPT, "tools", "functions", "label") if has_answers else ()
        return frozenset((*self.fields, *self.more, *context, "weight"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a Parquet file that `example` reads, or that a row is refused for."""
        return tuple(sorted({*self.read, *GUARDED, *MEDIA}))

    @property
    def has_pairs(self) -> bool:
        return self.name in PAIR_FORMATS

    def __str__(self) -> str:
        return " + ".join(self.fields) + self.note


def _conversation(row: Row, field: str, messages: list[dict[str, Any]], weights: list[float]) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput(f"{field} has no assistant turn, so there is nothing to learn", row.place)
    scale = _row_weight(row)
    messages, weights = with_context(row, messages, weights)
    return Chat(row.place, messages, tools_of(row), [weight * scale for weight in weights])


def _answered(row: Row, prompt: str, completion: str) -> Chat | PromptCompletion:
    """Make an example of a prompt and a completion: a conversation if the row has more than these two texts."""
    tools, turns = tools_of(row), [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    messages, weights = with_context(row, turns, [0.0, 1.0])
    weight = _row_weight(row)
    if tools is None and len(messages) == len(turns):
        return PromptCompletion(row.place, prompt, completion, weight)
    return Chat(row.place, messages, tools, [each * weight for each in weights])


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
    asked, _ = with_context(row, asked, [0.0] * len(asked))
    return Question(row.place, asked, tools_of(row), _item(row), had_answer=had_answer)


def _asked_text(row: Row, text: str) -> Question:
    asked, tools = [{"role": "user", "content": text}], tools_of(row)
    messages, _ = with_context(row, asked, [0.0])
    is_alone = tools is None and len(messages) == 1
    return Question(row.place, messages, tools, _item(row), text if is_alone else None)


def _item(row: Row) -> dict[str, JSON]:
    """The whole row as JSON."""
    refuse_media(row)
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
    messages = [message_of(row, f"messages[{i}]", turn, weighs_parts=True) for i, turn in enumerate(turns)]
    return _conversation(
        row,
        "messages",
        messages,
        [turn_weight(row, f"messages[{i}]", turn, turn.get("role")) for i, turn in enumerate(turns)],
    )


def _sharegpt(row: Row) -> Chat:
    messages, turns = _sharegpt_messages(row), row.fields["conversations"]
    weights = [turn_weight(row, f"conversations[{i}]", turns[i], m["role"]) for i, m in enumerate(messages)]
    return _conversation(row, "conversations", messages, weights)


def _sharegpt_messages(row: Row) -> list[dict[str, Any]]:
    """Convert `conversations` to messages. Raises InvalidInput for an invalid turn."""
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(list_of_objects(row, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise InvalidInput(f"conversations[{i}].from must be one of {known}, not {speaker!r:.40}", row.place)
        if not isinstance(value, str):
            raise InvalidInput(f"conversations[{i}].value must be text, not {type_name(value)}", row.place)
        said = (
            {"content": value}
            if speaker != "function_call"
            else {"content": None, "tool_calls": _calls_in(row, i, value)}
        )
        kept = {key: each for key, each in turn.items() if key not in SHAREGPT_KEYS}
        messages.append(message_of(row, f"conversations[{i}]", {**kept, "role": _SHAREGPT_ROLES[speaker], **said}))
    return messages


def _calls_in(row: Row, i: int, value: str) -> list[JSON]:
    """Read a turn of the role function_call: JSON text of one call, or of several."""
    try:
        told = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"conversations[{i}].value must be JSON text of a call: {error}", row.place) from error
    return told if isinstance(told, list) else [told]


def _alpaca_prompt(row: Row) -> str:
    """The instruction and its input. Raises InvalidInput when either is not text."""
    instruction = text_of(row, "instruction")
    context = text_of(row, "input") if row.fields.get("input") is not None else ""
    return f"{instruction}\n\n{context}" if context else instruction


def _tokenized(row: Row) -> TokenIds:
    input_ids = _int_array(row, "input_ids")
    labels = input_ids if row.fields.get("labels") is None else _int_array(row, "labels")
    if len(labels) != len(input_ids):
        raise InvalidInput(f"labels has {len(labels)} entries, input_ids {len(input_ids)}", row.place)
    for mask in (each for each in MASKS if is_given(row, each)):
        kept = _mask(row, mask, len(input_ids))
        if mask == "attention_mask":
            if np.count_nonzero(np.diff(np.concatenate(([0], kept, [0])))) > 2:
                raise InvalidInput("attention_mask has zeros between tokens: padding alone may have them", row.place)
            labels = np.where(kept, labels, _PADDING)
        else:
            labels = np.where(kept | (labels == _PADDING), labels, MASKED_LABEL)
    is_text = labels != _PADDING
    return TokenIds(row.place, input_ids[is_text], labels[is_text], _row_weight(row))


def _mask(row: Row, field: str, length: int) -> NDArray[np.bool_]:
    mask = _int_array(row, field)
    if len(mask) != length or not np.isin(mask, (0, 1)).all():
        raise InvalidInput(f"{field} must have a 0 or 1 for each of the {length} input_ids", row.place)
    return mask == 1


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

    def example(row: Row) -> Chat | PromptCompletion:
        asked, answered = row.fields.get(prompt), row.fields.get(completion)
        if not isinstance(asked, list) and not isinstance(answered, list):
            return _answered(row, text_of(row, prompt), text_of(row, completion))
        messages = _said(row, prompt, "user")
        answer = _said(row, completion, "assistant")
        turns = zip(answered if isinstance(answered, list) else answer, answer, strict=True)
        weights = [turn_weight(row, f"{completion}[{i}]", turn, m["role"]) for i, (turn, m) in enumerate(turns)]
        weights = [0.0] * len(messages) + weights
        return _conversation(row, completion, messages + answer, weights)

    def question(row: Row) -> Question:
        refuse_missing(row, prompt)
        if isinstance(row.fields[prompt], str):
            return _asked_text(row, text_of(row, prompt))
        return _asked(row, prompt, messages_of(row, prompt))

    return FormatSpec("prompt_completion", (prompt, completion), example, question)


def _said(row: Row, field: str, role: str) -> list[dict[str, Any]]:
    """Return a field's messages. A text is one message of this role."""
    if isinstance(row.fields.get(field), list):
        return messages_of(row, field)
    return [{"role": role, "content": text_of(row, field)}]


FORMATS = (
    FormatSpec("chat", ("messages",), _chat, lambda row: _asked(row, "messages", messages_of(row, "messages"))),
    FormatSpec(
        "sharegpt", ("conversations",), _sharegpt, lambda row: _asked(row, "conversations", _sharegpt_messages(row))
    ),
    FormatSpec(
        "alpaca",
        ("instruction", "output"),
        lambda row: _answered(row, _alpaca_prompt(row), text_of(row, "output")),
        lambda row: _asked_text(row, _alpaca_prompt(row)),
        more=("input",),
    ),
    prompt_completion(),
    FormatSpec("tokenized", ("input_ids",), _tokenized, more=("labels", *MASKS)),
    FormatSpec("text", ("text",), lambda row: Text(row.place, text_of(row, "text"), _row_weight(row))),
    FormatSpec("preference", ("chosen", "rejected"), preference, more=("prompt",), note=", with or without prompt"),
    FormatSpec(
        "openai_preference",
        ("preferred_output", "non_preferred_output"),
        openai_preference,
        more=("input",),
        note=" + input",
    ),
)
