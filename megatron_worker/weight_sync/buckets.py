"""Buckets: named tensors as buffers of bytes of a bounded size, each with a description and a checksum.

A tensor travels in the blocks that ranks hold of it. A block that does not fit into the rest of a bucket is divided by
rows (slices of its first dimension).
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from longshore.fields import Frozen, Sha256
from megatron_worker.engine import Outgoing, TensorBlock
from megatron_worker.weight_sync import changes
from shared.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes
_CHUNK = 1 << 21  # bytes that the checksum takes at a time
_PRIME = 1099511628211
MAX_PARTS = 1 << 20
MAX_BUCKET_BYTES = 16 << 30

Named = Iterable[tuple[str, Tensor]]


class BucketPart(Frozen):
    """Some rows of a tensor in a bucket, at byte `start`; a tensor without a dimension is one row.

    With `num_columns` only this many columns of the rows, from `first_column` on. With `num_changes` the bucket holds
    this many changes of the rows (changes.py) instead of the rows.
    """

    name: str = Field(max_length=512)
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...] = Field(max_length=8, description="of the whole tensor")
    first_row: int = Field(ge=0)
    num_rows: int = Field(ge=0)
    first_column: int = Field(default=0, ge=0)
    num_columns: int | None = Field(default=None, ge=1)
    start: int = Field(ge=0, multiple_of=ALIGNMENT)
    num_changes: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _holds_rows(self) -> Self:
        if min(self.shape, default=1) < 0 or self.first_row + self.num_rows > (self.shape[0] if self.shape else 1):
            raise ValueError(f"rows {self.first_row} to {self.first_row + self.num_rows} of shape {list(self.shape)}")
        if self.end_column > self._width or (self.num_columns is None and self.first_column):
            raise ValueError(f"columns {self.first_column} to {self.end_column} of shape {list(self.shape)}")
        return self

    @property
    def _width(self) -> int:
        """The tensor's columns; what has less than two dimensions has one of none."""
        return self.shape[1] if len(self.shape) > 1 else 0

    @property
    def end_column(self) -> int:
        return self._width if self.num_columns is None else self.first_column + self.num_columns

    @property
    def is_last(self) -> bool:
        """True of a tensor's last rows with its last columns."""
        is_bottom = self.first_row + self.num_rows == (self.shape[0] if self.shape else 1)
        return is_bottom and self.end_column == self._width

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape of the rows, of the columns that are here."""
        columns = self.shape[1:2] if self.num_columns is None else (self.num_columns,)
        return (self.num_rows, *columns, *self.shape[2:]) if self.shape else ()

    def of(self, whole: Tensor) -> Tensor:
        """Return the rows as a view of the whole tensor."""
        if not whole.dim():
            return whole
        rows = whole[self.first_row : self.first_row + self.num_rows]
        return rows if self.num_columns is None else rows[:, self.first_column : self.end_column]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows themselves."""
        return torch.Size(self.rows_shape).numel() * DTYPES[self.dtype].itemsize


class Bucket(Frozen):
    """The description of a bucket. `checksum`: of its parts' rows, as `joined` makes it of the checksum of each."""

    number: int = Field(ge=0)
    parts: tuple[BucketPart, ...] = Field(min_length=1, max_length=MAX_PARTS)
    num_bytes: int = Field(ge=0, le=MAX_BUCKET_BYTES, description="of the buffer that are in use")
    checksum: int


