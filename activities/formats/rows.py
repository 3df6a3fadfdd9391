"""Rows of JSONL, text and Parquet files, streamed, and their fields as texts, messages, tools and weights.

Memory does not grow with the file. Every error names the place, the field and the rule.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from activities.formats import THOUGHTS
from activities.sandbox.child import sign
from shared.errors import InvalidInput

JSON = Any  # what json.loads gives: dict, list, str, int, float, bool or None

MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 100
_LONG_LINE_BYTES = 256 << 10
_PARQUET_ROWS = 256
_MAX_PARQUET_BATCH_BYTES = 512 << 20  # of _PARQUET_ROWS rows
_MAX_COLUMNS = 1000
_UTF8_BOM = b"\xef\xbb\xbf"
_ARROW = (b"PAR1", b"ARROW1", b"\xff" * 4)  # Parquet, an IPC file, an IPC stream
_OTHER_KINDS = {  # by their first bytes
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "an archive": rb"PK\x03\x04|7z\xbc\xaf|Rar!",
    "JSON over several lines": rb"(\xef\xbb\xbf)?\s*[\[{]\s*[\r\n]",
    "a database": rb"SQLite format|\x89HDF",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row's fields, and its place for errors. `has_schema`: it is from Parquet, where absent fields become nulls.

    `others`: columns of a Parquet file that are not among the fields.
    """

    place: str
    fields: dict[str, JSON]
    has_schema: bool = False
    others: tuple[str, ...] = ()


def rows_of(path: Path, name: str, columns: tuple[str, ...] | None = None) -> Iterator[Row]:
    """A file's rows. `columns`: those of a Parquet or Arrow file to read; all if None.

    Raises InvalidInput: not UTF-8, not JSON, not an object a line, too long a line, too deeply nested, damaged Parquet,
    a file of another kind.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(_ARROW):
        return _arrow_rows(path, name, columns, head)
    kinds = (kind for kind, begins in _OTHER_KINDS.items() if re.match(begins, head))
    if kind := next(kinds, "CSV" if path.suffix.lower() in (".csv", ".tsv") else None):
        raise InvalidInput(f"the file is {kind}: make it JSON lines (an object a line, in UTF-8) or Parquet", name)
    if path.suffix == ".txt":
        return (Row(place, {"text": _decoded(line, place).rstrip("\r\n")}) for place, line in lines_of(path, name))
    return (Row(place, _parsed(line, place)) for place, line in lines_of(path, name))


def lines_of(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """The place and bytes of every line that is not blank; line numbers count from 1 and count blank lines."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{name}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInput(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", place)
            if len(line) > _LONG_LINE_BYTES:  # the parsed objects may be thirty times as large
                sign(place)
            if number == 1:
                line = line.removeprefix(_UTF8_BOM)
            if line and not line.isspace():
                yield place, line


def _parsed(line: bytes, place: str) -> dict[str, JSON]:
    text = _decoded(line, place)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"invalid JSON: {error.msg} at column {error.colno}", place) from error
    except RecursionError as error:
        raise InvalidInput(f"the JSON is nested deeper than {MAX_DEPTH} levels", place) from error
    except ValueError as error:
        raise InvalidInput(f"invalid JSON: {error}", place) from error
    if not isinstance(value, dict):
        hint = ", not an array of them" if text.lstrip().startswith("[") else ""
        raise InvalidInput(f"a line holds one JSON object{hint}", place)
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and is_deep(value):
        raise InvalidInput(f"the JSON is nested deeper than {MAX_DEPTH} levels", place)
    if b"\\ud" in line or b"\\uD" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()  # JSON can escape one, but UTF-8 cannot hold it
        except UnicodeEncodeError as error:
            raise InvalidInput("a text holds half of a surrogate pair (\\ud800 to \\udfff)", place) from error
    return value


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"byte {error.start + 1} of the line is not UTF-8", place) from error


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(n for n in names if names.count(n) > 1)!r:.60} twice")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_deep(value: JSON) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = (child for item in level for child in (item.values() if isinstance(item, dict) else item))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _arrow_rows(path: Path, name: str, columns: tuple[str, ...] | None, head: bytes) -> Iterator[Row]:
    """Yield the rows of a Parquet file, or of Arrow's IPC: a file, or a stream as `save_to_disk` writes."""
    import pyarrow
    from pyarrow import ipc, parquet

    number, kind = 0, "Parquet" if head.startswith(b"PAR1") else "Arrow"
    try:
        with ExitStack() as stack:
            if kind == "Parquet":
                file = stack.enter_context(parquet.ParquetFile(path))
                present = file.schema_arrow.names
            else:
                opened = ipc.open_file if head.startswith(b"ARROW1") else ipc.open_stream
                file = stack.enter_context(opened(stack.enter_context(pyarrow.memory_map(str(path)))))
                present = file.schema.names
            if len(present) > _MAX_COLUMNS:
                raise InvalidInput(f"{len(present):,} columns; a file may have up to {_MAX_COLUMNS:,}", name)
            wanted = present if columns is None else [column for column in columns if column in present]
            others = tuple(column for column in present if column not in wanted)
            sign(name)
            for batch in _batches(file, wanted):
                if batch.nbytes > _MAX_PARQUET_BATCH_BYTES:
                    rule = (
                        f"the {batch.num_rows} rows after row {number} have {batch.nbytes:,} bytes; they may have up to"
                    )
                    raise InvalidInput(f"{rule} {_MAX_PARQUET_BATCH_BYTES:,}", name)
                sign(f"{name}: row {number + 1}")
                for fields in _records(batch):
                    number += 1
                    yield Row(f"{name}: row {number}", fields, True, others)
    except pyarrow.ArrowException as error:
        raise InvalidInput(f"the {kind} file cannot be read after row {number}: {error}", name) from error
    except OSError as error:  # how pyarrow reports truncated and corrupted pages
        raise InvalidInput(f"the {kind} file cannot be read after row {number}: {error}", name) from error


