"""Packed batches on disk: units, and the plan that puts them into steps and bins.

A *unit* is never split: one SFT example, or one tree of trajectories that share prefixes. Units are stored once, in
columns. A *plan* lists the bins of every step, and the units of every bin. A bin is read as two tables:

`tokens(id, position, parent)`
    a forest: `parent` is the index, within the bin, of the token before this one, or -1 at a root. A plain example is
    a chain.
`targets(hidden_index, label, weight, advantage, old_logprob, ref_logprob, sequence)`
    the scored tokens: the label is predicted from the hidden state of token `hidden_index`, or a head of scalars gives
    its values there. `advantage` is an advantage, or the target of such a value.

A further column `route` of the tokens has the experts that a sampler chose for each (`RouteShape`).

Files are raw little-endian columns with a header file, memory-mapped on reading. Suffixes: T tokens of a bin, N targets
of a bin; L layers that have experts, K experts of a token.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from longshore.fields import Frozen, added
from longshore.views import PlanHeader
from shared.errors import CorruptArtifact
from shared.storage.files import write_atomically

TOKEN_COLUMNS: dict[str, np.dtype] = {
    "token_id": np.dtype("<u4"),
    "position": np.dtype("<i4"),
    "parent": np.dtype("<i4"),
}
TARGET_COLUMNS: dict[str, np.dtype] = {
    "hidden_index": np.dtype("<i4"),
    "label": np.dtype("<u4"),
    "weight": np.dtype("<f4"),
    "advantage": np.dtype("<f4"),
    "old_logprob": np.dtype("<f4"),
    "ref_logprob": np.dtype("<f4"),
    "sequence": np.dtype("<i4"),
}
ROUTE = "route"
LIKELIEST_IDS, LIKELIEST_LOGPROBS = "ids.npy", "logprobs.npy"  # of `PackedData.likeliest`
_OF_TOKENS = (*TOKEN_COLUMNS, ROUTE)
# Indices in these columns are local to a unit on disk; reading a bin shifts them.
OFFSETS = np.dtype("<i8")
_PIECE = 1 << 20
REQUIRED_COLUMNS = ("token_id", "hidden_index", "label", "weight")

Ints = NDArray[np.integer]
Floats = NDArray[np.floating]


class RouteShape(Frozen):
    """The experts that a model computes a token with: `per_token` of `num_experts`, in each of `num_layers`."""

    num_layers: int = Field(ge=1, description="layers that have experts")
    num_experts: int = Field(ge=1, le=32_768)
    per_token: int = Field(ge=1)
    has_experts: tuple[bool, ...] = Field(default=(), description="whether each layer has experts, if some have none")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a token's route: one or two bytes for each expert, [L, K]."""
        return np.dtype(("<u1" if self.num_experts <= 256 else "<u2", (self.num_layers, self.per_token)))


class UnitsOfSource(Frozen):
    """The name of a source of a mixture, and how many units are from it."""

    name: str
    num_units: int


class UnitsHeader(Frozen):
    """`units.json`. Absent columns have defaults: chains, positions from 0, one sequence per unit, zeros; an unknown
    `old_logprob` is NaN. `routes`: the shape of the column `route`, if there is one. `sources`: those of a mixture, in
    the order of its units.
    """

    schema_version: Literal[1] = 1
    num_units: int
    num_tokens: int
    num_targets: int
    columns: tuple[str, ...]
    routes: RouteShape | None = None
    sources: tuple[UnitsOfSource, ...] = added(())


@dataclass(frozen=True)
class PackedBin:
    """One bin as numpy arrays, indices relative to the bin."""

    token_id_T: Ints
    position_T: Ints
    parent_T: Ints
    hidden_index_N: Ints
    label_N: Ints
    weight_N: Floats
    advantage_N: Floats
    old_logprob_N: Floats
    ref_logprob_N: Floats
    sequence_N: Ints
    route_TLK: Ints | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_id_T)

    @property
    def num_targets(self) -> int:
        return len(self.label_N)


