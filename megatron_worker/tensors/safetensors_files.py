"""Reading and writing safetensors files, a tensor at a time: slices are read, whole tensors are streamed.

No pickle, and no more than one whole tensor in memory.
"""

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longshore.fields import Sha256
from megatron_worker.families import join_parts
from shared.errors import InvalidInput
from shared.families.model_slices import BLOCKS, SCALES, Stored, contents_of, stacked
from shared.families.tensor_slices import TensorSlice
from shared.models.merging import FP8_BLOCK, FP8_SCALES, Part, header_of, parts_of

# --- Weights that published checkpoints hold as codes with scales, read as numbers ---
#
# - MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3): 32 numbers of 4 bits share an exponent. gpt-oss holds a
# tensor of experts, [E, I, O], as `<name>_blocks`, uint8 [E, O, I / 32, 16] with the earlier of two numbers in the
# lower bits, and `<name>_scales`, uint8 [E, O, I / 32]. All its numbers are exact in bfloat16. - FP8 (DeepSeek-AI
# 2024, arXiv:2412.19437, section 3.3.2): E4M3 codes [..., O, I] of the tensor's own name, and floats
# `<name>_scale_inv`, [..., ceil(O / 128), ceil(I / 128)]. A number is its code times the scale of its block.

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BIAS = 127  # of the exponents


@dataclass(frozen=True)
class _LazySlice:
    """Stands for safetensors' lazy tensor. `read` takes what one is indexed by."""

    shape: list[int]
    dtype: str
    read: Callable[[Any], Tensor]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, key: Any) -> Tensor:
        return self.read(key)


def _mxfp4_slice(blocks: Any, scales: Any) -> _LazySlice:
    """Read any of a stack's experts; in bfloat16."""

    def read(key: Any) -> Tensor:
        experts = key[0] if isinstance(key, tuple) else key
        return dequantized(blocks[experts], scales[experts])

    num_experts, outputs, num_blocks, num_bytes = blocks.get_shape()
    return _LazySlice([num_experts, num_blocks * num_bytes * 2, outputs], "BF16", read)


