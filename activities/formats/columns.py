"""Columns other than a format's own: parts of the prompt, masks and labels are read or refused, never ignored.

The names of unread columns are reported.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from activities.formats import THOUGHTS
from activities.formats.examples import Chat, Example, PreferencePair, PromptCompletion
from activities.formats.messages import KEYS, Message, message_of, refuse_media
from activities.formats.rows import Row, is_given, listed, text_of, type_name
from shared.errors import InvalidInput
from shared.storage.paths import LEFT

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

    columns: set[str] = field(default_factory=set)
    keys: Counter[str] = field(default_factory=Counter)
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
    told = _system(row)
    has_system = messages[0]["role"] in ("system", "developer")
    if told and has_system and messages[0]["content"] != told[0]["content"]:
        raise InvalidInput("system is another text than the first message's, which is a system turn too", row.place)
    head, rest = (messages[:1], messages[1:]) if has_system else (told, messages)
    history = _history(row)
    inserted = [float(message["role"] == "assistant") for message in history]
    return [*head, *history, *rest], [0.0] * len(head) + inserted + weights[len(messages) - len(rest) :]


def _system(row: Row) -> list[Message]:
    return [{"role": "system", "content": text_of(row, "system")}] if is_given(row, "system") else []


def _history(row: Row) -> list[Message]:
    if not is_given(row, "history"):
        return []
    match row.fields["history"]:
        case list() as pairs if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            turns = [(f"history[{i}]", role, text) for i, pair in enumerate(pairs) for role, text in _turns(pair)]
            return [message_of(row, place, {"role": role, "content": text}) for place, role, text in turns]
        case other:
            rule = f"history must be a list of pairs of question and answer, not {type_name(other)}"
            raise InvalidInput(rule, row.place)


def _turns(pair: list[Any]) -> list[tuple[str, Any]]:
    return list(zip(("user", "assistant"), pair, strict=True))
