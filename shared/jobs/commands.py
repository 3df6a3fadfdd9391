"""Commands as the store has them: those that a client sends (longshore/commands.py), and what the service puts beside
or in place of them.

Each command and each result is a file beside the session's job. A command's file is JSON. That of a `forward` or
`forward_backward` has its data behind that as packed arrays (packed.py), a unit for each datum, with everything that
was sent: also what has a weight of 0. Repeating a command from the same state has a result that is equal to the bit, on
any worker.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from longshore.commands import CommandResult as CommandResult
from longshore.commands import (
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardOptions,
    ForwardOptions,
    LoadState,
    OptimStep,
    SaveState,
)
from shared.contract import Artifact, Frozen
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_error
from shared.jobs.packed import OFFSETS, TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsHeader, as_stored

_END = b"\0"
"""Ends the JSON, which is padded so that the arrays behind it begin at a multiple of eight bytes."""
_OFFSETS = ("token_offsets", "target_offsets")
_ABSENT = {"weight": 1.0, "advantage": 0.0, "old_logprob": np.nan, "ref_logprob": 0.0}


class LoadStored(LoadState):
    """A `load_state` as the service stores it: with the checkpoint that its name stood for when it was accepted."""

    checkpoint: Artifact


class Skip(Frozen):
    """Replaces a command that a new worker must not repeat, as it changes no state or its error might not come again.

    Its result is stored. `drops`: it has dropped the gradients accumulated so far.
    """

    kind: Literal["skip"] = "skip"
    drops: bool = False


class Gap(Frozen):
    """Replaces a command that never arrived. Its number and the following ones up to `through` are dropped."""

    kind: Literal["gap"] = "gap"
    through: int
    message: str


class DataHeader(UnitsHeader):
    """Says which arrays of data stand behind a command's JSON."""

    columns: tuple[
        Literal["token_id", "hidden_index", "label", "weight", "advantage", "old_logprob", "ref_logprob"], ...
    ]


class StoredForward(ForwardOptions):
    data: DataHeader

    @model_validator(mode="after")
    def _answer_is_bounded(self) -> Self:
        self.check_answer(self.data.num_targets)
        return self


class StoredForwardBackward(ForwardBackwardOptions):
    data: DataHeader


class CommandHead(Frozen):
    """The fields of a stored command that a host reads to pass it on to a worker; all others are ignored."""

    model_config = ConfigDict(extra="ignore")

    kind: str
    publish: bool = False
    through: int = 0
    checkpoint: Artifact | None = None

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Read a command's file. Raises ValidationError."""
        return cls.model_validate_json(data[: _end_of_json(data)])


_Plain = OptimStep | SaveState | LoadStored | Skip | Gap
Command = Annotated[Forward | ForwardBackward | _Plain, Field(discriminator="kind")]
"""With its data in JSON: as a client sends it, and as the store has it of sessions that the release before began."""
command: TypeAdapter[Command] = TypeAdapter(Command)
StoredCommand = Annotated[StoredForward | StoredForwardBackward | _Plain, Field(discriminator="kind")]
_stored: TypeAdapter[StoredCommand] = TypeAdapter(StoredCommand)


def stored_form(asked: Command | LoadState) -> bytes:
    """Return a command's file."""
    match asked:
        case Forward():
            return with_data(StoredForward, dict(asked), [_unit(datum) for datum in asked.data])
        case ForwardBackward():
            return with_data(StoredForwardBackward, dict(asked), [_unit(datum) for datum in asked.data])
        case _:
            return asked.model_dump_json().encode()


def with_data(
    kind: type[StoredForward | StoredForwardBackward],
    options: Mapping[str, object],
    data: Sequence[Mapping[str, NDArray]],
) -> bytes:
    """Return the file of a command with these options, and for each datum its columns, as `joined` takes them."""
    arrays = joined(data)
    num_tokens, num_targets = (int(arrays[name][-1]) for name in _OFFSETS)
    counts = {"num_units": len(data), "num_tokens": num_tokens, "num_targets": num_targets}
    header = {**counts, "columns": tuple(name for name in arrays if name not in _OFFSETS)}
    text = kind.model_validate({**options, "data": header}).model_dump_json().encode()
    return b"".join([text, b" " * (-(len(text) + 1) % 8), _END, *(each.tobytes() for each in arrays.values())])


def joined(units: Sequence[Mapping[str, NDArray]]) -> dict[str, NDArray]:
    """Join the columns of units, behind the offsets of their tokens and targets.

    Each unit has a `token_id`. What else one has and another lacks gets its default there.
    """
    labels = [unit.get("label", unit["token_id"][1:]) for unit in units]
    sizes = [len(unit["token_id"]) for unit in units], [len(label) for label in labels]
    arrays = {name: np.cumsum([0, *each]) for name, each in zip(_OFFSETS, sizes, strict=True)}

    def column(name: str, unit: Mapping[str, NDArray], num_targets: int) -> NDArray:
        if name in unit:
            return unit[name]
        ids = unit["token_id"]
        return (
            np.full(num_targets, _ABSENT[name]) if name in _ABSENT else _following(ids, np.array([0, len(ids)]))[name]
        )

    for name, dtype in (TOKEN_COLUMNS | TARGET_COLUMNS).items():
        if any(name in unit for unit in units):
            parts = (column(name, *each) for each in zip(units, sizes[1], strict=True))
            arrays[name] = np.concatenate([as_stored(each, dtype) for each in parts])
    return arrays