class UnitsWriter:
    """Streams units into a folder. Memory stays constant; the header, written by `close`, comes last.

    Nothing is fsynced: the folder is a scratch folder, which its owner uploads.
    """

    def __init__(
        self, folder: Path, columns: tuple[str, ...] = REQUIRED_COLUMNS, routes: RouteShape | None = None
    ) -> None:
        """Open the files of a folder. `columns`: those to write; the others have defaults on reading.

        `routes`: the shape of the column `route`, which is then written, too.
        """
        assert set(REQUIRED_COLUMNS) <= set(columns) <= set(TOKEN_COLUMNS) | set(TARGET_COLUMNS), columns
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._routes = routes
        self._columns = columns if routes is None else (*columns, ROUTE)
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in self._columns}
        self._token_offsets = _OffsetsWriter(folder / "token_offsets.bin")
        self._target_offsets = _OffsetsWriter(folder / "target_offsets.bin")

    def append(self, **columns: NDArray) -> None:
        """Add one unit: an array for each of this writer's columns, indices local to the unit."""
        self.extend([len(columns["token_id"])], [len(columns["label"])], **columns)

    def extend(self, num_tokens: Ints | list[int], num_targets: Ints | list[int], **columns: NDArray) -> None:
        """Add units whose values are concatenated in each column; the counts give each unit's length."""
        tokens, targets = int(np.sum(num_tokens)), int(np.sum(num_targets))
        assert len(num_tokens) == len(num_targets) and set(columns) == set(self._columns), sorted(columns)
        for name in self._columns:
            expected = tokens if name in _OF_TOKENS else targets
            assert len(columns[name]) == expected, (name, len(columns[name]), expected)
            as_stored(columns[name], _dtype(name, self._routes).base).tofile(self._files[name])
        self._token_offsets.extend(num_tokens)
        self._target_offsets.extend(num_targets)

    def close(self) -> UnitsHeader:
        for file in self._files.values():
            file.close()
        header = UnitsHeader(
            num_units=self._token_offsets.num_entries,
            num_tokens=self._token_offsets.close(),
            num_targets=self._target_offsets.close(),
            columns=self._columns,
            routes=self._routes,
        )
        text = header.model_dump_json(indent=1, exclude_none=True)
        write_atomically(self._folder / "units.json", text.encode(), is_durable=False)
        return header


def mix_units(folders: Mapping[str, Path], folder: Path) -> UnitsHeader:
    """Write the units of several sources, by their names, into one folder, those of the first source first.

    The sources have the same columns, and none has routes. Not sealed.
    """
    headers = [UnitsHeader.model_validate_json((each / "units.json").read_bytes()) for each in folders.values()]
    assert len({header.columns for header in headers}) == 1 and ROUTE not in headers[0].columns, headers
    for name in headers[0].columns:
        with (folder / f"{name}.bin").open("wb") as whole:
            for each in folders.values():
                with (each / f"{name}.bin").open("rb") as part:
                    shutil.copyfileobj(part, whole, _PIECE)
    for name in ("token_offsets.bin", "target_offsets.bin"):
        offsets = _OffsetsWriter(folder / name)
        for each in folders.values():
            offsets.extend(np.diff(_read_column(each / name, OFFSETS)))
        offsets.close()
    mixed = UnitsHeader(
        num_units=sum(header.num_units for header in headers),
        num_tokens=sum(header.num_tokens for header in headers),
        num_targets=sum(header.num_targets for header in headers),
        columns=headers[0].columns,
        sources=tuple(
            UnitsOfSource(name=name, num_units=header.num_units) for name, header in zip(folders, headers, strict=True)
        ),
    )
    text = mixed.model_dump_json(indent=1, exclude_none=True)
    write_atomically(folder / "units.json", text.encode(), is_durable=False)
    return mixed


