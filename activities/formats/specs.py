"""Formats of datasets: one FormatSpec each, which turns a row into a training example or into a prompt for rollouts.

The prompt of a row equals what its training example has before the answer, so that a model is asked in the form that it
was trained in. Graders get the whole row as the item.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from activities.formats import THOUGHTS
from activities.formats.rows import (
    JSON,
    KEYS,
    MASKED_LABEL,
    MEDIA,
    Chat,
    Example,
    Message,
    PreferencePair,
    PromptCompletion,
    Question,
    Row,
    Text,
    TokenIds,
    has_weighed_parts,
    is_given,
    list_of_objects,
    listed,
    message_of,
    messages_of,
    refuse_media,
    refuse_missing,
    text_of,
    tools_of,
    turn_weight,
    type_name,
    weight_of,
)
from longshore.dataset_runs import PAIR_FORMATS, Format
from shared.errors import InvalidInput
from shared.storage.paths import LEFT

# --- Columns other than a format's own ---
# Parts of the prompt, masks and labels are read or refused, never ignored.
#
# The names of unread columns are reported.

PROMPT = ("system", "history")
"""Columns that conversations of every format may have."""
MASKS = ("completion_mask", "loss_mask", "attention_mask")
GUARDED = (*PROMPT, "input", "functions", "tools", *MASKS, "label")
"""Columns that change what is trained: a row with one that its format does not read is refused."""


SHAREGPT_KEYS = ("from", "value")
_MOST_KEYS = 1000


@dataclass
class Unread:
    """Unread parts: columns, message keys with their numbers of rows, a description of files; and empty answers."""

    columns: set[str] = dataclass_field(default_factory=set)
    keys: Counter[str] = dataclass_field(default_factory=Counter)
    num_empty: int = 0
    first_empty: str = ""
    files: str = ""

    @classmethod
    def beside(cls, folder: Path) -> Self:
        """Begin with the files that were left of a dataset's source."""
        return cls(files=(folder / LEFT).read_text() if (folder / LEFT).is_file() else "")

    def note_keys(self, row: Row, columns: Collection[str]) -> None:
        """Count the unknown keys of a row's messages, which are in these columns."""
        turns = (turn for column in columns for turn in _listed(row.fields.get(column)))
        found = {key for turn in turns for key in turn.keys() - _READ_KEYS if turn[key] is not None}
        for name, value in ((name, row.fields.get(name)) for name in columns):
            if isinstance(value, dict) and "messages" in value:  # OpenAI's `input`
                self.columns.update(f"{name}.{key}" for key in value.keys() - {"messages", "tools", "functions"})
        self.keys.update(key for key in found if key in self.keys or len(self.keys) < _MOST_KEYS)

    def note_empty(self, example: Example) -> None:
        """Note a row if one of its trained answers is empty: it has no text, no thoughts and no calls."""
        answers = (example.chosen, example.rejected) if isinstance(example, PreferencePair) else (example,)
        if any(map(_is_empty, answers)):
            self.num_empty, self.first_empty = self.num_empty + 1, self.first_empty or example.place

    def warnings(self, template: str) -> Iterator[str]:
        """`template`: the source of the chat template. Message keys that it names count as read."""
        if self.files:
            yield self.files
        if self.num_empty:
            rows = f"{self.num_empty} row{'s' * (self.num_empty != 1)}"
            yield f"an answer of {rows} is empty, and the model learns to say nothing; first: {self.first_empty}"
        if self.columns:
            yield f"nobody reads the columns {listed(sorted(self.columns))}"
        template = " ".join((template, *THOUGHTS))
        keys = sorted(key for key in self.keys if not re.search(rf"\b{re.escape(key)}\b", template))
        if keys:
            rows = ", ".join(str(self.keys[key]) for key in keys[:12])
            yield f"nobody reads the keys {listed(keys)} of messages (in rows: {rows})"


_READ_KEYS = frozenset((*KEYS, *SHAREGPT_KEYS))


def _is_empty(answer: Example) -> bool:
    if isinstance(answer, Chat):
        learned = (m for m, weight in zip(answer.messages, answer.weights, strict=True) if weight)
        return any(not any(m.get(key) for key in ("content", "tool_calls", *THOUGHTS)) for m in learned)
    return isinstance(answer, PromptCompletion) and not answer.completion


