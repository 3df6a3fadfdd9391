"""A row's fields as texts, messages, tools and weights. Every error names the place, the field and the rule."""

import math
import re
from collections.abc import Iterable
from typing import Any

from activities.formats.rows import JSON, Row, without_nulls
from shared.errors import InvalidInput

_ROLES = ("system", "developer", "user", "assistant", "tool")


def listed(fields: Iterable[str]) -> str:
    """Names for an error message: not too many, not too long."""
    names = [repr(name[:40]) for name in fields]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


def type_name(value: object) -> str:
    """A JSON value's type, in words."""
    names = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), re.sub(r"\W", " ", type(value).__name__))


def refuse_missing(row: Row, field: str) -> None:
    """Raises InvalidInput when the row has no such field."""
    if field not in row.fields:
        raise InvalidInput(f"the row has no field {field!r}; it has {listed(row.fields)}", row.place)


def text_of(row: Row, field: str) -> str:
    """Raises InvalidInput when the row has no such field, or it is no text."""
    refuse_missing(row, field)
    value = row.fields[field]
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be text, not {type_name(value)}", row.place)
    return value


def list_of_objects(row: Row, field: str) -> list[dict[str, Any]]:
    """A field's objects, without what a schema added. Raises InvalidInput when there is none, or one is no object."""
    turns = row.fields.get(field)
    if not isinstance(turns, list):
        raise InvalidInput(f"{field} must be a list, not {type_name(turns)}", row.place)
    if not turns:
        raise InvalidInput(f"{field} is empty", row.place)
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise InvalidInput(f"{field}[{i}] must be an object, not {type_name(turn)}", row.place)
    return without_nulls(turns) if row.has_schema else turns


def tools_of(row: Row, field: str = "tools") -> list[dict[str, Any]] | None:
    """None where the row has no tools. Raises InvalidInput for what is no list of objects."""
    match row.fields.get(field):
        case None | []:
            return None
        case list() as tools if all(isinstance(tool, dict) for tool in tools):
            return tools
        case other:
            raise InvalidInput(f"{field} must be a list of objects, not {type_name(other)}", row.place)


def message_of(row: Row, field: str, turn: dict[str, JSON]) -> dict[str, Any]:
    """A message as templates take it, without its weight. Raises InvalidInput for what is none."""
    message = {key: value for key, value in turn.items() if value is not None and key != "weight"}
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidInput(f"{field}.role must be one of {', '.join(_ROLES)}, not {role!r:.40}", row.place)
    match message.get("content"):
        case str():
            pass
        case None if role == "assistant" and message.get("tool_calls"):
            pass
        case list() as parts:
            _check_parts(row, f"{field}.content", parts)
        case None:
            raise InvalidInput(f"{field}.content is missing", row.place)
        case other:
            raise InvalidInput(f"{field}.content must be text, not {type_name(other)}", row.place)
    if "tool_calls" in message and not isinstance(message["tool_calls"], list):
        raise InvalidInput(f"{field}.tool_calls must be a list, not {type_name(message['tool_calls'])}", row.place)
    return message


def messages_of(row: Row, field: str) -> list[dict[str, Any]]:
    """A field's messages. Raises InvalidInput as `list_of_objects` and `message_of` do."""
    return [message_of(row, f"{field}[{i}]", turn) for i, turn in enumerate(list_of_objects(row, field))]


def _check_parts(row: Row, field: str, parts: list[JSON]) -> None:
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidInput(f"{field}[{i}] must be a text part: only text can be trained on", row.place)


def weight_of(row: Row, field: str, weight: JSON) -> float:
    """A loss weight: 1 where there is none. Raises InvalidInput for what is no number of at least 0."""
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise InvalidInput(f"{field} must be a number of at least 0, not {weight!r:.40}", row.place)
    return float(weight)