class PlanWriter:
    """Streams steps into a folder; the header, written by `close`, comes last."""

    def __init__(self, folder: Path, bin_tokens: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._bin_tokens = bin_tokens
        self._units = (folder / "bin_units.bin").open("wb")
        self._bin_offsets = _OffsetsWriter(folder / "bin_offsets.bin")
        self._step_offsets = _OffsetsWriter(folder / "step_offsets.bin")

    def append_step(self, bins: Sequence[Ints | list[int]]) -> None:
        """Add one step: for each of its bins the numbers of its units."""
        for units in bins:
            np.asarray(units, dtype=OFFSETS).tofile(self._units)
        self._bin_offsets.extend([len(units) for units in bins])
        self._step_offsets.extend([len(bins)])

    def close(self, unit_tokens: Ints) -> PlanHeader:
        """`unit_tokens[u]`: tokens of unit u, for the header's totals."""
        self._units.close()
        num_steps, num_bins = self._step_offsets.num_entries, self._bin_offsets.num_entries
        self._bin_offsets.close()
        self._step_offsets.close()
        planned = _read_column(self._folder / "bin_units.bin", OFFSETS)
        pieces = range(0, len(planned), _PIECE)  # a plan of many epochs may be longer than memory
        num_tokens = sum(int(unit_tokens[planned[at : at + _PIECE]].sum()) for at in pieces)
        header = PlanHeader(
            num_steps=num_steps,
            num_bins=num_bins,
            bin_tokens=self._bin_tokens,
            num_tokens=num_tokens,
            packing_efficiency=num_tokens / (num_bins * self._bin_tokens) if num_bins else 0.0,
        )
        write_atomically(self._folder / "plan.json", header.model_dump_json(indent=1).encode(), is_durable=False)
        return header


class Units:
    """Units of a folder, memory-mapped, or in memory. Close it (or leave its `with` block) to drop the maps.

    `columns`: the columns that the units have, by name, whole and as stored.
    """

    def __init__(self, folder: Path) -> None:
        self.header = UnitsHeader.model_validate_json((folder / "units.json").read_bytes())
        dtypes = {name: _dtype(name, self.header.routes) for name in self.header.columns}
        self.columns = {name: _read_column(folder / f"{name}.bin", dtype) for name, dtype in dtypes.items()}
        self.token_offsets = _read_column(folder / "token_offsets.bin", OFFSETS)
        self.target_offsets = _read_column(folder / "target_offsets.bin", OFFSETS)
        self._check(str(folder))

    @classmethod
    def of_arrays(cls, columns: dict[str, NDArray], token_offsets: Ints, target_offsets: Ints) -> Self:
        """Make units from whole columns in memory, and the offsets of each unit's tokens and targets.

        Raises CorruptArtifact: their lengths do not fit, or a target is scored from outside its unit.
        """
        made, num_units = cls.__new__(cls), len(token_offsets) - 1
        made.columns, made.token_offsets, made.target_offsets = columns, token_offsets, target_offsets
        num_tokens, num_targets = int(token_offsets[-1]), int(target_offsets[-1])
        made.header = UnitsHeader(
            num_units=num_units, num_tokens=num_tokens, num_targets=num_targets, columns=tuple(columns)
        )
        made._check("memory")
        lengths, targets, hidden_N = np.diff(token_offsets), np.diff(target_offsets), columns["hidden_index"]
        is_divided = token_offsets[0] == target_offsets[0] == 0 and bool(np.all(lengths > 0) and np.all(targets >= 0))
        if not is_divided or np.any((hidden_N < 0) | (hidden_N >= np.repeat(lengths, targets))):
            raise CorruptArtifact("offsets or targets are not of these units", "memory")
        return made

    def of_targets(self, is_kept_N: NDArray[np.bool_]) -> "Units":
        """Return the same units with fewer targets."""
        kept = {name: each if name in _OF_TOKENS else each[is_kept_N] for name, each in self.columns.items()}
        return Units.of_arrays(kept, self.token_offsets, np.append(0, np.cumsum(is_kept_N))[self.target_offsets])

    def _check(self, place: str) -> None:
        """Check the length of every column against the header. Raises CorruptArtifact."""
        header = self.header
        found = {"token_offsets": len(self.token_offsets) - 1, "target_offsets": len(self.target_offsets) - 1}
        found |= {name: len(column) for name, column in self.columns.items()}
        expected = {name: header.num_tokens if name in _OF_TOKENS else header.num_targets for name in self.columns}
        expected |= {"token_offsets": header.num_units, "target_offsets": header.num_units}
        for name, count in found.items():
            if count != expected[name]:
                raise CorruptArtifact(f"{name}.bin holds {count} entries, units.json says {expected[name]}", place)

    @staticmethod
    def read_lengths(folder: Path) -> NDArray[np.int64]:
        """Return the number of tokens of every unit of a folder. Reads only its header and `token_offsets.bin`."""
        header = UnitsHeader.model_validate_json((folder / "units.json").read_bytes())
        offsets = _read_column(folder / "token_offsets.bin", OFFSETS)
        if len(offsets) != header.num_units + 1:
            raise CorruptArtifact("token_offsets.bin does not match units.json", str(folder))
        return np.diff(offsets).astype(np.int64)

    def read_bin(self, units: Ints) -> PackedBin:
        """Concatenate units into one bin, shifting their indices."""
        token_slices = [slice(self.token_offsets[u], self.token_offsets[u + 1]) for u in units]
        target_slices = [slice(self.target_offsets[u], self.target_offsets[u + 1]) for u in units]
        tokens = np.array([s.stop - s.start for s in token_slices], dtype=np.int64)
        targets = np.array([s.stop - s.start for s in target_slices], dtype=np.int64)
        start_T = np.repeat(np.cumsum(tokens) - tokens, tokens)
        start_N = np.repeat(np.cumsum(tokens) - tokens, targets)
        chain_T = np.arange(tokens.sum()) - start_T

        def column(name: str, default: NDArray) -> NDArray:
            slices = token_slices if name in _OF_TOKENS else target_slices
            if name not in self.columns:
                return default
            return np.concatenate([self.columns[name][s] for s in slices]) if slices else default

        zeros_N = np.zeros(targets.sum(), dtype=np.float32)
        unknown_N = np.full(targets.sum(), np.nan, dtype=np.float32)
        parent_T = column("parent", chain_T - 1)
        sequence_N = column("sequence", np.zeros(targets.sum(), dtype=np.int64))
        return PackedBin(
            token_id_T=column("token_id", np.zeros(0, dtype=np.uint32)),
            position_T=column("position", chain_T),
            parent_T=np.where(parent_T < 0, -1, parent_T + start_T),
            hidden_index_N=column("hidden_index", np.zeros(0, dtype=np.int64)) + start_N,
            label_N=column("label", np.zeros(0, dtype=np.uint32)),
            weight_N=column("weight", zeros_N),
            advantage_N=column("advantage", zeros_N),
            old_logprob_N=column("old_logprob", unknown_N),
            ref_logprob_N=column("ref_logprob", zeros_N),
            sequence_N=sequence_N + _sequence_starts(sequence_N, targets),
            route_TLK=column(ROUTE, chain_T) if token_slices and ROUTE in self.columns else None,
        )

    def num_tokens(self, units: Ints) -> Ints:
        """Return the tokens of each of some units: [U] int64."""
        return self.token_offsets[np.asarray(units) + 1] - self.token_offsets[units]

    def target_indices(self, units: Ints) -> Ints:
        """Return the indices of a bin's targets in the columns on disk, in the bin's order: [N] int64."""
        first, end = self.target_offsets[units], self.target_offsets[np.asarray(units) + 1]
        counts = end - first
        return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    def close(self) -> None:
        """Drop the maps: numpy unmaps a file with the last reference to its array."""
        self.columns = {}
        self.token_offsets = self.target_offsets = np.zeros(0, dtype=OFFSETS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class Plan:
    """The steps and bins of a plan's folder, memory-mapped. Close it to drop the maps."""

    def __init__(self, folder: Path) -> None:
        self.header = PlanHeader.model_validate_json((folder / "plan.json").read_bytes())
        self._bin_units = _read_column(folder / "bin_units.bin", OFFSETS)
        self._bin_offsets = _read_column(folder / "bin_offsets.bin", OFFSETS)
        self._step_offsets = _read_column(folder / "step_offsets.bin", OFFSETS)

    def bins(self, step: int) -> list[Ints]:
        """The unit numbers of each bin of a step, steps counted from 0."""
        first, last = int(self._step_offsets[step]), int(self._step_offsets[step + 1])
        bounds = self._bin_offsets[first : last + 1]
        return [np.array(self._bin_units[a:b]) for a, b in pairwise(bounds)]

    @property
    def most_bins(self) -> int:
        """The largest number of bins of a step."""
        return int(np.diff(self._step_offsets).max(initial=0))

    def close(self) -> None:
        self._bin_units = self._bin_offsets = self._step_offsets = np.zeros(0, dtype=OFFSETS)


def _dtype(column: str, routes: RouteShape | None) -> np.dtype:
    if column == ROUTE and routes is not None:
        return routes.dtype
    return TOKEN_COLUMNS.get(column) or TARGET_COLUMNS[column]


def _sequence_starts(sequence_N: NDArray, targets: Ints) -> Ints:
    """Return the offsets that make sequence numbers of different units of a bin differ: [N] int64."""
    ends = np.cumsum(targets)
    counts = [int(sequence_N[e - n : e].max()) + 1 if n else 0 for e, n in zip(ends, targets, strict=True)]
    return np.repeat(np.cumsum(counts) - counts, targets)


class _OffsetsWriter:
    """Streams offsets: 0, then the running sum of sizes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._end = 0
        self.num_entries = 0
        np.zeros(1, dtype=OFFSETS).tofile(self._file)

    def extend(self, sizes: Ints | list[int]) -> None:
        ends = self._end + np.cumsum(np.asarray(sizes, dtype=OFFSETS))
        ends.astype(OFFSETS).tofile(self._file)
        self._end = int(ends[-1]) if len(ends) else self._end
        self.num_entries += len(ends)

    def close(self) -> int:
        """Return the last offset."""
        self._file.close()
        return self._end


def as_stored(values: NDArray, dtype: np.dtype) -> NDArray:
    """Convert values to a column's type. Asserts that it can hold every integer, so that none wraps around."""
    if values.size and dtype.kind in "iu" and values.dtype != dtype:
        limits = np.iinfo(dtype)
        assert limits.min <= values.min() and values.max() <= limits.max, (dtype, values.min(), values.max())
    return values.astype(dtype, copy=False)


def _read_column(path: Path, dtype: np.dtype) -> NDArray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorruptArtifact(f"{size} bytes are no whole number of {dtype.itemsize}-byte values", str(path))
    if size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


assert {f.name.rsplit("_", 1)[0] for f in fields(PackedBin)} == {*_OF_TOKENS, *TARGET_COLUMNS}
