"""Answers that this installation gave: their records, whether a client's message is one, and which policy gave it."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from activities.formats.messages import call_of
from activities.formats.rows import Row
from shared.chat.answer_records import AnswerRecord, DrawnChoice, recall, recall_alike
from shared.storage.store import ObjectStore

_AT_ONCE = 16


class RememberedAnswers:
    """Reads the records of answers that one tenant was given, and caches those that were fetched last."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._found: dict[str, AnswerRecord | None] = {}

    def fetch(self, answer_ids: Iterable[str]) -> None:
        """Read several answers in parallel into the cache, in place of its contents. Raises StoreUnavailable."""
        wanted = sorted(set(answer_ids))
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(lambda answer_id: recall(self._store, self._tenant, answer_id), wanted)
            self._found = dict(zip(wanted, found, strict=True))

    def get(self, answer_id: str) -> AnswerRecord | None:
        """Return an answer; None if the id is not one of this tenant's, or the answer is no longer kept."""
        if answer_id not in self._found:
            self._found[answer_id] = recall(self._store, self._tenant, answer_id)
        return self._found[answer_id]

    def alike(self, prompt_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[AnswerRecord, int] | None:
        """Return an answer, and the number of its choice, by its content: for clients that lose the id."""
        return recall_alike(self._store, self._tenant, prompt_ids, logprobs)


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

    `version` is None before anything is published. `every`: so many numbers lie between two published versions.
    """

    number: int
    name: str | None = None
    version: int | None = None
    every: int = 1

    def number_of(self, version: int | None, name: str | None = None) -> int | None:
        """The run's number of a published version; 0 for what is older than the run, None for what is another's."""
        if version is None or name not in (None, self.name):
            return None
        if self.version is None:
            return 0
        newest = self.number - self.number % self.every
        return min(self.number, max(0, newest - (self.version - version) * self.every))