class Digest:
    """The hash of a version: of names, shapes, dtypes and checksums, in their order. Sender and receiver compute it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            rows = f"{part.first_row} {part.num_rows} {part.first_column} {part.num_columns}"
            self._hash.update(f"{part.name} {part.dtype} {part.shape} {rows}\n".encode())
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


Piece = tuple[TensorBlock, BucketPart]
"""A part, and the block that it is some rows of."""


def cut_buckets(outgoing: Outgoing, bucket_bytes: int) -> Iterator[list[Piece]]:
    """Divide blocks into buckets' parts, which `check_divisible` has found to be possible."""
    dtype, end = outgoing.dtype, 0
    pieces: list[Piece] = []
    for block in outgoing.blocks:
        shape, first, row_bytes = outgoing.shapes[block.name], 0, _row_bytes(outgoing, block)
        while first < block.num_rows:
            taken = min(block.num_rows - first, (bucket_bytes - end) // max(1, row_bytes))
            if taken:
                part = BucketPart(
                    name=block.name,
                    dtype=_NAMES[dtype],
                    shape=shape,
                    first_row=block.first_row + first,
                    num_rows=taken,
                    first_column=block.first_column,
                    num_columns=block.num_columns,
                    start=end,
                )
                pieces.append((block, part))
                end = min(bucket_bytes, aligned(end + part.num_bytes))
                first += taken
            if first < block.num_rows or end == bucket_bytes:
                yield pieces
                pieces, end = [], 0
    if pieces:
        yield pieces


def check_divisible(outgoing: Outgoing, bucket_bytes: int) -> None:
    """Raise InvalidInput for tensors of a dtype that does not travel, and for rows that are larger than a bucket."""
    if outgoing.dtype not in _NAMES:
        raise InvalidInput(f"weights are {outgoing.dtype}: only {' and '.join(DTYPES)} travel", "weight_sync")
    for block in outgoing.blocks:
        if (row_bytes := _row_bytes(outgoing, block)) > bucket_bytes:
            message = f"a row of {block.name} has {row_bytes} bytes, which a bucket of {bucket_bytes} does not hold"
            raise InvalidInput(message, "weight_sync.bucket_bytes")


def all_bytes(outgoing: Outgoing) -> int:
    """Return the bytes of a buffer that holds everything."""
    return sum(aligned(block.num_rows * _row_bytes(outgoing, block)) for block in outgoing.blocks)


def _row_bytes(outgoing: Outgoing, block: TensorBlock) -> int:
    return math.prod(block.shape_of(outgoing.shapes[block.name])[1:]) * outgoing.dtype.itemsize


def view_of(buffer: Tensor, part: BucketPart) -> Tensor:
    """Return a part's rows in a buffer."""
    return buffer[part.start : part.start + part.num_bytes].view(DTYPES[part.dtype]).view(part.rows_shape)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a sum of the tensors' bits that notices changed, missing and exchanged elements; for faults, not attacks.

    Of 8-byte words x_i in chunks: h ← 1099511628211 h + Σ (2 i + 1) x_i modulo 2^64, then the same for the bytes that
    are left. The same on every device.
    """
    found = 0
    for tensor in tensors:
        for chunk in tensor.detach().view(-1).view(torch.uint8).split(_CHUNK):
            whole = len(chunk) // 8 * 8
            aligned = chunk[:whole] if chunk.data_ptr() % 8 == 0 else chunk[:whole].clone()
            words = aligned.view(torch.int64)
            factors = torch.arange(len(words), device=words.device).mul_(2).add_(1)
            rest = int.from_bytes(bytes(chunk[whole:].tolist()), "little")
            found = ((found * _PRIME + int((words * factors).sum())) * _PRIME + rest) % (1 << 64)
    return found


def joined(checksums: Iterable[int]) -> int:
    """Return a bucket's checksum, computed from the checksums of its parts."""
    return reduce(lambda found, one: (found * _PRIME + one) % (1 << 64), checksums, 0)


class Assembly:
    """Puts the rows of a version's buckets into tensors, and sees that every element comes exactly once.

    Args:
        targets: by name, contiguous tensors to write into.

    Attributes:
        names: of the tensors that have come, in the sender's order.
    """

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self.names: dict[str, None] = {}
        self._targets = targets
        self._last = dict[str, BucketPart]()  # the last part received of each tensor
        self._digest = Digest()

    def rows(self, part: BucketPart) -> Tensor:
        """Return the rows that a part is written to, which is the next one then.

        Raises InvalidInput: the tensor is unknown or has another shape, or other rows or columns are due.
        """
        target = self._targets.get(part.name)
        if target is None:
            raise InvalidInput("this model has no such tensor", part.name)
        if tuple(target.shape) != part.shape:
            raise InvalidInput(f"it has shape {list(part.shape)}, expected {list(target.shape)}", part.name)
        came, due = (part.first_row, part.first_column, part.end_column), self._due(part)
        if came != due:
            raise InvalidInput(f"row {came[0]}, columns {came[1:]} came where {due[0]}, {due[1:]} is due", part.name)
        self._last[part.name] = part
        return part.of(target)

    def _due(self, part: BucketPart) -> tuple[int, int, int]:
        """Return the first row and the columns of the next part of a tensor: after some columns of all rows, the next
        columns, as many as the part has.
        """
        if (last := self._last.get(part.name)) is None:
            return 0, 0, part.end_column
        if (end := last.first_row + last.num_rows) < math.prod(last.shape[:1]) or last.is_last:
            return end, last.first_column, last.end_column
        return 0, last.end_column, part.end_column

    def put(self, bucket: Bucket, buffer: Tensor) -> None:
        """Write a bucket's rows, or make its changes.

        Raises InvalidInput: see `rows`; or the rows are not those that were sent.
        """
        pairs = [(part, self.rows(part)) for part in bucket.parts]
        for part, rows in pairs:
            self.names[part.name] = None
            if part.num_changes is not None:
                _change(buffer, part, rows)
        # Rows that came whole are checked before they are written.
        if joined(checksum([_source(buffer, *pair)]) for pair in pairs) != bucket.checksum:
            raise InvalidInput(
                "the checksum differs: these are not the bytes that were sent", f"bucket {bucket.number}"
            )
        for part, rows in pairs:
            if part.num_changes is None:
                rows.copy_(view_of(buffer, part))
        self._digest.add(bucket)

    def finish(self) -> Sha256:
        """Return the version's digest. Raises InvalidInput when rows are missing."""
        missing = [n for n, t in self._targets.items() if t.numel() and not (n in self._last and self._last[n].is_last)]
        if missing:
            raise InvalidInput(f"{len(missing)} tensors are not complete, the first is {missing[0]}", "weight_sync")
        return self._digest.value


def _source(buffer: Tensor, part: BucketPart, rows: Tensor) -> Tensor:
    return view_of(buffer, part) if part.num_changes is None else rows.to(DTYPES[part.dtype]).contiguous()


def _change(buffer: Tensor, part: BucketPart, rows: Tensor) -> None:
    if rows.itemsize < DTYPES[part.dtype].itemsize:
        raise InvalidInput(f"changes of {part.dtype} do not apply to {rows.dtype}", part.name)
    assert part.num_changes is not None
    # A copy only if the part has some of the columns, or the model keeps the tensor in a wider dtype.
    whole = rows.to(DTYPES[part.dtype]).contiguous()
    try:
        changes.apply(buffer[part.start :], part.num_changes, whole)
    except ValueError as error:
        raise InvalidInput(str(error), part.name) from error
    if whole.data_ptr() != rows.data_ptr():
        rows.copy_(whole)


def aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
