"""Examples from a user's files: which format they are in, and one typed example a row, streamed.

A row is one line of JSONL, one record of Parquet, or one non-blank line of a `.txt` file. Every error names
`file:line` (Parquet: `file: row n`), the field and the rule.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from activities.formats.examples import Chat, Example, PromptCompletion, Text, TokenIds
from activities.formats.fields import list_of_objects, listed, message_of, text_of, tools_of, type_name, weight_of
from activities.formats.preferences import openai_preference, preference
from activities.formats.rows import JSON, Row, rows_of
from shared.errors import InvalidInput
from shared.runs.requests import PAIR_FORMATS, DatasetSource
from shared.storage.paths import MANIFEST

Kind = Literal[
    "chat", "prompt_completion", "alpaca", "sharegpt", "text", "tokenized", "preference", "openai_preference"
]
KindT = TypeVar("KindT", bound=str)

MASKED_LABEL = -100
_DETECTION_ROWS = 32
_SINGLES = "messages; conversations; instruction + output; prompt + completion; text; input_ids"
_PAIRS = "chosen + rejected, with or without prompt; input + preferred_output + non_preferred_output"
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class Dataset:
    """A dataset whose format is known. Iterating streams its examples, in order of file name and row."""

    folder: Path
    files: tuple[Path, ...]
    kind: Kind
    prompt_field: str
    completion_field: str

    @property
    def has_pairs(self) -> bool:
        return self.kind in PAIR_FORMATS

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
    "preference": ("prompt", "chosen", "rejected", "tools"),
    "openai_preference": ("input", "preferred_output", "non_preferred_output"),
}


def open_dataset(folder: Path, source: DatasetSource, pairs: bool | None = None) -> Dataset:
    """Find a folder's data files and their format.

    Args:
        pairs: what is looked for and taken: preference pairs alone, anything but pairs, or (None) either.

    Raises:
        InvalidInput: no file, no row, or first rows that match no format, or two, or not all the same one.
    """
    files = data_files(folder, source)
    if source.prompt_field is not None and source.format not in ("auto", "prompt_completion"):
        raise InvalidInput(
            f"prompt_field and completion_field go with format prompt_completion, not {source.format}", "prompt_field"
        )
    prompt, completion = source.prompt_field or "prompt", source.completion_field or "completion"
    if source.format != "auto":
        return Dataset(folder, files, source.format, prompt, completion)
    kind = detect(all_rows(folder, files), partial(_kind_of, source=source, pairs=pairs), source)
    return Dataset(folder, files, kind, prompt, completion)


def data_files(folder: Path, source: DatasetSource) -> tuple[Path, ...]:
    """A dataset's files, in order of name. Raises InvalidInput when there is none."""
    files = tuple(sorted(p for p in folder.rglob("*") if p.is_file() and _is_data(p, folder)))
    if not files:
        raise InvalidInput("the dataset has no files", source.uri)
    return files


def _is_data(path: Path, folder: Path) -> bool:
    return not path.name.startswith(".") and path != folder / MANIFEST


def all_rows(folder: Path, files: Iterable[Path]) -> Iterator[Row]:
    """In order of file and row, with all their columns."""
    return (row for path in files for row in rows_of(path, path.relative_to(folder).as_posix()))


def detect(rows: Iterable[Row], kind_of: Callable[[Row], KindT], source: DatasetSource) -> KindT:
    """What the first rows are, by `kind_of`. Raises InvalidInput where there is none, or they are not all the same."""
    found: tuple[KindT, str] | None = None
    for row in islice(rows, _DETECTION_ROWS):
        kind = kind_of(row)
        if found and kind != found[0]:
            raise InvalidInput(f"this row looks like {kind}, but {found[1]} looks like {found[0]}", row.place)
        found = found or (kind, row.place)
    if found is None:
        raise InvalidInput("the dataset is empty: no file holds a row", source.uri)
    return found[0]


