"""Converts `exchanges`, the requests and answers that a client captured, to conversations of a trajectory.

Newer clients send exchanges instead of messages: those with the model that is trained, and with others such as a judge.
Each answer of the trained model becomes a separate conversation with the messages of its request. If each request
contains the ids before it, they are trained as one sequence.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from service.inference.art_models import ArtName
from shared.errors import InvalidInput
from shared.field_rules import first_error

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
