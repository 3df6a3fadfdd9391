"""Commands in their stored form: those that a client sends (longshore/commands.py), and those that the service adds or
puts in their place.

Each command and each result is a file next to the session's job. A command's file is JSON, except for `forward` and
`forward_backward`: theirs is safetensors. Its arrays are the columns of packed data (packed.py), one unit for each
datum with all that was sent; its metadata has the rest as JSON. Repeating a command from the same state gives a
bit-identical result on any worker.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.numpy import load, save

from longshore.commands import CommandResult as CommandResult
from longshore.commands import (
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardOptions,
    ForwardOptions,
    LoadState,
    StoredAsSent,
)
from longshore.fields import Artifact, Frozen
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_error
from shared.jobs.packed import OFFSETS, TARGET_COLUMNS, TOKEN_COLUMNS, Units, as_stored

_COMMAND = "command"  # in the metadata
_JSON = b"{"  # no safetensors file begins so: they begin with a header's length, a multiple of eight
_OFFSETS = ("token_offsets", "target_offsets")
_COLUMNS = TOKEN_COLUMNS | TARGET_COLUMNS
_OF_TREES = ("position", "parent", "sequence")
_DTYPES = dict.fromkeys(_OFFSETS, OFFSETS) | {name: each for name, each in _COLUMNS.items() if name not in _OF_TREES}


class LoadStored(LoadState):
    """A `load_state` as the service stores it: with the checkpoint that its name meant when it was accepted."""

    checkpoint: Artifact


class Skip(Frozen):
    """Replaces a command that a new worker must not repeat: it changes no state, or its error might not recur.

    Its result is stored. `drops`: it has dropped the gradients accumulated so far.
    """

    kind: Literal["skip"] = "skip"
    drops: bool = False


class Gap(Frozen):
    """Replaces a command that never arrived. Its number and the following ones up to `through` are dropped."""

    kind: Literal["gap"] = "gap"
    through: int
    message: str


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
        return cls.model_validate_json(_json_of(data))


_Plain = StoredAsSent | LoadStored | Skip | Gap
Command = Forward | ForwardBackward | _Plain
StoredCommand = Annotated[ForwardOptions | ForwardBackwardOptions | _Plain, Field(discriminator="kind")]
"""What a command's file says beside its arrays."""
_stored: TypeAdapter[StoredCommand] = TypeAdapter(StoredCommand)


def stored_form(asked: Command | LoadState) -> bytes:
    """Return a command's file."""
    if isinstance(asked, Forward | ForwardBackward):
        return with_data(asked, [_unit(datum) for datum in asked.data])
    return asked.model_dump_json().encode()


def with_data(asked: ForwardOptions | ForwardBackwardOptions, data: Sequence[Mapping[str, NDArray]]) -> bytes:
    """Return the file of a command with these options, and for each datum its columns, as `joined` takes them."""
    return save(joined(data), {_COMMAND: asked.model_dump_json(exclude={"data"})})


def joined(units: Sequence[Mapping[str, NDArray]]) -> dict[str, NDArray]:
    """Join the columns of units, behind the offsets of their tokens and targets.

    Each unit has a `token_id`. A unit that lacks a column which another has gets the column's default.
    """
    names = [name for name in _COLUMNS if any(name in unit for unit in units)]
    filled = [_filled(unit) for unit in units]
    ends = [np.cumsum([0, *(len(unit[name]) for unit in filled)]) for name in ("token_id", "label")]
    columns = {name: np.concatenate([as_stored(unit[name], _COLUMNS[name]) for unit in filled]) for name in names}
    return dict(zip(_OFFSETS, ends, strict=True)) | columns


def _filled(unit: Mapping[str, NDArray]) -> dict[str, NDArray]:
    label_N = unit.get("label", unit["token_id"][1:])
    zeros_N, hidden_N = np.zeros(len(label_N)), np.arange(len(label_N))
    scores = {"weight": zeros_N + 1, "advantage": zeros_N, "old_logprob": zeros_N + np.nan, "ref_logprob": zeros_N}
    return {"hidden_index": hidden_N, "label": label_N, **scores, **unit}


def units_of(arrays: Mapping[str, NDArray]) -> Units:
    """Make units from what `joined` returns. Without a `label`, targets are all tokens but the first. Weights default
    to 1.

    Raises CorruptArtifact: the arrays do not fit each other.
    """
    columns = {name: each for name, each in arrays.items() if name not in _OFFSETS}
    token_offsets, target_offsets = (arrays[name] for name in _OFFSETS)
    if "label" not in columns:
        targets = np.diff(target_offsets)
        hidden_N = np.arange(target_offsets[-1]) - np.repeat(target_offsets[:-1], targets)
        label_N = columns["token_id"][hidden_N + 1 + np.repeat(token_offsets[:-1], targets)]
        columns |= {"hidden_index": hidden_N, "label": label_N}
    columns.setdefault("weight", np.ones(len(columns["label"]), dtype=np.float32))
    return Units.of_arrays(columns, token_offsets, target_offsets)


def read_command(data: bytes) -> tuple[StoredCommand, Units | None]:
    """Read a command's file: the command, and the data of a `forward` or `forward_backward`.

    Raises:
        InvalidInput: names the field and the rule.
        CorruptArtifact: the arrays are not those of a command.
    """
    try:
        asked = _stored.validate_json(_json_of(data))
    except ValidationError as error:
        place, rule = first_error(error)
        raise InvalidInput(rule, place) from None
    if not isinstance(asked, ForwardOptions | ForwardBackwardOptions):
        return asked, None
    arrays = load(data)
    if any(each.dtype != _DTYPES.get(name) or each.ndim != 1 for name, each in arrays.items()):
        raise CorruptArtifact("these are not the arrays of a command", "data")
    units = units_of(arrays)
    if isinstance(asked, ForwardOptions):
        asked.check_answer(units.header.num_targets)
    return asked, units


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


def _json_of(data: bytes) -> bytes | str:
    """Return the JSON of a command's file; if it is no such file, a text that does not parse as JSON."""
    if data[:1] != _JSON:
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            return str(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][_COMMAND])
    return data


def _unit(datum: Datum) -> dict[str, NDArray]:
    """Return the columns that a datum has."""
    columns: dict[str, NDArray] = {"token_id": np.array(datum.tokens, dtype=np.uint32)}
    if datum.labels is None:
        learnt = datum.advantages if datum.value_targets is None else datum.value_targets
        scores = ("weight", datum.weights), ("advantage", learnt), ("old_logprob", datum.logprobs)
        given = (*scores, ("ref_logprob", datum.ref_logprobs))
        return columns | {name: np.array(each, dtype=np.float32) for name, each in given if each is not None}
    sizes = [len(labels) for labels in datum.labels]
    columns["hidden_index"] = np.repeat(np.arange(len(sizes)), sizes)
    columns["label"] = np.fromiter(chain.from_iterable(datum.labels), dtype=np.uint32)
    if datum.label_weights is not None:
        columns["weight"] = np.fromiter(chain.from_iterable(datum.label_weights), dtype=np.float32)
    return columns
