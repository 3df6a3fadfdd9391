"""Answers of this installation that trajectories name: read from the store, and held against what a client sent."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from activities.tokenizing.tool_calls import with_parsed_calls
from shared.chat.answer_records import AnswerRecord, DrawnChoice, recall
from shared.storage.store import ObjectStore

_AT_ONCE = 16


class RememberedAnswers:
    """The answers that one tenant was given. Holds those that were fetched last."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._found: dict[str, AnswerRecord | None] = {}

    def fetch(self, answer_ids: Iterable[str]) -> None:
        """Read these at once, in the place of those before. Raises StoreUnavailable."""
        wanted = sorted(set(answer_ids))
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(lambda answer_id: recall(self._store, self._tenant, answer_id), wanted)
            self._found = dict(zip(wanted, found, strict=True))

    def get(self, answer_id: str) -> AnswerRecord | None:
        """None for an id that this tenant was not given, and for an answer that is no longer kept."""
        if answer_id not in self._found:
            self._found[answer_id] = recall(self._store, self._tenant, answer_id)
        return self._found[answer_id]


def is_same_message(message: dict[str, Any], choice: DrawnChoice) -> bool:
    """Whether a client's message says what the answer said: its text, and the functions that it calls."""
    told = with_parsed_calls({"tool_calls": [call.model_dump() for call in choice.tool_calls]})
    return _text(message) == (choice.content or "") and _calls(message) == _calls(told)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    functions = [call.get("function") if isinstance(call, dict) else None for call in message.get("tool_calls") or ()]
    return [(one.get("name"), one.get("arguments")) if isinstance(one, dict) else (None, None) for one in functions]
