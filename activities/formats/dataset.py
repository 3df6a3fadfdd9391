"""A dataset's files as a stream of examples or of questions, in the format that they are in.

A row is one line of JSONL, one record of Parquet, or one non-blank line of a `.txt` file. Every error names
`file:line` (Parquet: `file: row n`), the field and the rule.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from activities.formats.rows import (
    Chat,
    Example,
    PromptCompletion,
    Question,
    Row,
    is_given,
    listed,
    refuse_missing,
    rows_of,
)
from activities.formats.specs import (
    FORMATS,
    GUARDED,
    LABELLED,
    TEACHER,
    FormatSpec,
    Numbers,
    Unread,
    number_of_teacher,
    prompt_completion,
    read_numbers,
    refuse_unread,
    with_label,
)
from longshore.dataset_runs import DatasetSource
from shared.errors import InvalidInput
from shared.storage.paths import LEFT, MANIFEST

_DETECTION_ROWS = 32
_REFUSED = frozenset(GUARDED) - {"label"}
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Dataset(Generic[ItemT]):
    """A dataset whose format is known. Iterating streams its items, in order of file name and row.

    `columns`: those of a Parquet file to read; all if None. `unread`: what was found and not read. `numbers`: those of
    the parsed rows, until the caller takes them.
    """

    folder: Path
    files: tuple[Path, ...]
    format: FormatSpec
    parse: Callable[[Row], ItemT]
    columns: tuple[str, ...] | None
    unread: Unread = field(default_factory=Unread)
    numbers: Numbers = field(default_factory=dict)

    def __iter__(self) -> Iterator[ItemT]:
        return map(self.parse, _rows(self.folder, self.files, self.columns))


def open_dataset(
    folder: Path,
    source: DatasetSource,
    pairs: bool | None = None,
    labels: bool = False,
    fields: tuple[str, ...] = (),
    teachers: tuple[str, ...] = (),
) -> Dataset[Example]:
    """Find a folder's data files and their format.

    Args:
        pairs: accept only preference pairs (True), anything except pairs (False), or both (None).
        labels: accept answers with a label, or pairs (specs.py).
        fields: the fields with numbers that a reward model learns (scores.py).
        teachers: names that the field `teacher` may have (scores.py).

    Raises:
        InvalidInput: no file, no row, or first rows that match no format, two, or different ones; or
            `assistant_pattern` is not a regular expression.
    """
    files = _data_files(folder, source)
    if source.prompt_field is not None and source.format not in ("auto", "prompt_completion"):
        raise InvalidInput(
            f"prompt_field and completion_field go with format prompt_completion, not {source.format}", "prompt_field"
        )
    spec = _spec_of(source)
    if source.format == "auto":
        is_named = source.prompt_field is not None
        tell = partial(_as_named, spec) if is_named else partial(_format_of, pairs=pairs, labels=labels)
        spec = _detect(_rows(folder, files), tell, source)
    unread = Unread.beside(folder)
    example = spec.example if source.assistant_turns == "all" else partial(_last_answer, spec)
    if source.assistant_pattern is not None:
        try:
            example = partial(_matching, example, re.compile(source.assistant_pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidInput(f"it is no regular expression: {error}", "assistant_pattern") from error
    numbers: Numbers = {}
    more = (TEACHER,) if teachers else fields

    def parse(row: Row) -> Example:
        """Parse a row. Notes unread columns; refuses unread columns that select what is trained."""
        bare = replace(row, fields=row.fields | {"label": None}) if labels else row
        refuse_unread(bare, spec.read, spec.name)
        unread.columns.update(row.fields.keys() - spec.read - _REFUSED - {*more}, row.others)
        if isinstance(bare.fields.get("label"), str | int | float | list) and row.fields["label"] != 1:
            unread.columns.add("label")  # of another kind than KTO's
        unread.note_keys(row, (*spec.fields, *spec.more))
        made = example(row)
        unread.note_empty(made)
        if teachers:
            numbers[row.place] = (number_of_teacher(row, teachers),)
        elif fields:
            return read_numbers(made, row, fields, numbers)
        return with_label(made, row) if labels else made

    return Dataset(folder, files, spec, parse, spec.columns and (*spec.columns, *more), unread, numbers)


def open_prompts(folder: Path, source: DatasetSource) -> Dataset[Question]:
    """Find a folder's data files, and detect by their first rows how prompts are read from them.

    Raises InvalidInput: no file, no row, first rows that ask nothing, in two ways, or not all in the same.
    """
    files = _data_files(folder, source)
    spec = _spec_of(source)
    if source.format == "auto" and source.prompt_field is None:
        spec = _detect(_rows(folder, files), _format_of_question, source)
    if spec.question is None or (source.prompt_field is not None and spec.name != "prompt_completion"):
        rule = "ask nothing" if spec.question is None else "have no prompt_field"
        raise InvalidInput(f"rows of the format {spec.name} {rule}", "format")
    question, unread = spec.question, Unread.beside(folder)

    def parse(row: Row) -> Question:
        unread.note_keys(row, (*spec.fields, *spec.more))
        return question(row)

    return Dataset(folder, files, spec, parse, None, unread)


def question_of(source: DatasetSource) -> Callable[[Row], Question]:
    """Return how prompts are read from rows of the format that a source names, as `open_prompts` has found it."""
    question = _spec_of(source).question
    assert question is not None
    return question


def _spec_of(source: DatasetSource) -> FormatSpec:
    """Return the format that a source names; else that of prompts and completions in the fields that it names."""
    if source.format in ("auto", "prompt_completion"):
        return prompt_completion(source.prompt_field or "prompt", source.completion_field or "completion")
    return next(spec for spec in FORMATS if spec.name == source.format)


def _data_files(folder: Path, source: DatasetSource) -> tuple[Path, ...]:
    """A dataset's files, in order of name. Raises InvalidInput when there is none."""
    files = tuple(
        sorted(p for p in folder.rglob("[!.]*") if p.is_file() and p not in (folder / MANIFEST, folder / LEFT))
    )
    if not files:
        raise InvalidInput("the dataset has no files", source.uri)
    return files


