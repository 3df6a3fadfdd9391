"""Messages and tools in one form, whatever dialect a row, a trajectory or a chat has them in.

A content is one text; the arguments of a tool call are an object; a tool is `{"type": "function", "function": ...}`.
Every door normalises by these functions, so that the same messages become the same tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activities.formats import THOUGHTS
from activities.formats.rows import JSON, Row, is_given, list_of_objects, type_name, weight_of, without_nulls
from shared.errors import InvalidInput

# --- The types that rows of datasets are parsed into, whatever their format ---
# Training examples and rollout prompts.


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as chat templates take it; `weights[i]` is message i's loss weight, 0 unless an assistant's."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    weights: list[float]


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and what is learned as its answer. `weight`: the example's loss weight, here and below."""

    place: str
    prompt: str
    completion: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A text; every token is trained."""

    place: str
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An example that was tokenized elsewhere: int64 [T] each; a label of -100 is not learned."""

    place: str
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt with its preferred and its rejected answer, each as a complete example."""

    place: str
    chosen: Chat | PromptCompletion
    rejected: Chat | PromptCompletion


Example = Chat | PromptCompletion | Text | TokenIds | PreferencePair
MASKED_LABEL = -100
"""The label, in TokenIds, of a token that is not learned."""


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation whose last message the model is to answer. `text`: the prompt, if the row has a plain text.

    `had_answer`: the row ended in an answer, which is left out of the messages. `dropped_reasoning`: messages whose
    thoughts the chat template leaves out, once it is rendered.
    """

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    item: dict[str, Any]
    text: str | None = None
    had_answer: bool = False
    dropped_reasoning: int = 0


Message = dict[str, Any]
Tools = list[dict[str, Any]]

_FLAGS = ("train", "loss", "trainable")  # axolotl's, ms-swift's and verl's: false is a weight of 0
_OURS = ("weight", *_FLAGS, "refusal")
KEYS = ("role", "content", "name", "tool_calls", "function_call", "tool_call_id", *_OURS)
"""Keys of messages that are read here or, except for `_OURS`, by chat templates. Those of thoughts are `THOUGHTS`."""
MEDIA = ("images", "videos", "audios")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")  # of a tool's arguments: OpenAI's name, Anthropic's, MCP's
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"function": "tool", "observation": "tool"}
_TEXT_PARTS = (None, "text", "input_text", "output_text")


class WeighedText(str):
    """An answer's text whose parts weigh differently. `parts`: the characters and the weight of each."""

    parts: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, texts: list[str], weights: list[float]) -> "WeighedText":
        made = cls("".join(texts))
        made.parts = tuple((len(text), weight) for text, weight in zip(texts, weights, strict=True))
        return made


def has_weighed_parts(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), WeighedText)


def message_of(row: Row, field: str, turn: dict[str, JSON], weighs_parts: bool = False) -> Message:
    """A message as templates take it, without its weight. Raises InvalidInput if it is not a message.

    `weighs_parts`: parts of an assistant's content may have weights.
    """
    message = {key: value for key, value in turn.items() if value is not None and key not in _OURS}
    role = message.get("role")
    message["role"] = role = _OTHER_NAMES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise InvalidInput(f"{field}.role must be one of {', '.join(_ROLES)}, not {role!r:.40}", row.place)
    calls = _calls_of(row, field, message)
    if calls and role != "assistant":
        raise InvalidInput(f"{field}.tool_calls: the message is the {role}'s, and an assistant calls tools", row.place)
    message |= {"tool_calls": calls} if calls else {}
    refuse_media(Row(row.place, turn), f"{field}.")
    thoughts = {key: _thoughts(row, f"{field}.{key}", message[key]) for key in THOUGHTS if key in message}
    if len({*thoughts.values()}) > 1:
        raise InvalidInput(f"{field}: {' and '.join(thoughts)} are names of one thing, and differ: give one", row.place)
    message |= thoughts
    if refusal := turn.get("refusal"):
        if role != "assistant" or not isinstance(refusal, str) or message.get("content"):
            raise InvalidInput(f"{field}.refusal must be an assistant's text in the place of its content", row.place)
        message["content"] = refusal
    match message.get("content"):
        case str():
            pass
        case list() as parts:
            message["content"] = _joined(row, f"{field}.content", [*parts], weighs_parts and role == "assistant")
        case None if calls:
            message["content"] = None  # templates tell an absent content from none
        case None:
            raise InvalidInput(f"{field}.content is missing", row.place)
        case other:
            raise InvalidInput(f"{field}.content must be text, not {type_name(other)}", row.place)
    return message


def turn_weight(row: Row, field: str, turn: Mapping[str, JSON], role: JSON = "assistant") -> float:
    """A message's loss weight: 1 for an assistant's unless it says otherwise, 0 for all others.

    Raises InvalidInput: an invalid weight; flags that are neither true nor false, that contradict the weight or each
    other, or that train a message of another role.
    """
    weight = weight_of(row, f"{field}.weight", turn.get("weight"))
    flags = {key: turn[key] for key in _FLAGS if turn.get(key) is not None}
    said = [*flags.values(), *([weight > 0] if turn.get("weight") is not None else [])]
    if flags and (said[0] not in (False, role == "assistant") or any(each != said[0] for each in said)):
        rule = "true or false, as the message's weight says, and false unless it is an assistant's"
        raise InvalidInput(f"{field}: {', '.join(flags)} must be {rule}", row.place)
    return weight if role == "assistant" and all(flags.values()) else 0.0