def _fp8_slice(codes: Any, scales: Any) -> _LazySlice:
    """Read any part; in float32, and written in bfloat16."""
    shape: list[int] = codes.get_shape()

    def read(key: Any) -> Tensor:
        keys = [*(key if isinstance(key, tuple) else (key,)), *[slice(None)] * len(shape)][: len(shape)]
        number: Tensor = codes[tuple(keys)].float()
        spans = [range(*own.indices(size)) for own, size in zip(keys[-2:], shape[-2:], strict=True)]
        blocks = [slice(span.start // FP8_BLOCK, -(-span.stop // FP8_BLOCK)) for span in spans]
        scale = scales[(*keys[:-2], *blocks)].float()
        rows, columns = (torch.arange(s.start, s.stop) // FP8_BLOCK - s.start // FP8_BLOCK for s in spans)
        scale = scale.index_select(-1, columns)
        for place, own in enumerate(number.split(rows.bincount().tolist(), dim=-2)):  # no copy of the whole size
            own *= scale[..., place, None, :]
        return number

    return _LazySlice(shape, "BF16", read)


def _part_slice(stack: Any, part: Part) -> _LazySlice:
    """Read an expert's rows of a stack."""

    def read(key: Any) -> Tensor:
        rows, *rest = key if isinstance(key, tuple) else (key,)
        start, stop, _ = rows.indices(part.num_rows)
        own: Tensor = stack[(part.expert, slice(part.first_row + start, part.first_row + stop), *rest)]
        return own

    return _LazySlice([part.num_rows, stack.get_shape()[2]], str(stack.get_dtype()), read)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [E, I, O] in bfloat16, contiguous."""
    values = torch.tensor(_VALUES)
    numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - _BIAS)
    return scaled.flatten(-2).to(torch.bfloat16).transpose(1, 2).contiguous()


INDEX = "model.safetensors.index.json"
_ROWS = 4096  # that are compared at a time
_DTYPE_NAMES = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class TensorFiles:
    """The tensors of some safetensors files by name. Files are mapped lazily; its `with` block drops the maps.

    Two tensors that hold one weight in MXFP4 or FP8 count as one, whose name lacks their suffixes. Once `assign` has
    matched names with an architecture's, an expert's part of a stack can be read by the expert's name, too.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._stored = dict(files)
        ends = {name: name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
        self._packed = {
            name: (files[blocks], files[name + SCALES]) for blocks, name in ends.items() if name + SCALES in files
        }
        self._scaled = {n: files[n + FP8_SCALES] for n in files if n + FP8_SCALES in files}
        packed = {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        packed |= {name + FP8_SCALES for name in self._scaled}
        plain = {name: path for name, path in files.items() if name not in packed}
        self._files = plain | {name: path for name, (path, _) in self._packed.items()}
        self._open: dict[Path, Any] = {}
        self._parts: dict[str, Part] = {}

    def assign(self, slices: Sequence[TensorSlice], place: Path, carried: Sequence[str] = ()) -> None:
        """Find the tensors of the slices. Raises InvalidInput as `contents_of` does, or if tied tensors differ."""
        contents = contents_of(slices, carried, self._headers(), str(place))
        self._parts = contents.parts
        self._files |= {name: self._files[part.stack] for name, part in self._parts.items()}
        if contents.tied is not None:
            self.check_equal(*contents.tied)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def as_stored(self, slices: Sequence[TensorSlice], dtype: torch.dtype) -> dict["WrittenTensor", list[TensorSlice]]:
        """Return the tensors of files like these that hold some slices, each with its slices in their order."""
        by_name, headers = {s.name: s for s in slices}, self._headers()
        parts, groups = stacked(slices, headers), dict[WrittenTensor, list[TensorSlice]]()
        for s in slices:
            if (part := parts.get(s.name)) is None:
                groups[WrittenTensor(s.name, dtype, s.shape)] = [s]
            else:
                shape = headers[part.stack].shape
                own = [by_name[each.name] for each in parts_of(part.stack, shape)]
                groups[WrittenTensor(part.stack, dtype, shape)] = own
        return groups

    def _headers(self) -> dict[str, Stored]:
        """Return the type and shape of each tensor as the files have it."""
        found = ((name, self._slice_in(path, name)) for name, path in self._stored.items())
        return {name: Stored(one.get_dtype(), tuple(one.get_shape())) for name, one in found}

    def local(self, tensor_slice: TensorSlice, name: str, rank: int, size: int, *, is_weight: bool = True) -> Tensor:
        """Read a rank's slice of a tensor.

        Raises InvalidInput: it is missing, of another shape, or no floats; or a weight in it is not finite, as
        activities/models/resolve.py says it of a run's adapter.
        """
        if name not in self._files:
            raise InvalidInput(f"the tensor {name!r} is missing", self._place())
        if self.shape(name) != tensor_slice.shape:
            message = f"{name!r} has shape {list(self.shape(name))}, expected {list(tensor_slice.shape)}"
            raise InvalidInput(message, str(self._files[name]))
        split, everything = tensor_slice.split, slice(None)
        spans = [everything] if split is None else tensor_slice.spans(rank, size)
        try:
            local = join_parts([self._slice(name)[(everything,) * (split or 0) + (span,)] for span in spans], split)
        except SafetensorError as error:
            raise InvalidInput(f"{name!r} cannot be read: {error}", str(self._files[name])) from error
        if not local.is_floating_point():
            raise InvalidInput(f"{name!r} holds {local.dtype}, and weights are floats", str(self._files[name]))
        if is_weight and not _is_finite(local):
            raise InvalidInput(f"tensor {name} holds a number that is not finite", str(self._files[name]))
        return local

    def whole(self, name: str) -> Tensor:
        """Read a tensor unchanged from its file."""
        whole: Tensor = self._slice_in(self._stored[name], name)[...]
        return whole

    def entries(self, prefixes: Sequence[str]) -> "list[WrittenTensor]":
        """Return the tensors whose names begin with any of these as they are in the files, sorted by name."""
        found = sorted((name, one) for name, one in self._headers().items() if name.startswith(tuple(prefixes)))
        return [WrittenTensor(name, _DTYPES[one.dtype], one.shape) for name, one in found]

    def number(self, name: str) -> int:
        """Read a tensor that is one whole number."""
        return int(self._slice(name)[()])

    def check_equal(self, name: str, other: str) -> None:
        """Raise InvalidInput if two tensors differ. They are compared a few rows at a time."""
        if self.shape(name) == self.shape(other):
            num_rows, mine, theirs = self.shape(name)[0], self._slice(name), self._slice(other)
            blocks = (slice(at, at + _ROWS) for at in range(0, num_rows, _ROWS))
            if all(torch.equal(mine[rows].double(), theirs[rows].double()) for rows in blocks):
                return
        raise InvalidInput(f"this ties {name!r} to {other!r}, and they differ", str(self._files[name]))

    def beside(self, others: "TensorFiles") -> "TensorFiles":
        return TensorFiles({**self._stored, **others._stored})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def _slice(self, name: str) -> Any:
        if name in self._packed:
            blocks, scales = self._packed[name]
            # `contents_of` has looked at their shapes.
            return _mxfp4_slice(self._slice_in(blocks, name + BLOCKS), self._slice_in(scales, name + SCALES))
        if (part := self._parts.get(name)) is not None:
            return _part_slice(self._slice(part.stack), part)
        found = self._slice_in(self._files[name], name)
        if name in self._scaled and found.get_dtype() == "F8_E4M3":  # `contents_of` has looked at the scales' shape
            return _fp8_slice(found, self._slice_in(self._scaled[name], name + FP8_SCALES))
        return found

    def _slice_in(self, path: Path, name: str) -> Any:
        if path not in self._open:
            self._open[path] = open_safetensors(path)
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            raise InvalidInput(f"{name!r} is not in the file that the index names", str(path)) from error

    def _place(self) -> str:
        return ", ".join(sorted({str(p) for p in self._files.values()})[:3]) or "no file"


def _is_finite(tensor: Tensor) -> bool:
    """True if every number is finite. The least and the greatest are NaN if any is; this takes no memory."""
    if not tensor.numel():
        return True
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # torch orders no numbers of 8 bits
    return all(math.isfinite(bound) for bound in wide.aminmax())


def open_safetensors(path: Path) -> Any:
    """Open a file for lazy reading. Raises InvalidInput when it is missing, truncated or no safetensors file."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise InvalidInput("the file is missing", str(path)) from error
    except SafetensorError as error:
        raise InvalidInput(f"the safetensors file is damaged or truncated: {error}", str(path)) from error


def single_file(path: Path) -> TensorFiles:
    return TensorFiles(dict.fromkeys(open_safetensors(path).keys(), path))


def model_files(folder: Path) -> TensorFiles:
    """Open the weights of a Hugging Face folder: one file, or several behind an index."""
    if (folder / INDEX).exists():
        return _indexed(folder)
    if not (folder / "model.safetensors").exists():
        raise InvalidInput("the folder has no model.safetensors (only safetensors are read)", str(folder))
    return single_file(folder / "model.safetensors")


def _indexed(folder: Path) -> TensorFiles:
    try:
        places = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = {str(name): folder / Path(str(file)).name for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput("the index is not valid JSON with a weight_map", str(folder / INDEX)) from error
    whole = folder / "model.safetensors"
    if whole.exists() and whole not in files.values():
        raise InvalidInput("beside the index lies another model.safetensors: remove one of them", str(folder))
    return TensorFiles(files)


def check_names(files: TensorFiles, expected: set[str], place: Path) -> None:
    """Raises InvalidInput unless exactly the expected tensors are there."""
    missing, unknown = sorted(expected - files.names), sorted(files.names - expected)
    if missing:
        raise InvalidInput(f"{len(missing)} tensors are missing, the first is {missing[0]!r}", str(place))
    if unknown:
        raise InvalidInput(f"{len(unknown)} tensors do not belong here, the first is {unknown[0]!r}", str(place))


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of a file to be written, and its size in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    path: Path | None,
    entries: Sequence[WrittenTensor],
    tensors: Iterator[Tensor],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Stream tensors into a file, in the order of the entries; equal tensors give equal bytes.

    An entry may come as several tensors, which lie one behind another in it.

    `path` None only draws the tensors, as ranks do that take part in gathering but do not write. See `all_drawn`.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if path is None else path.open("wb") as file:
        if file is not None:
            file.write(_header(entries, metadata))
        for entry in entries:
            left = math.prod(entry.shape)
            while True:
                tensor = next(tensors)
                left -= tensor.numel()
                assert left >= 0 and tensor.shape[1:] == entry.shape[-tensor.ndim :][1:], (entry, tensor.shape)
                if file is not None:
                    file.write(_bytes_of(tensor.to(entry.dtype)))
                del tensor  # before the next one is drawn
                if not left:
                    break


def file_sha256(tensors: Mapping[str, Tensor]) -> Sha256:
    """Return the SHA-256 of the file that `write_safetensors` makes of some tensors, in their order and dtypes."""
    entries = [WrittenTensor(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]
    found = hashlib.sha256(_header(entries, {}))
    for tensor in tensors.values():
        found.update(_bytes_of(tensor))
    return found.hexdigest()


@contextmanager
def all_drawn(tensors: Iterator[object]) -> Iterator[None]:
    """Draw the remaining tensors at the end of the block, also after an error; each is freed before the next.

    Drawing is collective if it gathers: a rank whose disk is full must not leave its peers waiting for the rest.
    """
    try:
        yield
    finally:
        deque(tensors, maxlen=0)


def _header(entries: Sequence[WrittenTensor], metadata: Mapping[str, str]) -> bytes:
    tensors = ((one.name, _DTYPE_NAMES[one.dtype], one.shape, one.num_bytes) for one in entries)
    return header_of(tensors, **metadata)


def _bytes_of(tensor: Tensor) -> memoryview:
    # A copy: torch never again resizes a storage that numpy has seen, and offload resizes the engine's to nothing.
    flat = tensor.detach().cpu().reshape(-1).clone()
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def shards_of(entries: Sequence[WrittenTensor], max_bytes: int) -> list[list[WrittenTensor]]:
    """Cut entries into files of at most `max_bytes` (or one tensor), keeping their order."""
    shards: list[list[WrittenTensor]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def write_model(
    folder: Path | None, entries: Sequence[WrittenTensor], tensors: Iterator[Tensor], max_bytes: int
) -> None:
    """Write `model.safetensors`, or numbered files and an index if that would pass `max_bytes`."""
    shards = shards_of(entries, max_bytes)
    if len(shards) == 1:
        write_safetensors(folder and folder / "model.safetensors", entries, tensors)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder and folder / file, shard, tensors)
        places |= {entry.name: file for entry in shard}
    if folder is not None:
        total = sum(entry.num_bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
