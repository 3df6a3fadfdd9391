"""Sampled turns of conversations: what a client says of how they were sampled, and the answers that it names."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from activities.formats.rows import Row, message_of
from activities.tokenizing.tool_calls import with_parsed_calls
from shared.chat.answer_records import AnswerRecord, DrawnChoice, recall
from shared.chat.trajectories import ChatTrajectory, SampledTurn
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.storage.store import ObjectStore

_AT_ONCE = 16
PLACE = "messages"  # of a conversation alone; whoever asks knows its file and line


class BrokenTrajectory(Exception):
    """A trajectory that cannot be trained: the field, a short name for the rule, and a sentence."""

    def __init__(self, field: str, rule: str, message: str) -> None:
        self.field, self.rule, self.message = field, rule, message
        super().__init__(f"{field}: {message}")


@dataclass(frozen=True)
class Turns:
    """Messages as templates take them, and how some of them were sampled, by message."""

    messages: list[dict[str, Any]]
    sampled: dict[int, SampledTurn]


def turns_of(chat: ChatTrajectory) -> Turns:
    """Messages and choices told apart; nothing of how a turn was sampled is left in its message.

    Raises:
        BrokenTrajectory: it is no conversation, or nothing in it was sampled.
    """
    turns = Turns([], {})
    for i, given in enumerate(chat.messages):
        match given.get("message"):
            case dict() as inner:
                message, sampling = inner, {key: value for key, value in given.items() if key != "message"}
            case _:
                beside = set(SampledTurn.model_fields)
                message = {key: value for key, value in given.items() if key not in beside}
                sampling = {key: value for key, value in given.items() if key in beside}
        try:
            turns.messages.append(with_parsed_calls(message_of(Row(PLACE, {}), f"messages[{i}]", message)))
        except InvalidInput as error:
            raise BrokenTrajectory(PLACE, "messages", error.message) from error
        if sampling.get("logprobs") is not None or sampling.get("answer_id") is not None:
            turns.sampled[i] = _sampled(i, sampling, turns.messages[-1]["role"])
    if not turns.sampled:
        rule = "no assistant's turn has logprobs, or an answer_id: there is nothing to train"
        raise BrokenTrajectory(PLACE, "nothing_sampled", rule)
    return turns


def _sampled(i: int, sampling: dict[str, Any], role: str) -> SampledTurn:
    place = f"messages.{i}"
    if role != "assistant":
        rule = f"the message is the {role}'s: an assistant's alone are sampled"
        raise BrokenTrajectory(f"{place}.logprobs", "role", rule)
    try:
        turn = SampledTurn.model_validate(sampling)
    except ValidationError as error:
        field, rule = first_error(error)
        raise BrokenTrajectory(f"{place}.{field}", "logprobs", rule) from error
    if turn.logprobs is None:
        return turn
    tokens, ids = len(turn.logprobs.tokens), turn.token_ids
    if not tokens:
        rule = "it names no token: ask the server for logprobs"
        raise BrokenTrajectory(f"{place}.logprobs", "missing_logprobs", rule)
    if ids is not None and len(ids) != tokens:
        raise BrokenTrajectory(f"{place}.token_ids", "length", f"it has {len(ids)} entries for {tokens} logprobs")
    return turn


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
    """Compare a client's message with an answer: its text, and the functions that it calls."""
    told = with_parsed_calls({"tool_calls": [call.model_dump() for call in choice.tool_calls]})
    return _text(message) == (choice.content or "") and _calls(message) == _calls(told)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    functions = [call.get("function") if isinstance(call, dict) else None for call in message.get("tool_calls") or ()]
    return [(one.get("name"), one.get("arguments")) if isinstance(one, dict) else (None, None) for one in functions]
