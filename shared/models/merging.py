"""Merge a LoRA adapter into its base model: safetensors in, safetensors out, a few megabytes at a time.

W' = W + scale * B A, or what a form of LoRA has in its place (`ModuleAdapter.merged`), is computed in float32 and
rounded once to W's own type. Memory holds the adapter and a block of rows of the base model.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from longshore.training import Lora
from shared.errors import InvalidInput
from shared.models.peft import CONFIG, EMBEDDING, PREFIX, AdaptedModules, ModuleAdapter, module_of, tensors_of

_BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_DAMAGED = "this is no safetensors file, or a damaged one"
FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number of each type that is computed with, by safetensors' names."""
ITEM_BYTES = FLOATS | {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2},
    **{"I32": 4, "U32": 4, "I64": 8, "U64": 8, "F64": 8},
}
FP8_BLOCK, FP8_SCALES = 128, "_scale_inv"
"""Rows and columns of a block of FP8 weights, and what ends the names of their scales."""
Floats = NDArray[np.float32]
_TURNED = {"embedding_A": "B", "embedding_B": "A"}


_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)")


class Part(NamedTuple):
    """An expert's tensor within a stack, by its own name: `num_rows` of the expert's rows from `first_row` on."""

    name: str
    stack: str
    expert: int
    first_row: int
    num_rows: int


def parts_of(name: str, shape: Sequence[int]) -> list[Part]:
    """Return the parts of a tensor of [experts, rows, columns] if it is a stack of linears, in the order of its bytes.

    Published Qwen3.5 and 3.6 have such stacks, gates above ups in them (as transformers has them in memory).
    """
    if (match := _STACK.fullmatch(name)) is None or len(shape) != 3:
        return []
    linears = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
    height, rest = divmod(shape[1], len(linears))
    if rest or not height:
        return []
    return [
        Part(f"{match[1]}.{expert}.{linear}.weight", name, expert, place * height, height)
        for expert in range(shape[0])
        for place, linear in enumerate(linears)
    ]


