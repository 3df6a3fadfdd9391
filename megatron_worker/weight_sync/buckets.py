"""Buckets: named tensors as buffers of bytes of a bounded size, each with a description and a checksum.

A tensor larger than what is left of a bucket is divided by rows (slices of its first dimension).
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megatron_worker.weight_sync import changes
from shared.contract import Frozen, Sha256
from shared.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes
_CHUNK = 1 << 21  # bytes that the checksum takes at a time
_PRIME = 1099511628211
MAX_PARTS = 1 << 20
MAX_BUCKET_BYTES = 16 << 30

Named = Iterable[tuple[str, Tensor]]


class Part(Frozen):
    """Some rows of a tensor in a bucket, at byte `start`; a tensor without a dimension is one row.

    With `num_changes` the bucket holds no rows but so many changes of them (changes.py).
    """

    name: str = Field(max_length=512)
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...] = Field(max_length=8, description="of the whole tensor")
    first_row: int = Field(ge=0)
    num_rows: int = Field(ge=0)
    start: int = Field(ge=0, multiple_of=ALIGNMENT)
    num_changes: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _holds_rows(self) -> Self:
        if min(self.shape, default=1) < 0 or self.first_row + self.num_rows > (self.shape[0] if self.shape else 1):
            raise ValueError(f"rows {self.first_row} to {self.first_row + self.num_rows} of shape {list(self.shape)}")
        return self

    @property
    def rows_shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.shape[1:]) if self.shape else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows themselves."""
        return torch.Size(self.rows_shape).numel() * DTYPES[self.dtype].itemsize


class Bucket(Frozen):
    """The description of a bucket. `checksum`: of its parts' rows, one after another, as `checksum` has it."""

    number: int = Field(ge=0)
    parts: tuple[Part, ...] = Field(min_length=1, max_length=MAX_PARTS)
    num_bytes: int = Field(ge=0, le=MAX_BUCKET_BYTES, description="of the buffer that are in use")
    checksum: int


class Digest:
    """The hash of a version: of names, shapes, dtypes and checksums, in their order. Sender and receiver compute it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            self._hash.update(f"{part.name} {part.dtype} {part.shape} {part.first_row} {part.num_rows}\n".encode())
        self._hash.update(f"{bucket.checksum}\n".encode())

    @property
    def value(self) -> Sha256:
        return self._hash.hexdigest()


def shapes_sha256(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Sha256:
    """Return a hash of tensors' names and shapes, in any order: whether weights are of a receiver's model."""
    return hashlib.sha256(repr(sorted((name, tuple(shape)) for name, shape in shapes)).encode()).hexdigest()


def weights_sha256(tensors: Named) -> Sha256:
    """Return a hash of tensors' names, shapes and bits, in any order: the same however they came to lie in memory."""
    found = sorted((name, tuple(tensor.shape), str(tensor.dtype), checksum([tensor])) for name, tensor in tensors)
    return hashlib.sha256(repr(found).encode()).hexdigest()