def _rows(folder: Path, files: Iterable[Path], columns: tuple[str, ...] | None = None) -> Iterator[Row]:
    """Read the rows of all files, in order of file and row."""
    return (row for path in files for row in rows_of(path, path.relative_to(folder).as_posix(), columns))


def _detect(rows: Iterable[Row], tell: Callable[[Row], FormatSpec], source: DatasetSource) -> FormatSpec:
    """The format of the first rows, by `tell`. Raises InvalidInput if there is none, or they differ."""
    found: tuple[FormatSpec, str] | None = None
    for row in islice(rows, _DETECTION_ROWS):
        spec = tell(row)
        if found and spec is not found[0]:
            raise InvalidInput(f"this row looks like {spec.name}, but {found[1]} looks like {found[0].name}", row.place)
        found = found or (spec, row.place)
    if found is None:
        raise InvalidInput("the dataset is empty: no file holds a row", source.uri)
    return found[0]


def _last_answer(spec: FormatSpec, row: Row) -> Example:
    """Return a row's example with only its last answer trained. Raises InvalidInput unless the row ends with one."""
    example = spec.example(row)
    match example:
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"assistant_turns is last, and the last message is the {messages[-1]['role']}'s"
                raise InvalidInput(rule, row.place)
            return replace(example, weights=[0.0] * (len(weights) - 1) + weights[-1:])
        case PromptCompletion():
            return example
    raise InvalidInput(f"assistant_turns is of conversations: rows of the format {spec.name} are none", "format")


def _matching(example: Callable[[Row], Example], pattern: re.Pattern[str], row: Row) -> Example:
    """Return a row's example without training answers that do not match the pattern."""
    match found := example(row):
        case Chat(messages=messages, weights=weights):
            matches = [pattern.search(message.get("content") or "") is not None for message in messages]
            return replace(found, weights=[w * is_match for w, is_match in zip(weights, matches, strict=True)])
        case PromptCompletion():
            return found if pattern.search(found.completion) else replace(found, weight=0.0)
    raise InvalidInput("assistant_pattern needs conversations, and this row is not one", row.place)


def _as_named(spec: FormatSpec, row: Row) -> FormatSpec:
    for name in spec.fields:
        refuse_missing(row, name)
    return spec


def _format_of(row: Row, pairs: bool | None, labels: bool = False) -> FormatSpec:
    pairs = not is_given(row, "label") if labels else pairs
    found = [spec for spec in FORMATS if all(field in row.fields for field in spec.fields)]
    specs = [spec for spec in found if pairs in (None, spec.has_pairs)]
    if specs:
        return _only(specs, row)
    if found:
        learned = f"kto learns from {LABELLED}, or from pairs" if labels else "dpo learns from pairs, as reward does"
        from_pairs = f"{learned}: {_known(True)}"
        if pairs and not labels and is_given(row, "label"):
            from_pairs += f"; {LABELLED}, are what the objective kto learns from"
        rule = from_pairs if pairs else "pairs are what dpo learns from, and a reward model"
        raise InvalidInput(f"the row looks like {_names(found)}; {rule}", row.place)
    single = f"{_known(False)} (or name prompt_field and completion_field)"
    known = {True: _known(True), False: single, None: f"{single}; {_known(True)}"}[pairs]
    raise InvalidInput(
        f"the row matches no format: it has the fields {listed(row.fields)}; known are {known}", row.place
    )


def _format_of_question(row: Row) -> FormatSpec:
    """Recognise a row's format by its first field alone, the one with the prompt; other fields are for graders."""
    asking = [spec for spec in FORMATS if spec.question is not None]
    if specs := [spec for spec in asking if spec.fields[0] in row.fields]:
        return _only(specs, row)
    known = ", ".join(spec.fields[0] for spec in asking)
    raise InvalidInput(
        f"the row asks nothing: it has the fields {listed(row.fields)}; known are {known} (or name prompt_field)",
        row.place,
    )


def _only(specs: list[FormatSpec], row: Row) -> FormatSpec:
    if len(specs) > 1:
        raise InvalidInput(f"the row matches {_names(specs)}: say which with format", row.place)
    return specs[0]


def _names(specs: list[FormatSpec]) -> str:
    return " and ".join(spec.name for spec in specs)


def _known(pairs: bool) -> str:
    return "; ".join(str(spec) for spec in FORMATS if spec.has_pairs == pairs)