class Readable(Protocol):
    """Bytes from a file, or as they arrive; fewer than were asked for only at the end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: its type, shape, and bytes behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class Merger:
    """An adapter's tensors by the name of the module that they change."""

    factors: dict[str, ModuleAdapter]
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, lora: Lora, weights: Readable, place: str) -> "Merger":
        """Read `adapter_model.safetensors`. Raises InvalidInput: it is no such file, or a factor lacks its pair."""
        _, entries = read_header(weights, place)
        sides, dimensions = dict[str, dict[str, Floats]](), tensors_of(lora)
        for entry in entries:
            stem, _, side = entry.name.removesuffix(".weight").rpartition(".lora_")
            known = dimensions.get(side[-1] if side in _TURNED else side, ())
            if not stem.startswith(PREFIX) or len(known) != len(entry.shape):
                raise InvalidInput(f"tensor {entry.name} is no factor of a LoRA", place)
            data = weights.read(entry.stop - entry.start)
            values = floats_of(data, entry.dtype, f"{place}: {entry.name}").reshape(entry.shape)
            if side.startswith("embedding"):  # of a weight of [tokens, hidden]
                side, values = _TURNED[side], np.ascontiguousarray(values.T)
            sides.setdefault(stem.removeprefix(PREFIX), {})[side] = values
        merger, adapted = cls({}), AdaptedModules(lora)
        for name, found in sides.items():
            if found.keys() != dimensions.keys() or found["A"].shape[0] != found["B"].shape[1]:
                raise InvalidInput(f"the factors for {name} do not belong together", place)
            if (size := adapted.of(name)) is None or size.rank != len(found["A"]):
                raise InvalidInput(f"the factors for {name} are not those that {CONFIG} names", place)
            merger.factors[name] = ModuleAdapter(size.scale, found)
        return merger

    def merge(self, source: Readable, target: BinaryIO, place: str) -> None:
        """Copy one safetensors file, and change the weights that the adapter has factors for.

        Raises InvalidInput: the file is damaged, or a weight has another shape or type than the adapter needs.
        """
        header, entries = read_header(source, place)
        target.write(header)
        for entry in entries:
            for block in self.blocks(entry, source, place):
                target.write(block)

    def blocks(self, entry: Entry, source: Readable, place: str) -> Iterator[bytes]:
        """Yield the bytes of the tensor that `source` is at, a few megabytes at a time: merged, or unchanged.

        Raises as `merge` does.
        """
        self._seen.add(entry.name)
        if entry.name.endswith(".weight") and module_of(entry.name) in self.factors:
            return self._merged(entry, source, place)
        parts = parts_of(entry.name, entry.shape)
        if any(module_of(part.name) in self.factors for part in parts):
            row_bytes = entry.shape[2] * ITEM_BYTES[entry.dtype]
            own = (
                Entry(part.name, entry.dtype, (part.num_rows, entry.shape[2]), 0, part.num_rows * row_bytes)
                for part in parts
            )
            return chain.from_iterable(self.blocks(each, source, place) for each in own)
        return _pieces(source, entry.stop - entry.start, _BLOCK_BYTES, place)

    def check_used(self, place: str) -> None:
        """Raise InvalidInput if factors are left whose weight was in none of the files."""
        modules = {module_of(name): name for name in self._seen if name.endswith(".weight")}
        if left := sorted(self.factors.keys() - modules.keys()):
            raise InvalidInput(f"the base model has no {left[0]}, which the adapter changes", place)
        if "lm_head" not in modules and any(name.endswith(EMBEDDING) for name in self.factors):
            raise InvalidInput(
                "the adapter changes embeddings that are tied: the output layer would change, too", place
            )

    def _merged(self, entry: Entry, source: Readable, place: str) -> Iterator[bytes]:
        adapter = self.factors[module_of(entry.name)]
        shape = len(adapter.tensors["B"]), adapter.tensors["A"].shape[1]
        if entry.dtype not in FLOATS or entry.shape != shape:
            have = f"{entry.dtype} of {list(entry.shape)}"
            raise InvalidInput(f"{entry.name} is {have}; the adapter changes floats of {list(shape)}", place)
        row_bytes = entry.shape[1] * FLOATS[entry.dtype]
        row = 0
        for data in _pieces(source, entry.stop - entry.start, max(1, _BLOCK_BYTES // row_bytes) * row_bytes, place):
            weight_OI = floats_of(data, entry.dtype, place).reshape(-1, entry.shape[1])
            yield bytes_of(adapter.merged(weight_OI, row), entry.dtype)
            row += len(weight_OI)


def read_header(file: Readable, place: str) -> tuple[bytes, list[Entry]]:
    """Read a safetensors file up to its first tensor.

    Returns:
        The header's raw bytes, and the tensors in the order of their bytes, which have no gaps between them.

    Raises:
        InvalidInput: this is no safetensors file.
    """
    size = file.read(8)
    if len(size) != 8 or not 2 <= (length := struct.unpack("<Q", size)[0]) <= _MAX_HEADER_BYTES:
        raise InvalidInput(_DAMAGED, place)
    text = file.read(length)
    return size + text, parse_header(text, place)


def parse_header(text: bytes, place: str) -> list[Entry]:
    """Return the tensors of a header, without its length, in the order of their bytes. Raises as `read_header` does."""
    try:
        found: Mapping[str, Any] = json.loads(text)
        entries = [
            Entry(name, str(one["dtype"]), tuple(map(int, one["shape"])), *map(int, one["data_offsets"]))
            for name, one in found.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InvalidInput(_DAMAGED, place) from None
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    for entry, begin in zip(entries, [0, *(entry.stop for entry in entries)], strict=False):
        num_bytes = ITEM_BYTES.get(entry.dtype, 0) * math.prod(entry.shape)
        if entry.start != begin or min(entry.shape, default=0) < 0 or entry.stop - begin != num_bytes:
            raise InvalidInput(f"{_DAMAGED}: tensor {entry.name} of {entry.dtype} does not fit its place", place)
    return entries


def fp8_scale_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of the scales of FP8 weights, [..., outputs, inputs]: a scale of each block."""
    return [*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:])]


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], int]], written_by: str = "pt", **metadata: str) -> bytes:
    """Return the header of a file of tensors in this order: the name, type, shape and bytes of each.

    It is eight bytes of length, then JSON padded with spaces to a multiple of eight.
    """
    content: dict[str, Any] = {"__metadata__": {"format": written_by, **metadata}}
    at = 0
    for name, dtype, shape, num_bytes in tensors:
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def floats_of(data: bytes, dtype: str, place: str) -> Floats:
    """Return little-endian numbers of a safetensors type as float32, exactly. Raises InvalidInput for another type."""
    match dtype:
        case "F32":
            return np.frombuffer(data, "<f4")
        case "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise InvalidInput(f"numbers of the type {dtype} are not merged: F32, F16 and BF16 are", place)


def bytes_of(values: Floats, dtype: str) -> bytes:
    """Return numbers as a safetensors type, F32, F16 or BF16, little-endian and rounded to the nearest."""
    match dtype:
        case "F32":
            return values.astype("<f4").tobytes()
        case "F16":
            return values.astype("<f2").tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, and to even between two
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()


def _pieces(file: Readable, num_bytes: int, most: int, place: str) -> Iterator[bytes]:
    while num_bytes:
        data = file.read(min(most, num_bytes))
        if len(data) != min(most, num_bytes):
            raise InvalidInput("the file ends early", place)
        num_bytes -= len(data)
        yield data
