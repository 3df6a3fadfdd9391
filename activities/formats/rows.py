"""Rows of JSONL, text and Parquet files, streamed, and their fields as texts, messages, tools and weights.

Memory does not grow with the file. Every error names the place, the field and the rule.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

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
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and _is_deep(value):
        raise InvalidInput(f"the JSON is nested deeper than {MAX_DEPTH} levels", place)
    if b"\\ud" in line or b"\\uD" in line:
        _refuse_half_characters(value, place)
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


def _is_deep(value: JSON) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: JSON) -> list[JSON]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _refuse_half_characters(value: JSON, place: str) -> None:
    """Raise InvalidInput for a text with half of a surrogate pair: JSON can escape one, but UTF-8 cannot hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("a text holds half of a surrogate pair (\\ud800 to \\udfff)", place) from error


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