def units_of(arrays: Mapping[str, NDArray]) -> Units:
    """Make units of what `joined` returns. Without a `label`, targets are the tokens but the first. A weight is 1.

    Raises CorruptArtifact.
    """
    token_offsets, target_offsets = (arrays[name] for name in _OFFSETS)
    columns = {name: each for name, each in arrays.items() if name not in _OFFSETS}
    if "label" not in columns:
        columns |= _following(columns["token_id"], token_offsets)
    columns.setdefault("weight", np.ones(len(columns["label"]), dtype=np.float32))
    return Units.of_arrays(columns, token_offsets, target_offsets)


def _following(token_id_T: NDArray, token_offsets: NDArray) -> dict[str, NDArray]:
    """Return the targets of units whose tokens follow each other: all of these but the first."""
    is_later_T = np.ones(len(token_id_T), dtype=bool)
    is_later_T[token_offsets[:-1]] = False
    starts_N = np.repeat(token_offsets[:-1], np.diff(token_offsets) - 1)
    return {"hidden_index": np.flatnonzero(is_later_T) - 1 - starts_N, "label": token_id_T[is_later_T]}


def packed_form(data: bytes) -> bytes:
    """Return a command's file with its data in arrays, where that may be in its JSON. Raises ValidationError."""
    return data if _END in data else stored_form(command.validate_json(data))


def read_command(data: bytes) -> tuple[StoredCommand, Units | None]:
    """Read a command's file: the command, and the data of a `forward` or `forward_backward`.

    Raises:
        InvalidInput: names the field and the rule.
        CorruptArtifact: the arrays are not what the JSON says.
    """
    try:
        data = packed_form(data)
        asked = _stored.validate_json(data[: _end_of_json(data)])
    except ValidationError as error:
        place, rule = first_error(error)
        raise InvalidInput(rule, place) from None
    if isinstance(asked, StoredForward | StoredForwardBackward):
        return asked, units_of(_arrays(asked.data, data, _end_of_json(data) + 1))
    return asked, None


def _arrays(header: DataHeader, data: bytes, at: int) -> dict[str, NDArray]:
    """View the arrays that begin at a byte of a command's file. Raises CorruptArtifact if they end too soon."""
    counts = dict.fromkeys(_OFFSETS, header.num_units + 1)
    counts |= {name: header.num_tokens if name in TOKEN_COLUMNS else header.num_targets for name in header.columns}
    arrays = {}
    for name, count in counts.items():
        dtype = OFFSETS if name in _OFFSETS else (TOKEN_COLUMNS | TARGET_COLUMNS)[name]
        if at + count * dtype.itemsize > len(data):
            raise CorruptArtifact("the arrays end before their header says", "data")
        arrays[name] = np.frombuffer(data, dtype, count, at)
        at += arrays[name].nbytes
    return arrays


def check_data(units: Units, vocab_size: int, max_tokens: int) -> None:
    """Raises InvalidInput for a token outside the vocabulary, or a sequence that no bin holds."""
    ends, lengths = units.token_offsets, np.diff(units.token_offsets)
    if (longest := int(lengths.max(initial=0))) > max_tokens:
        place = f"data[{int(lengths.argmax())}].tokens"
        raise InvalidInput(f"{longest} tokens; this session's max_tokens is {max_tokens}", place)
    token_T, label_N, hidden_N = (units.columns[name] for name in ("token_id", "label", "hidden_index"))
    if token_T.max(initial=0) >= vocab_size:
        number = int(np.searchsorted(ends, at := int(token_T.argmax()), side="right")) - 1
        place = f"data[{number}].tokens[{at - int(ends[number])}]"
        raise InvalidInput(f"token {token_T[at]} is outside the vocabulary of {vocab_size}", place)
    if label_N.max(initial=0) >= vocab_size:
        number = int(np.searchsorted(units.target_offsets, at := int(label_N.argmax()), side="right")) - 1
        before_N = hidden_N[units.target_offsets[number] : at]
        place = f"data[{number}].labels[{hidden_N[at]}][{int(np.sum(before_N == hidden_N[at]))}]"
        raise InvalidInput(f"label {label_N[at]} is outside the vocabulary of {vocab_size}", place)


def _end_of_json(data: bytes) -> int:
    return end if (end := data.find(_END)) >= 0 else len(data)


def _unit(datum: Datum) -> dict[str, NDArray]:
    """Return a datum's columns, as far as it has them."""
    columns: dict[str, NDArray] = {"token_id": np.array(datum.tokens, dtype=np.uint32)}
    if datum.labels is None:
        scores = ("weight", datum.weights), ("advantage", datum.advantages), ("old_logprob", datum.logprobs)
        given = (*scores, ("ref_logprob", datum.ref_logprobs))
        return columns | {name: np.array(each, dtype=np.float32) for name, each in given if each is not None}
    sizes = [len(labels) for labels in datum.labels]
    columns["hidden_index"] = np.repeat(np.arange(len(sizes)), sizes)
    columns["label"] = np.fromiter(chain.from_iterable(datum.labels), dtype=np.uint32)
    if datum.label_weights is not None:
        columns["weight"] = np.fromiter(chain.from_iterable(datum.label_weights), dtype=np.float32)
    return columns