def cut(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Divide tensors into buckets' parts; no row is larger than a bucket.

    Raises:
        InvalidInput: tensors of this dtype do not travel.
    """
    if dtype not in _NAMES:
        raise InvalidInput(f"weights are {dtype}: only {' and '.join(DTYPES)} travel", "weight_sync")
    parts: list[Part] = []
    end = 0
    for name, shape in shapes.items():
        first, num_rows = 0, shape[0] if shape else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        assert row_bytes <= bucket_bytes, (name, row_bytes)
        while first < num_rows:
            taken = min(num_rows - first, (bucket_bytes - end) // max(1, row_bytes))
            if taken:
                part = Part(
                    name=name,
                    dtype=_NAMES[dtype],
                    shape=tuple(shape),
                    first_row=first,
                    num_rows=taken,
                    start=end,
                )
                parts.append(part)
                end = min(bucket_bytes, aligned(end + part.num_bytes))
                first += taken
            if first < num_rows or end == bucket_bytes:
                yield tuple(parts)
                parts, end = [], 0
    if parts:
        yield tuple(parts)


class Drawn:
    """Tensors that are drawn one at a time: the next one when its first rows are asked for, and the last one is freed.

    Gathering a tensor makes a copy of it, and buffers are all that a sync should take beside the weights.
    """

    def __init__(self, tensors: Named) -> None:
        self._tensors = iter(tensors)
        self._name = ""
        self._tensor: Tensor | None = None

    def rows(self, part: Part) -> Tensor:
        """Return a part's rows. Parts are asked for in the tensors' order."""
        while self._name != part.name:
            self._tensor = None
            self._name, self._tensor = next(self._tensors)
        assert self._tensor is not None and self._tensor.dtype == DTYPES[part.dtype]
        whole = self._tensor.detach()
        return whole[part.first_row : part.first_row + part.num_rows] if whole.dim() else whole


def fill(buffer: Tensor, number: int, parts: Sequence[Part], drawn: Drawn) -> Bucket:
    """Copy parts' rows into a buffer of bytes, uint8 [bucket_bytes]. Returns the description."""
    for part in parts:
        view_of(buffer, part).copy_(drawn.rows(part))
    used = parts[-1].start + parts[-1].num_bytes
    found = checksum(view_of(buffer, part) for part in parts)
    return Bucket(number=number, parts=tuple(parts), num_bytes=used, checksum=found)


def view_of(buffer: Tensor, part: Part) -> Tensor:
    """Return a part's rows in a buffer."""
    return buffer[part.start : part.start + part.num_bytes].view(DTYPES[part.dtype]).view(part.rows_shape)


def checksum(tensors: Iterable[Tensor], found: int = 0) -> int:
    """Return a sum of the tensors' bits that notices changed, missing and exchanged elements; for faults, not attacks.

    Of 8-byte words x_i in chunks: h ← 1099511628211 h + Σ (2 i + 1) x_i modulo 2^64, then the same for the bytes that
    are left. The same on every device. `found`: h of the tensors before.
    """
    for tensor in tensors:
        for chunk in tensor.detach().view(-1).view(torch.uint8).split(_CHUNK):
            whole = len(chunk) // 8 * 8
            aligned = chunk[:whole] if chunk.data_ptr() % 8 == 0 else chunk[:whole].clone()
            words = aligned.view(torch.int64)
            factors = torch.arange(len(words), device=words.device).mul_(2).add_(1)
            rest = int.from_bytes(bytes(chunk[whole:].tolist()), "little")
            found = ((found * _PRIME + int((words * factors).sum())) * _PRIME + rest) % (1 << 64)
    return found


class Assembly:
    """Puts the rows of a version's buckets into tensors, and sees that every row comes exactly once.

    Args:
        targets: by name, contiguous tensors to write into.

    Attributes:
        names: of the tensors that have come, in the sender's order.
    """

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self.names: dict[str, None] = {}
        self._targets = targets
        self._next_row = dict.fromkeys(targets, 0)
        self._digest = Digest()

    def rows(self, part: Part) -> Tensor:
        """Return the rows that a part is written to.

        Raises:
            InvalidInput: the tensor is unknown or has another shape, or other rows are due.
        """
        target = self._targets.get(part.name)
        if target is None:
            raise InvalidInput("this model has no such tensor", part.name)
        if tuple(target.shape) != part.shape:
            raise InvalidInput(f"it has shape {list(part.shape)}, expected {list(target.shape)}", part.name)
        if part.first_row != self._next_row[part.name]:
            raise InvalidInput(f"row {part.first_row} came where {self._next_row[part.name]} is due", part.name)
        return target[part.first_row : part.first_row + part.num_rows] if target.dim() else target

    def put(self, bucket: Bucket, buffer: Tensor) -> None:
        """Write a bucket's rows, or make its changes.

        Raises:
            InvalidInput: see `rows`; or the rows are not those that were sent.
        """
        pairs = [(part, self.rows(part)) for part in bucket.parts]
        for part, rows in pairs:
            self.names[part.name] = None
            self._next_row[part.name] += part.num_rows
            if part.num_changes is not None:
                _change(buffer, part, rows)
        # Rows that came whole are checked before they are written.
        if checksum(_source(buffer, *pair) for pair in pairs) != bucket.checksum:
            raise InvalidInput(
                "the checksum differs: these are not the bytes that were sent", f"bucket {bucket.number}"
            )
        for part, rows in pairs:
            if part.num_changes is None:
                rows.copy_(view_of(buffer, part))
        self._digest.add(bucket)

    def finish(self) -> Sha256:
        """Return the version's digest. Raises InvalidInput when rows are missing."""
        missing = [n for n, t in self._targets.items() if self._next_row[n] < (t.shape[0] if t.dim() else 1)]
        if missing:
            raise InvalidInput(f"{len(missing)} tensors are not complete, the first is {missing[0]}", "weight_sync")
        return self._digest.value


def _source(buffer: Tensor, part: Part, rows: Tensor) -> Tensor:
    return view_of(buffer, part) if part.num_changes is None else rows


def _change(buffer: Tensor, part: Part, rows: Tensor) -> None:
    if rows.dtype != DTYPES[part.dtype]:
        raise InvalidInput(f"changes of {part.dtype} do not apply to {rows.dtype}", part.name)
    assert part.num_changes is not None
    try:
        changes.apply(buffer[part.start :], part.num_changes, rows)
    except ValueError as error:
        raise InvalidInput(str(error), part.name) from error


def aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