def _kind_of(row: Row, source: DatasetSource, pairs: bool | None) -> Kind:
    fields = row.fields
    if source.prompt_field is not None:
        missing = [name for name in (source.prompt_field, source.completion_field) if name not in fields]
        if missing:
            raise InvalidInput(f"the row has no field {missing[0]!r}; it has {listed(fields)}", row.place)
        return "prompt_completion"
    signatures: dict[Kind, bool] = {
        "chat": "messages" in fields,
        "sharegpt": "conversations" in fields,
        "alpaca": "instruction" in fields and "output" in fields,
        "prompt_completion": "prompt" in fields and "completion" in fields,
        "tokenized": "input_ids" in fields,
        "text": "text" in fields,
        "preference": "chosen" in fields and "rejected" in fields,
        "openai_preference": "preferred_output" in fields and "non_preferred_output" in fields,
    }
    found = [kind for kind, matches in signatures.items() if matches]
    kinds = [kind for kind in found if pairs is None or pairs == (kind in PAIR_FORMATS)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise InvalidInput(f"the row matches {' and '.join(kinds)}: say which with format", row.place)
    if found:
        rule = f"dpo learns from pairs: {_PAIRS}" if pairs else "pairs are what dpo learns from"
        raise InvalidInput(f"the row looks like {' and '.join(found)}; {rule}", row.place)
    single = f"{_SINGLES} (or name prompt_field and completion_field)"
    known = {True: _PAIRS, False: single, None: f"{single}; {_PAIRS}"}[pairs]
    raise InvalidInput(f"the row matches no format: it has the fields {listed(fields)}; known are {known}", row.place)


# One parser a format: a row in, an example out.


def _chat(row: Row, _: Dataset) -> Chat:
    turns = list_of_objects(row, "messages")
    messages = [message_of(row, f"messages[{i}]", turn) for i, turn in enumerate(turns)]
    return _conversation(row, "messages", messages, [_turn_weight(row, i, turn) for i, turn in enumerate(turns)])


def _turn_weight(row: Row, i: int, turn: dict[str, JSON]) -> float:
    """A message's loss weight: 1 for an assistant's unless it says otherwise, 0 for all others."""
    weight = weight_of(row, f"messages[{i}].weight", turn.get("weight"))
    return weight if turn.get("role") == "assistant" else 0.0


def _row_weight(row: Row) -> float:
    """The loss weight of a whole example: 1 unless its row has a `weight`."""
    return weight_of(row, "weight", row.fields.get("weight"))


def _sharegpt(row: Row, _: Dataset) -> Chat:
    messages = sharegpt_messages(row)
    weights = [1.0 if message["role"] == "assistant" else 0.0 for message in messages]
    return _conversation(row, "conversations", messages, weights)


def sharegpt_messages(row: Row) -> list[dict[str, Any]]:
    """`conversations` as messages. Raises InvalidInput for a turn that is none."""
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(list_of_objects(row, "conversations")):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise InvalidInput(f"conversations[{i}].from must be one of {known}, not {speaker!r:.40}", row.place)
        if not isinstance(value, str):
            raise InvalidInput(f"conversations[{i}].value must be text, not {type_name(value)}", row.place)
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": value})
    return messages


def _conversation(row: Row, field: str, messages: list[dict[str, Any]], weights: list[float]) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidInput(f"{field} has no assistant turn, so there is nothing to learn", row.place)
    scale = _row_weight(row)
    return Chat(row.place, messages, tools_of(row), [weight * scale for weight in weights])


def _prompt_completion(row: Row, dataset: Dataset) -> PromptCompletion:
    prompt, completion = text_of(row, dataset.prompt_field), text_of(row, dataset.completion_field)
    return PromptCompletion(row.place, prompt, completion, _row_weight(row))


def _alpaca(row: Row, _: Dataset) -> PromptCompletion:
    return PromptCompletion(row.place, alpaca_prompt(row), text_of(row, "output"), _row_weight(row))


def alpaca_prompt(row: Row) -> str:
    """The instruction, and what it is about. Raises InvalidInput when either is no text."""
    instruction = text_of(row, "instruction")
    context = text_of(row, "input") if row.fields.get("input") is not None else ""
    return f"{instruction}\n\n{context}" if context else instruction


def _plain(row: Row, _: Dataset) -> Text:
    return Text(row.place, text_of(row, "text"), _row_weight(row))


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


_parsers: dict[Kind, Callable[[Row, Dataset], Example]] = {
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "text": _plain,
    "tokenized": _tokenized,
    "preference": lambda row, _: preference(row),
    "openai_preference": lambda row, _: openai_preference(row),
}
