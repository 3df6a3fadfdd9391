"""Splits a train request of ART's client, one JSON document with all trajectory groups, into a file of lines.

The document may have many megabytes: only one group at a time is parsed into objects.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from service.inference.art_models import ArtName
from shared.chat.trajectories import FORMS, SentGroup
from shared.errors import InvalidInput
from shared.field_rules import first_error

# --- Converts `exchanges`, the requests and answers that a client captured, to conversations of a trajectory ---
#
# Newer clients send exchanges instead of messages: those with the model that is trained, and with others such as a
# judge. Each answer of the trained model becomes a separate conversation with the messages of its request. If each
# request contains the ids before it, they are trained as one sequence.

NAME = "exchanges"
_Item = dict[str, JsonValue]


class _Captured(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Asked(_Captured):
    model: str | None = None


class _Exchange(_Captured):
    """An exchange of another API than chat completions."""

    request: _Asked


class _ChatAsked(_Asked):
    messages: tuple[_Item, ...]
    tools: tuple[_Item, ...] | None = None


class _ChatAnswered(_Captured):
    id: str | None = None
    choices: tuple[_Item, ...]


class _ChatExchange(_Captured):
    request: _ChatAsked
    response: _ChatAnswered

    @property
    def is_ours(self) -> bool:
        return _is_ours(self.request) or any("answer_id" in choice for choice in self.response.choices)

    @property
    def histories(self) -> list[dict[str, Any]]:
        """A history for each choice. One assembled from a stream has lost its `answer_id`: the response's id."""
        asked, answer_id = self.request, self.response.id
        choices = [{"answer_id": answer_id, **choice} for choice in self.response.choices]
        return [{"messages": [*asked.messages, choice], "tools": asked.tools} for choice in choices]


class _Exchanges(_Captured):
    chat_completions: tuple[_ChatExchange, ...] = ()
    completions: tuple[_Exchange, ...] = ()
    responses: tuple[_Exchange, ...] = ()
    messages: tuple[_Exchange, ...] = ()


def _is_ours(asked: _Asked) -> bool:
    return asked.model is not None and ArtName.parse(asked.model) is not None


def as_conversations(trajectory: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a trajectory with messages in place of exchanges. One without exchanges is returned unchanged.

    Raises InvalidInput: nothing in them can be trained; names the place.
    """
    if not (given := trajectory.get(NAME)):
        return {name: value for name, value in trajectory.items() if name != NAME}
    try:
        captured = _Exchanges.model_validate(given)
    except ValidationError as error:
        field, rule = first_error(error)
        raise InvalidInput(rule, f"{place}.{NAME}.{field}".rstrip(".")) from None
    for name in ("completions", "responses", "messages"):
        if any(_is_ours(each.request) for each in getattr(captured, name)):
            raise InvalidInput("answers of chat completions alone are trained", f"{place}.{NAME}.{name}")
    histories = [history for each in captured.chat_completions if each.is_ours for history in each.histories]
    if not histories:
        raise InvalidInput("there is no answer of a model of this service", f"{place}.{NAME}.chat_completions")
    rest = {name: value for name, value in trajectory.items() if name != NAME}
    return rest | histories[0] | {"additional_histories": histories[1:], "own_answers": True}


GROUPS = "trajectory_groups"
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass
class SentJob:
    """A request's other fields, and the numbers of its groups and trajectories."""

    fields: dict[str, Any] = field(default_factory=dict)
    num_groups: int = 0
    num_trajectories: int = 0


def split(document: bytes, lines: BinaryIO) -> SentJob:
    """Write every group of a document as a line of JSON.

    Raises InvalidInput: the document, or a group in it, is no JSON object; names the place.
    """
    job = SentJob()
    try:
        reader = _Reader(document.decode())
        for name in reader.names():
            if name in job.fields or (name == GROUPS and job.num_groups):
                raise InvalidInput("it occurs twice in the document", name)
            if name != GROUPS:
                job.fields[name] = reader.value()
                continue
            for group in reader.items():
                lines.write(_line(group, f"{GROUPS}.{job.num_groups}"))
                job.num_groups += 1
                job.num_trajectories += len(group["trajectories"])
    except RecursionError:
        raise InvalidInput("it is nested too deeply", "body") from None
    except ValueError as error:
        raise InvalidInput(f"this is no JSON object: {error}", "body") from None
    if not job.num_groups:
        raise InvalidInput("there is no trajectory group", GROUPS)
    return job


def _line(group: Any, place: str) -> bytes:
    found = group.get("trajectories") if isinstance(group, dict) else None
    trajectories = found if isinstance(found, list) else []
    for number, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, dict):
            continue
        trajectories[number] = trajectory = as_conversations(trajectory, f"{place}.trajectories.{number}")
        trajectory.setdefault("reward", 0.0)  # newer clients leave out defaults
        # ART's versions are steps of the model, which are versions of its adapter; a run's own count from 0.
        trajectory.pop("final_policy_version", None)
        if (step := trajectory.pop("initial_policy_version", None)) is not None:
            trajectory["model_version"] = step
    try:
        SentGroup.model_validate(group)
    except ValidationError as error:
        field, rule = first_error(error, FORMS)
        raise InvalidInput(rule, f"{place}.{field}".rstrip(".")) from None
    return json.dumps(group, separators=(",", ":")).encode() + b"\n"


class _Reader:
    """Reads a JSON object name by name, and a list in it item by item. Raises ValueError for malformed JSON."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def names(self) -> Iterator[str]:
        """Yield every name of the object. The caller must read its value before it takes the next name."""
        for _ in self._members("{", "}"):
            name = self.value()
            if not isinstance(name, str):
                raise ValueError(f"a name is missing before character {self._at}")
            self._take(":")
            yield name
        self._skip()
        if self._at != len(self._text):
            raise ValueError(f"there is more behind it, from character {self._at} on")

    def items(self) -> Iterator[Any]:
        """Yield every item of the list that is the next value."""
        for _ in self._members("[", "]"):
            yield self.value()

    def _members(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        more = not self._takes(closing)
        while more:
            yield
            if more := not self._takes(closing):
                self._take(",")

    def value(self) -> Any:
        self._skip()
        found, self._at = _DECODER.raw_decode(self._text, self._at)
        return found

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _takes(self, sign: str) -> bool:
        self._skip()
        if not self._text.startswith(sign, self._at):
            return False
        self._at += 1
        return True

    def _take(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"{sign} is missing at character {self._at}")