def _listed(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages of a column: several, one, or those of OpenAI's `input`."""
    match value:
        case [dict(), *_] | {"messages": list()}:
            turns = value if isinstance(value, list) else value["messages"]
            yield from (turn for turn in turns if isinstance(turn, dict))
        case dict():
            yield value


def refuse_unread(row: Row, read: Collection[str], format: str) -> None:
    """Raise InvalidInput for a column of `GUARDED` that is not read, or KTO's label of an answer that is not good."""
    refuse_media(row)
    for column in GUARDED:
        if column not in read and is_given(row, column) and column != "label":
            rule = f"{column} says what the prompt or the mask is, and the format {format} does not read it"
            raise InvalidInput(f"{rule}: drop or rename the column", row.place)
    if row.fields.get("label") is False or ("label" in read and row.fields.get("label") == 0):
        raise InvalidInput("label is false: the answer is not to be learned: drop the row, or train by kto", row.place)


def with_context(row: Row, messages: list[Message], weights: list[float]) -> tuple[list[Message], list[float]]:
    """Put a row's `system` text and `history` (pairs of question and answer) before its messages.

    The history's answers are trained like the messages' answers.

    Raises InvalidInput: they are no text or pairs of texts, or the messages have another system turn.
    """
    told: list[Message] = [{"role": "system", "content": text_of(row, "system")}] if is_given(row, "system") else []
    has_system = messages[0]["role"] in ("system", "developer")
    if told and has_system and messages[0]["content"] != told[0]["content"]:
        raise InvalidInput("system is another text than the first message's, which is a system turn too", row.place)
    head, rest = (messages[:1], messages[1:]) if has_system else (told, messages)
    history = _history(row)
    inserted = [float(message["role"] == "assistant") for message in history]
    return [*head, *history, *rest], [0.0] * len(head) + inserted + weights[len(messages) - len(rest) :]


def _history(row: Row) -> list[Message]:
    if not is_given(row, "history"):
        return []
    match row.fields["history"]:
        case list() as pairs if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return [
                message_of(row, f"history[{i}]", {"role": role, "content": text})
                for i, pair in enumerate(pairs)
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
        case other:
            rule = f"history must be a list of pairs of question and answer, not {type_name(other)}"
            raise InvalidInput(rule, row.place)


# --- Single answers that are good or bad, as KTO learns from them ---
# The weights of a bad answer are -1 in place of 1.

LABELLED = "answers with a label, true or false"


def with_label(example: Example, row: Row) -> Example:
    """Return a row's example with its `label`: the answer is everything after the last question.

    In a pair, the chosen answer is good and the rejected one bad.

    Raises InvalidInput: there is no label, or no answer after the last question; or the row or a message has a weight.
    """
    match example:
        case PreferencePair():
            return replace(example, rejected=_bad(example.rejected))
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"the last message is the {messages[-1]['role']}'s: a label is of the answer that ends the row"
                raise InvalidInput(rule, row.place)
            first = max((i + 1 for i, m in enumerate(messages) if m["role"] not in ("assistant", "tool")), default=0)
            answer: Chat | PromptCompletion = replace(example, weights=[0.0] * first + weights[first:])
            is_weighed = weights[first:] != [float(m["role"] == "assistant") for m in messages[first:]]
            is_weighed = is_weighed or any(map(has_weighed_parts, messages))
        case PromptCompletion():
            answer, is_weighed = example, example.weight != 1
        case _:
            raise InvalidInput(f"kto learns from {LABELLED}: this row has no answer", row.place)
    refuse_missing(row, "label")
    if isinstance(label := row.fields["label"], str | list | dict) or label not in (0, 1):
        raise InvalidInput(f"label must be true or false, not {type_name(label)}", row.place)
    if is_weighed:
        raise InvalidInput("weight must be 1 or absent: kto weighs all good answers alike, and all bad ones", row.place)
    return answer if label else _bad(answer)


def _bad(answer: Chat | PromptCompletion) -> Chat | PromptCompletion:
    match answer:
        case Chat():
            return replace(answer, weights=[-weight for weight in answer.weights])
        case PromptCompletion():
            return replace(answer, weight=-answer.weight)


# --- Numbers beside answers, as reward models learn them ---
# A pair's margin, an answer's scores, or labels of turns.

MARGIN = "margin"
LABELS = "labels"
TEACHER = "teacher"
_LARGEST = 1e30  # of float32, with room
Numbers = dict[str, tuple[float, ...]]
"""What was read of rows, by their places, until their tokens are made into units."""


def read_numbers(example: Example, row: Row, fields: tuple[str, ...], numbers: Numbers) -> Example:
    """Note a row's numbers and return its example. A pair has its `margin` (default 0), other rows `fields`.

    The field `labels` is a list with one number for each of the assistant's turns, except those of a prompt.

    Raises InvalidInput: a field is missing or not a finite number; the row has a weight, or ends without an answer.
    """
    match example:
        case PreferencePair():
            numbers[row.place] = (0.0 if row.fields.get(MARGIN) is None else _number(row, MARGIN),)
            return example
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"the last message is the {messages[-1]['role']}'s: a score is of the answer that ends the row"
                raise InvalidInput(rule, row.place)
            num_turns, is_weighed = sum(weights), weights[-1] != 1 or not {*weights} <= {0.0, 1.0}
            is_weighed = is_weighed or any(map(has_weighed_parts, messages))
        case PromptCompletion():
            num_turns, is_weighed = 1, example.weight != 1
        case _:
            raise InvalidInput("a score belongs to an answer, and this row has no answer", row.place)
    if is_weighed:
        raise InvalidInput("weight must be 1 or absent: a reward model weighs all answers alike", row.place)
    if fields != (LABELS,):
        numbers[row.place] = tuple(_number(row, field) for field in fields)
        return example
    refuse_missing(row, LABELS)
    labels = row.fields[LABELS]
    if not isinstance(labels, list | np.ndarray) or len(labels) != num_turns:
        rule = f"labels must be a list of a number for each of the {num_turns:.0f} turns of the assistant"
        raise InvalidInput(rule, row.place)
    numbers[row.place] = tuple(_number(row, LABELS, i) for i in range(len(labels)))
    return example


def number_of_teacher(row: Row, teachers: tuple[str, ...]) -> float:
    """Return the number, from 1, of the teacher that a row names; 0 if it names none. Raises InvalidInput."""
    named = row.fields.get(TEACHER)
    if named is not None and named not in teachers:
        raise InvalidInput(f"teacher must be one of {', '.join(teachers)}, or absent, not {named!r:.40}", row.place)
    return 0.0 if named is None else 1.0 + teachers.index(named)


def _number(row: Row, field: str, *index: int) -> float:
    """Return the number of a field, or one of its list; true and false are 1 and 0."""
    refuse_missing(row, field)
    value: Any = row.fields[field]
    for place in index:
        value, field = value[place], f"{field}[{place}]"
    if not isinstance(value, int | float | np.integer):
        raise InvalidInput(f"{field} must be a number, not {type_name(value)}", row.place)
    if not abs(float(value)) <= _LARGEST:  # nor is NaN
        raise InvalidInput(f"{field} must be a finite number, not {value!r:.40}", row.place)
    return float(value)


# --- Rows of preference pairs: one prompt, its preferred and its rejected answer ---
#
# Each answer becomes a separate example, so that it is rendered and encoded as it would be alone.

Messages = list[dict[str, Any]]


def preference(row: Row) -> PreferencePair:
    """Parse `chosen` and `rejected`, with a `prompt` or none, as TRL has them: texts or messages.

    Without `prompt`, the messages that both conversations begin with are the prompt. Some datasets repeat it as a text
    in `prompt`; this text must be one of those messages.

    Raises InvalidInput: an answer is missing, or equals the other one; the prompts differ, or there is none.
    """
    _refuse_weight(row)
    if isinstance(row.fields.get("chosen"), str) and not isinstance(row.fields.get("prompt"), list):
        return _of_texts(row)
    answers = {name: _answer(row, name) for name in ("chosen", "rejected")}
    match row.fields.get("prompt"):
        case list():
            return _pair(row, "prompt", messages_of(row, "prompt"), answers, tools_of(row))
        case str() as text if answers["chosen"][0]["role"] == answers["rejected"][0]["role"] == "assistant":
            return _pair(row, "prompt", [{"role": "user", "content": text}], answers, tools_of(row))
        case str() | None as text:
            return _with_shared_prompt(row, answers, text)
        case other:
            raise InvalidInput(f"prompt must be text or a list, not {type_name(other)}", row.place)


def openai_preference(row: Row) -> PreferencePair:
    """Parse `input.messages`, `preferred_output`, `non_preferred_output`, as OpenAI names them. Raises as above."""
    _refuse_weight(row)
    given = row.fields.get("input")
    if not isinstance(given, dict):
        raise InvalidInput(f"input must be an object, not {type_name(given)}", row.place)
    inner = Row(row.place, {f"input.{name}": value for name, value in given.items()}, row.has_schema)
    answers = {name: _answer(row, name) for name in ("preferred_output", "non_preferred_output")}
    return _pair(row, "input.messages", messages_of(inner, "input.messages"), answers, tools_of(inner, "input.tools"))


def _refuse_weight(row: Row) -> None:
    if row.fields.get("weight") not in (None, 1):
        raise InvalidInput("weight must be 1 or absent: dpo weighs all pairs alike", row.place)


def _of_texts(row: Row) -> PreferencePair:
    if row.fields.get("prompt") is None:
        raise InvalidInput("chosen is text, and there is no prompt: add it, or give messages that share one", row.place)
    prompt, chosen, rejected = (text_of(row, name) for name in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        raise _same(row, "rejected", "chosen")
    if tools_of(row) or any(is_given(row, column) for column in PROMPT):
        answers = {"chosen": _spoken(chosen), "rejected": _spoken(rejected)}
        return _pair(row, "prompt", [{"role": "user", "content": prompt}], answers, tools_of(row))
    return PreferencePair(
        row.place, PromptCompletion(row.place, prompt, chosen), PromptCompletion(row.place, prompt, rejected)
    )


def _spoken(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def _answer(row: Row, field: str) -> Messages:
    """Return the messages of an answer, which may be one message, or a text behind a prompt of messages.

    Weights other than 1 are refused, because the whole answer is trained.
    """
    match row.fields.get(field):
        case str() as text if isinstance(row.fields.get("prompt"), list):
            return _spoken(text)
        case dict() as message:
            row = replace(row, fields=row.fields | {field: [message]})
    for i, turn in enumerate(list_of_objects(row, field)):
        if turn.get("role") == "assistant" and turn_weight(row, f"{field}[{i}]", turn) != 1:
            raise InvalidInput(f"{field}[{i}].weight must be 1 or absent: dpo weighs all answers alike", row.place)
    return messages_of(row, field)


def _with_shared_prompt(row: Row, whole: dict[str, Messages], text: str | None) -> PreferencePair:
    chosen, rejected = whole.values()
    if chosen == rejected:
        raise _same(row, *reversed(whole))
    both = zip(chosen, rejected, strict=False)
    shared = next((i for i, (one, other) in enumerate(both) if one != other), min(len(chosen), len(rejected)))
    prompt = chosen[:shared]
    if not prompt:
        raise InvalidInput("chosen and rejected differ from their first message on: they share no prompt", row.place)
    for field, messages in whole.items():
        for i, turn in enumerate(messages[shared:], shared):
            if turn["role"] not in ("assistant", "tool"):
                rule = "behind what both conversations begin with: the prompts of a pair must be the same"
                raise InvalidInput(f"{field}[{i}] is the {turn['role']}'s, {rule}", row.place)
    if text is not None and not any(message.get("content") == text for message in prompt):
        raise InvalidInput("prompt is not one of the messages with which chosen and rejected begin", row.place)
    return _pair(row, None, prompt, {name: messages[shared:] for name, messages in whole.items()}, tools_of(row))


def _pair(
    row: Row, asked_in: str | None, prompt: Messages, answers: dict[str, Messages], tools: list[dict[str, Any]] | None
) -> PreferencePair:
    """Make a pair of one prompt and two answers to it.

    Args:
        asked_in: the prompt's field; None if the prompt is the common beginning of both conversations.
        answers: by their fields, the preferred one first.
    """
    prompt, _ = with_context(row, prompt, [0.0] * len(prompt))
    if asked_in is not None and prompt[-1]["role"] == "assistant":
        fields = " and ".join(answers)
        raise InvalidInput(f"{asked_in} ends with an assistant's turn: answers go into {fields}", row.place)
    chosen, rejected = answers.values()
    if chosen == rejected:
        raise _same(row, *reversed(answers))
    for field, answer in answers.items():
        for turn in answer:
            if turn["role"] not in ("assistant", "tool"):
                raise InvalidInput(f"{field} has a turn of the {turn['role']}: answers are an assistant's", row.place)
        if not answer or answer[-1]["role"] != "assistant":
            raise InvalidInput(f"{field} does not end with an assistant's turn, so there is no answer", row.place)
    return PreferencePair(row.place, _example(row, prompt, chosen, tools), _example(row, prompt, rejected, tools))


def _example(row: Row, prompt: Messages, answer: Messages, tools: list[dict[str, Any]] | None) -> Chat:
    weights = [0.0] * len(prompt) + [float(turn["role"] == "assistant") for turn in answer]
    return Chat(row.place, [*prompt, *answer], tools, weights)


def _same(row: Row, rejected: str, chosen: str) -> InvalidInput:
    return InvalidInput(f"{rejected} is the same as {chosen}: nothing to prefer", row.place)


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
    """One format. A new one needs an entry in `FORMATS`, and its name in `Format` (longshore/dataset_runs.py).

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
        kept = _int_array(row, mask)
        if len(kept) != len(input_ids) or not np.isin(kept, (0, 1)).all():
            raise InvalidInput(f"{mask} must have a 0 or 1 for each of the {len(input_ids)} input_ids", row.place)
        if mask == "attention_mask":
            if np.count_nonzero(np.diff(np.concatenate(([0], kept, [0])))) > 2:
                raise InvalidInput("attention_mask has zeros between tokens: padding alone may have them", row.place)
            labels = np.where(kept == 1, labels, _PADDING)
        else:
            labels = np.where((kept == 1) | (labels == _PADDING), labels, MASKED_LABEL)
    is_text = labels != _PADDING
    return TokenIds(row.place, input_ids[is_text], labels[is_text], _row_weight(row))


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