def refuse_media(row: Row, field: str = "") -> None:
    """Raise InvalidInput for a row or a message with images, videos or audios, which its text refers to by tags."""
    if key := next((key for key in MEDIA if is_given(row, key)), None):
        raise InvalidInput(f"{field}{key}: only text can be trained on: drop the row", row.place)


def messages_of(row: Row, field: str) -> list[Message]:
    """A field's messages. Raises InvalidInput as `list_of_objects` and `message_of` do."""
    return [message_of(row, f"{field}[{i}]", turn) for i, turn in enumerate(list_of_objects(row, field))]


def tools_of(row: Row, field: str = "tools") -> Tools | None:
    """The row's tools, which may be JSON text; None if it has none. `functions` is their older name.

    Raises InvalidInput: not a list of tools, or both names.
    """
    older = field.removesuffix("tools") + "functions"
    if row.fields.get(field) and row.fields.get(older):
        raise InvalidInput(f"{older} is the older name of {field}: give one", row.place)
    field = older if row.fields.get(older) else field
    value = row.fields.get(field)
    if isinstance(value, str):
        value = _json_of(row, field, value, "a list of objects") if value.strip() else None
    match value:
        case None | []:
            return None
        case list() as tools if all(isinstance(tool, dict) for tool in tools):
            given = without_nulls(tools) if row.has_schema else tools
            return [tool_of(row, f"{field}[{i}]", tool) for i, tool in enumerate(given)]
        case other:
            raise InvalidInput(f"{field} must be a list of objects, not {type_name(other)}", row.place)


def tool_of(row: Row, field: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form, which may be given flat, or with the schema under a name of `_SCHEMAS`.

    Raises InvalidInput: it has no name, two schemas or one that is not an object, or it is a tool of somebody's server.
    """
    if not isinstance(tool.get("function"), dict):
        if tool.get("type") not in (None, "function", "custom"):
            raise InvalidInput(f"{field}.type must be function, not {tool['type']!r:.40}", row.place)
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidInput(f'{field}: a tool is {{"type": "function", "function": {{"name": ..., ...}}}}', row.place)
    keys = [key for key in _SCHEMAS if function.get(key) is not None]
    schema = function[keys[0]] if keys else None
    if isinstance(schema, str):
        schema = _json_of(row, f"{field}.{keys[0]}", schema, "an object")
    if len(keys) > 1 or not isinstance(schema, dict | None):
        raise InvalidInput(f"{field}: {' and '.join(keys)} must be one object, a JSON schema", row.place)
    items = (("parameters", schema) if key in keys else (key, value) for key, value in function.items())
    return tool | {"function": dict(items)}


def call_of(row: Row, field: str, call: JSON) -> dict[str, Any]:
    """A tool call with its arguments as an object. Raises InvalidInput for one without a name, or other arguments."""
    if not isinstance(call, dict):
        raise InvalidInput(f"{field} must be an object, not {type_name(call)}", row.place)
    call = call if isinstance(call.get("function"), dict) else {"type": "function", "function": call}
    function = call["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidInput(f"{field} names no function", row.place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_of(row, f"{field}.function.arguments", arguments, "an object") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        rule = f"{field}.function.arguments must be an object, or JSON text of one, not {type_name(arguments)}"
        raise InvalidInput(rule, row.place)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _calls_of(row: Row, field: str, message: Message) -> Tools:
    """Take the tool calls out of a message, or the older `function_call`."""
    calls, older = message.pop("tool_calls", None), message.pop("function_call", None)
    if calls is not None and not isinstance(calls, list):
        raise InvalidInput(f"{field}.tool_calls must be a list, not {type_name(calls)}", row.place)
    if calls and older:
        raise InvalidInput(f"{field}.function_call is the older name of tool_calls: give one", row.place)
    if older is not None:
        return [call_of(row, f"{field}.function_call", older)]
    return [call_of(row, f"{field}.tool_calls[{i}]", call) for i, call in enumerate(calls or ())]


def _joined(row: Row, field: str, parts: list[JSON], may_weigh: bool) -> str:
    """Join a content's text parts, since most templates take a text alone. `may_weigh`: they may have weights."""
    for i, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "refusal":  # learned as a text is
            parts[i] = part = {**part, "type": "text", "text": part.get("refusal")}
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
        if not is_text:
            raise InvalidInput(f"{field}[{i}] must be a text part: only text can be trained on", row.place)
        if part.get("weight") not in (None, 1) and not may_weigh:
            rule = "parts have weights in an assistant's message of a row of `messages` alone"
            raise InvalidInput(f"{field}[{i}].weight: {rule}", row.place)
    weights = [weight_of(row, f"{field}[{i}].weight", part.get("weight")) for i, part in enumerate(parts)]
    text = WeighedText.of([part["text"] for part in parts], weights)
    return str(text) if {*weights} <= {1.0} else text


def _thoughts(row: Row, field: str, thoughts: JSON) -> str:
    if not isinstance(thoughts, str | list):
        raise InvalidInput(f"{field} must be text, not {type_name(thoughts)}", row.place)
    return thoughts if isinstance(thoughts, str) else _joined(row, field, [*thoughts], False)


def _json_of(row: Row, field: str, text: str, what: str) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field} must be {what}, not text that is no JSON ({error})", row.place) from error
