"""Answers that this installation gave: their records, whether a client's message is one, and which policy gave it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from activities.formats.messages import call_of
from activities.formats.rows import Row
from shared.chat.answer_records import (
    LOOKUP_AT_ONCE,
    AnswerLookup,
    AnswerRecord,
    DrawnChoice,
    content_digest,
    parse_record,
)


class RememberedAnswers:
    """The records of answers that one tenant was given. Those that were fetched last are cached.

    `look_up`: reads them, as `look_up` of shared/chat/answer_records.py does with a store.
    """

    def __init__(self, look_up: Callable[[AnswerLookup], Sequence[str | None]]) -> None:
        self._look_up = look_up
        self._found: dict[str, AnswerRecord | None] = {}

    def fetch(self, answer_ids: Iterable[str]) -> None:
        """Read several answers, in parallel, into the cache, in place of its contents. Raises as `look_up` does."""
        self._found, wanted = {}, sorted(set(answer_ids))
        for first in range(0, len(wanted), LOOKUP_AT_ONCE):
            ids = tuple(wanted[first : first + LOOKUP_AT_ONCE])
            texts = self._look_up(AnswerLookup(ids=ids))
            self._found |= zip(ids, map(parse_record, texts), strict=True)

    def get(self, answer_id: str) -> AnswerRecord | None:
        """Return an answer; None if the id is not one of this tenant's, or the answer is no longer kept."""
        if answer_id not in self._found:
            [text] = self._look_up(AnswerLookup(ids=(answer_id,)))
            self._found[answer_id] = parse_record(text)
        return self._found[answer_id]

    def alike(self, prompt_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[AnswerRecord, int] | None:
        """Return an answer, and the number of its choice, by its content: for clients that lose the id."""
        for text in self._look_up(AnswerLookup(alike=content_digest(prompt_ids, logprobs))):
            if (record := parse_record(text)) is not None and record.prompt_ids == tuple(prompt_ids):
                for index, choice in enumerate(record.choices):
                    if choice.logprobs == tuple(logprobs):
                        return record, index
        return None


def is_same_message(message: dict[str, Any], choice: DrawnChoice) -> bool:
    """Compare a client's message with an answer: its text, and the functions that it calls."""
    told = [call_of(Row("tool_calls", {}), "tool_calls", call.model_dump()) for call in choice.tool_calls]
    return (message.get("content") or "") == (choice.content or "") and _calls(message) == _calls({"tool_calls": told})


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


@dataclass(frozen=True)
class PublishedPolicy:
    """The policy that a step starts from: its number in the run, and the name and version that it was published as.

    `version` is None before anything is published. `every`: the difference between two consecutive versions' numbers.
    """

    number: int
    name: str | None = None
    version: int | None = None
    every: int = 1

    def number_of(self, version: int | None, name: str | None = None) -> int | None:
        """The run's number of a published version; 0 for a version before the run, None for another policy's."""
        if version is None or name not in (None, self.name):
            return None
        if self.version is None:
            return 0
        newest = self.number - self.number % self.every
        return min(self.number, max(0, newest - (self.version - version) * self.every))