def _batches(file: Any, columns: list[str]) -> Iterator[Any]:
    """Yield the batches of few rows of an open file. What Arrow itself would not have written is an ArrowException."""
    if hasattr(file, "iter_batches"):
        yield from file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)
        return
    for batch in file if hasattr(file, "read_next_batch") else map(file.get_batch, range(file.num_record_batches)):
        batch.validate(full=True)
        rows = batch.select(columns)
        yield from (rows.slice(first, _PARQUET_ROWS) for first in range(0, rows.num_rows, _PARQUET_ROWS))


def _records(batch: Any) -> Iterator[dict[str, JSON]]:
    """Yield the rows of a record batch. Lists of integers stay numpy arrays; all else becomes Python values."""
    columns = [_column_values(column) for column in batch.columns]
    names = batch.schema.names
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))
    if not columns:
        yield from ({} for _ in range(batch.num_rows))


def _column_values(column: Any) -> list[Any]:
    import pyarrow.types as types

    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    if is_list and types.is_integer(column.type.value_type) and not column.null_count:
        offsets = column.offsets.to_numpy()
        values = column.values
        if not values.null_count:
            flat = values.to_numpy()
            return [flat[a:b] for a, b in pairwise(offsets)]
    return column.to_pylist()


def without_nulls(value: JSON) -> JSON:
    """A copy without the null fields that a Parquet schema adds to every record."""
    match value:
        case dict():
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [without_nulls(item) for item in value]
        case _:
            return value


def listed(fields: Iterable[str]) -> str:
    """Join names for an error message: at most 12 of them, at most 40 characters of each."""
    names = [repr(name[:40]) for name in fields]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


def type_name(value: object) -> str:
    """A JSON value's type, in words."""
    names = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), re.sub(r"\W", " ", type(value).__name__))


def is_given(row: Row, column: str) -> bool:
    """True if a row has something in a column: neither null nor empty."""
    value = row.fields.get(column)
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def refuse_missing(row: Row, field: str) -> None:
    """Raises InvalidInput when the row has no such field."""
    if field not in row.fields:
        raise InvalidInput(f"the row has no field {field!r}; it has {listed(row.fields)}", row.place)


def text_of(row: Row, field: str) -> str:
    """Return a field's text. Raises InvalidInput when the row has no such field, or it is not text."""
    refuse_missing(row, field)
    value = row.fields[field]
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be text, not {type_name(value)}", row.place)
    return value


def list_of_objects(row: Row, field: str) -> list[dict[str, Any]]:
    """A field's objects, without what a schema added. Raises InvalidInput if there is none, or one is no object."""
    turns = row.fields.get(field)
    if not isinstance(turns, list):
        raise InvalidInput(f"{field} must be a list, not {type_name(turns)}", row.place)
    if not turns:
        raise InvalidInput(f"{field} is empty", row.place)
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise InvalidInput(f"{field}[{i}] must be an object, not {type_name(turn)}", row.place)
    return without_nulls(turns) if row.has_schema else turns


def weight_of(row: Row, field: str, weight: JSON) -> float:
    """A loss weight; 1 by default. Raises InvalidInput unless it is a number of at least 0."""
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise InvalidInput(f"{field} must be a number of at least 0, not {weight!r:.40}", row.place)
    return float(weight)


# --- Messages and tools in one form, whatever dialect a row, a trajectory or a chat has them in ---
#
# A content is one text; the arguments of a tool call are an object; a tool is `{"type": "function", "function": ...}`.
# Every door normalises by these functions, so that the same messages become the same tokens.

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
