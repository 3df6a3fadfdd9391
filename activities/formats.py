"""Examples from a user's files: which format they are in, and one typed example a row, streamed.

A row is one line of JSONL, one record of Parquet, or one non-blank line of a `.txt` file. Every error names
`file:line` (Parquet: `file: row n`), the field and the rule.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from activities.rows import JSON, Row, rows_of, without_nulls
from shared.errors import InvalidInput
from shared.paths import MANIFEST
from shared.runs import DatasetSource

Kind = Literal["chat", "prompt_completion", "alpaca", "sharegpt", "text", "tokenized"]

MASKED_LABEL = -100
_DETECTION_ROWS = 32
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


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
    """A text of which every token is learned."""

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


Example = Chat | PromptCompletion | Text | TokenIds


@dataclass(frozen=True)
class Dataset:
    """A dataset whose format is known. Iterating streams its examples, in order of file name and row."""

    folder: Path
    files: tuple[Path, ...]
    kind: Kind
    prompt_field: str
    completion_field: str

    def __iter__(self) -> Iterator[Example]:
        parse = _parsers[self.kind]
        for path in self.files:
            for row in rows_of(path, self._name(path), self._columns()):
                yield parse(row, self)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _columns(self) -> tuple[str, ...]:
        match self.kind:
            case "prompt_completion":
                return (self.prompt_field, self.completion_field, "weight")
            case kind:
                return (*_COLUMNS[kind], "weight")


_COLUMNS: dict[str, tuple[str, ...]] = {
    "chat": ("messages", "tools"),
    "alpaca": ("instruction", "input", "output"),
    "sharegpt": ("conversations", "tools"),
    "text": ("text",),
    "tokenized": ("input_ids", "labels"),
}


def open_dataset(folder: Path, source: DatasetSource) -> Dataset:
    """Find a folder's data files and their format.

    Raises:
        InvalidInput: no file, no row, or first rows that match no format, or two, or not all the same one.
    """
    files = tuple(sorted(p for p in folder.rglob("*") if p.is_file() and _is_data(p, folder)))
    if not files:
        raise InvalidInput("the dataset has no files", source.uri)
    if source.prompt_field is not None and source.format not in ("auto", "prompt_completion"):
        raise InvalidInput(
            f"prompt_field and completion_field go with format prompt_completion, not {source.format}", "prompt_field"
        )
    prompt, completion = source.prompt_field or "prompt", source.completion_field or "completion"
    kind = _detect(files, folder, source) if source.format == "auto" else source.format
    return Dataset(folder, files, kind, prompt, completion)


def _is_data(path: Path, folder: Path) -> bool:
    return not path.name.startswith(".") and path != folder / MANIFEST


def _detect(files: tuple[Path, ...], folder: Path, source: DatasetSource) -> Kind:
    found: tuple[Kind, str] | None = None
    rows = (row for path in files for row in rows_of(path, path.relative_to(folder).as_posix()))
    for row in islice(rows, _DETECTION_ROWS):
        kind = _kind_of(row, source)
        if found and kind != found[0]:
            raise InvalidInput(f"this row looks like {kind}, but {found[1]} looks like {found[0]}", row.place)
        found = found or (kind, row.place)
    if found is None:
        raise InvalidInput("the dataset is empty: no file holds a row", source.uri)
    return found[0]


def _kind_of(row: Row, source: DatasetSource) -> Kind:
    fields = row.fields
    if source.prompt_field is not None:
        missing = [name for name in (source.prompt_field, source.completion_field) if name not in fields]
        if missing:
            raise InvalidInput(f"the row has no field {missing[0]!r}; it has {_listed(fields)}", row.place)
        return "prompt_completion"
    signatures: dict[Kind, bool] = {
        "chat": "messages" in fields,
        "sharegpt": "conversations" in fields,
        "alpaca": "instruction" in fields and "output" in fields,
        "prompt_completion": "prompt" in fields and "completion" in fields,
        "tokenized": "input_ids" in fields,
        "text": "text" in fields,
    }
    kinds = [kind for kind, matches in signatures.items() if matches]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise InvalidInput(f"the row matches {' and '.join(kinds)}: say which with format", row.place)
    raise InvalidInput(
        f"the row matches no format: it has the fields {_listed(fields)}; known are messages; conversations; "
        "instruction + output; prompt + completion; text; input_ids (or name prompt_field and completion_field)",
        row.place,
    )


def _listed(fields: Iterable[str]) -> str:
    names = [repr(name[:40]) for name in fields]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


# One parser a format: a row in, an example out.


def _chat(row: Row, _: Dataset) -> Chat:
    turns = _list_of_objects(row, "messages")
    messages = [_message(row, f"messages[{i}]", turn) for i, turn in enumerate(turns)]
    return _conversation(row, "messages", messages, [_turn_weight(row, i, turn) for i, turn in enumerate(turns)])


def _message(row: Row, field: str, turn: dict[str, JSON]) -> dict[str, Any]:
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
            raise InvalidInput(f"{field}.content must be text, not {_type(other)}", row.place)
    if "tool_calls" in message and not isinstance(message["tool_calls"], list):
        raise InvalidInput(f"{field}.tool_calls must be a list, not {_type(message['tool_calls'])}", row.place)
    return message


def _check_parts(row: Row, field: str, parts: list[JSON]) -> None:
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidInput(f"{field}[{i}] must be a text part: only text can be trained on", row.place)


def _turn_weight(row: Row, i: int, turn: dict[str, JSON]) -> float:
    """A message's loss weight: 1 for an assistant's unless it says otherwise, 0 for all others."""
    weight = _weight(row, f"messages[{i}].weight", turn.get("weight"))
    return weight if turn.get("role") == "assistant" else 0.0


def _weight(row: Row, field: str, weight: JSON) -> float:
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise InvalidInput(f"{field} must be a number of at least 0, not {weight!r:.40}", row.place)
    return float(weight)


def _row_weight(row: Row) -> float:
    """The loss weight of a whole example: 1 unless its row has a `weight`."""
    return _weight(row, "weight", row.fields.get("weight"))


def _sharegpt(row: Row, _: Dataset) -> Chat:
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(_list_of_objects(row, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise InvalidInput(f"conversations[{i}].from must be one of {known}, not {speaker!r:.40}", row.place)
        if not isinstance(value, str):
            raise InvalidInput(f"conversations[{i}].value must be text, not {_type(value)}", row.place)
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": value})
    weights = [1.0 if message["role"] == "assistant" else 0.0 for message in messages]
    return _conversation(row, "conversations", messages, weights)


def _conversation(row: Row, field: str, messages: list[dict[str, Any]], weights: list[float]) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput(f"{field} has no assistant turn, so there is nothing to learn", row.place)
    scale = _row_weight(row)
    return Chat(row.place, messages, _tools(row), [weight * scale for weight in weights])


def _tools(row: Row) -> list[dict[str, Any]] | None:
    match row.fields.get("tools"):
        case None | []:
            return None
        case list() as tools if all(isinstance(tool, dict) for tool in tools):
            return tools
        case other:
            raise InvalidInput(f"tools must be a list of objects, not {_type(other)}", row.place)


def _list_of_objects(row: Row, field: str) -> list[dict[str, Any]]:
    turns = row.fields.get(field)
    if not isinstance(turns, list):
        raise InvalidInput(f"{field} must be a list, not {_type(turns)}", row.place)
    if not turns:
        raise InvalidInput(f"{field} is empty", row.place)
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise InvalidInput(f"{field}[{i}] must be an object, not {_type(turn)}", row.place)
    return without_nulls(turns) if row.has_schema else turns


def _prompt_completion(row: Row, dataset: Dataset) -> PromptCompletion:
    prompt, completion = _text(row, dataset.prompt_field), _text(row, dataset.completion_field)
    return PromptCompletion(row.place, prompt, completion, _row_weight(row))


def _alpaca(row: Row, _: Dataset) -> PromptCompletion:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input") if row.fields.get("input") is not None else ""
    prompt = f"{instruction}\n\n{context}" if context else instruction
    return PromptCompletion(row.place, prompt, output, _row_weight(row))


def _plain(row: Row, _: Dataset) -> Text:
    return Text(row.place, _text(row, "text"), _row_weight(row))


def _text(row: Row, field: str) -> str:
    if field not in row.fields:
        raise InvalidInput(f"the row has no field {field!r}; it has {_listed(row.fields)}", row.place)
    value = row.fields[field]
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be text, not {_type(value)}", row.place)
    return value


def _tokenized(row: Row, _: Dataset) -> TokenIds:
    input_ids = _int_array(row, "input_ids")
    labels = input_ids if row.fields.get("labels") is None else _int_array(row, "labels")
    if len(labels) != len(input_ids):
        raise InvalidInput(f"labels has {len(labels)} entries, input_ids {len(input_ids)}", row.place)
    return TokenIds(row.place, input_ids, labels, _row_weight(row))


def _int_array(row: Row, field: str) -> NDArray[np.int64]:
    values = row.fields.get(field)
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, list) and all(type(v) is int and abs(v) < 2**62 for v in values):
        array = np.array(values, dtype=np.int64)
    else:
        raise InvalidInput(f"{field} must be a list of whole numbers", row.place)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(f"{field} must be a list of whole numbers", row.place)
    return array.astype(np.int64)


def _type(value: object) -> str:
    """A JSON value's type, in words."""
    names = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), re.sub(r"\W", " ", type(value).__name__))


_parsers: dict[Kind, Callable[[Row, Dataset], Example]] = {
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "text": _plain,
    "tokenized": _tokenized,
}
