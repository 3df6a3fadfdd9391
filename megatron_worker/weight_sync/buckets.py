"""Buckets of weights, which of their elements have changed, and the messages about them."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from longshore.fields import Frozen, Sha256
from longshore.training import Lora, Transport
from megatron_worker.engine import Outgoing, TensorBlock
from shared.errors import InvalidInput

# --- Changes: the elements of a tensor that differ from an earlier version, exactly, in three bytes each ---
#
# One step of Adam changes about 2 % of bfloat16 weights. A change is the number of unchanged 2-byte words before it
# (uint8) and the exclusive or of the word's old and new bits (uint16). If more than 255 words lie between two changes,
# changes by 0 are inserted between them.

_BYTES = 3  # of a change
_CHUNK = 1 << 16  # words, or changes, at a time: on the way they take some 80 bytes each


def num_bytes(num_changes: int) -> int:
    """Return the bytes that the changes take: gaps first, then values, which begin at an even byte."""
    return num_changes + num_changes % 2 + 2 * num_changes


def find_changes(new: Tensor, old: Tensor, out: Tensor) -> int | None:
    """Write the changes from `old` to `new` into `out`, uint8. None if they take more bytes than `out` has.

    Args:
        new, old: contiguous, of one shape and of a dtype of 2 or 4 bytes.

    Returns:
        The number of changes.
    """
    most = len(out) // _BYTES
    if not most:
        return 0 if torch.equal(_words(new), _words(old)) else None
    gap_M, value_M = _split(out, most)  # values have their place when it is known how many there are
    total, unchanged = 0, 0  # words since the last change, at the end of the last chunk
    for new_W, old_W in zip(_words(new).split(_CHUNK), _words(old).split(_CHUNK), strict=True):
        bits_W = new_W ^ old_W
        place_C = bits_W.nonzero().flatten()
        if total + len(place_C) > most:
            return None
        if not len(place_C):
            unchanged += len(bits_W)
            continue
        gap_C = place_C.diff(prepend=place_C.new_full((1,), -1 - unchanged)) - 1
        last_C = (gap_C // 256 + 1).cumsum(0) - 1
        end = total + int(last_C[-1]) + 1
        if end > most:
            return None
        gap_M[total:end], value_M[total:end] = 255, 0
        gap_M[total:end][last_C] = (gap_C % 256).to(torch.uint8)
        value_M[total:end][last_C] = bits_W[place_C]
        total, unchanged = end, len(bits_W) - 1 - int(place_C[-1])
    _move(value_M[:total], _split(out, total)[1])
    return total


def _move(source: Tensor, target: Tensor) -> None:
    """Copy to a place that does not lie behind the source; both may overlap."""
    for first in range(0, len(source), _CHUNK):
        target[first : first + _CHUNK].copy_(source[first : first + _CHUNK].clone())


def apply(changes: Tensor, num_changes: int, target: Tensor) -> None:
    """Make changes, uint8 as `find_changes` wrote them, to a contiguous tensor in place.

    Raises ValueError: a change lies behind the tensor's end. Nothing has been changed then.
    """
    if not num_changes:
        return
    gap_X, value_X = _split(changes, num_changes)
    words = _words(target)
    place = sum(int(gap_Y.sum()) + len(gap_Y) for gap_Y in gap_X.split(_CHUNK)) - 1
    if place >= len(words):
        raise ValueError(f"a change of word {place} of {len(words)}")
    place = -1
    for gap_Y, value_Y in zip(gap_X.split(_CHUNK), value_X.split(_CHUNK), strict=True):
        place_Y = (gap_Y.long() + 1).cumsum(0).add_(place)
        words[place_Y.to(words.device)] ^= value_Y.to(words.device)
        place = int(place_Y[-1])


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.int16)


def _split(buffer: Tensor, num_changes: int) -> tuple[Tensor, Tensor]:
    start = num_changes + num_changes % 2
    return buffer[:num_changes], buffer[start : start + 2 * num_changes].view(torch.int16)


# --- Buckets: named tensors as buffers of bytes of a bounded size, each with a description and a checksum ---
#
# A tensor travels in the blocks that ranks hold of it. A block that does not fit into the rest of a bucket is divided
# by rows (slices of its first dimension).

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes
_BUCKET_CHUNK = 1 << 21  # bytes that the checksum takes at a time
_PRIME = 1099511628211
MAX_PARTS = 1 << 20
MAX_BUCKET_BYTES = 16 << 30

Named = Iterable[tuple[str, Tensor]]


class BucketPart(Frozen):
    """Some rows of a tensor in a bucket, at byte `start`; a tensor without a dimension is one row.

    With `num_columns` only this many columns of the rows, from `first_column` on. With `num_changes` the bucket holds
    this many changes of the rows instead of the rows. `checksum`: of the rows, whichever it holds.
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
    checksum: int = 0

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
    """The description of a bucket."""

    number: int = Field(ge=0)
    parts: tuple[BucketPart, ...] = Field(min_length=1, max_length=MAX_PARTS)
    num_bytes: int = Field(ge=0, le=MAX_BUCKET_BYTES, description="of the buffer that are in use")


class Digest:
    """The hash of a version: of names, shapes, dtypes and checksums, in their order. Sender and receiver compute it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            rows = f"{part.first_row} {part.num_rows} {part.first_column} {part.num_columns} {part.checksum}"
            self._hash.update(f"{part.name} {part.dtype} {part.shape} {rows}\n".encode())

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


def device_bytes(outgoing: Outgoing, bucket_bytes: int) -> int:
    """Return the most bytes that a sync may take on the device: its buffers, and a copy of the largest block."""
    blocks = max(block.num_rows * _row_bytes(outgoing, block) for block in outgoing.blocks)
    return NUM_BUFFERS * min(bucket_bytes, all_bytes(outgoing)) + blocks


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
        for chunk in tensor.detach().view(-1).view(torch.uint8).split(_BUCKET_CHUNK):
            whole = len(chunk) // 8 * 8
            aligned = chunk[:whole] if chunk.data_ptr() % 8 == 0 else chunk[:whole].clone()
            words = aligned.view(torch.int64)
            factors = torch.arange(len(words), device=words.device).mul_(2).add_(1)
            rest = int.from_bytes(bytes(chunk[whole:].tolist()), "little")
            found = ((found * _PRIME + int((words * factors).sum())) * _PRIME + rest) % (1 << 64)
    return found


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
        for part in bucket.parts:
            rows = self.rows(part)
            self.names[part.name] = None
            if part.num_changes is None:
                came = view_of(buffer, part)
            else:
                _change(buffer, part, rows)
                came = rows.to(DTYPES[part.dtype]).contiguous()
            if checksum([came]) != part.checksum:
                message = "the checksum differs: these are not the bytes that were sent"
                raise InvalidInput(message, f"bucket {bucket.number}")
            if part.num_changes is None:
                rows.copy_(came)
        self._digest.add(bucket)

    def finish(self) -> Sha256:
        """Return the version's digest. Raises InvalidInput when rows are missing."""
        missing = [n for n, t in self._targets.items() if t.numel() and not (n in self._last and self._last[n].is_last)]
        if missing:
            raise InvalidInput(f"{len(missing)} tensors are not complete, the first is {missing[0]}", "weight_sync")
        return self._digest.value


def _change(buffer: Tensor, part: BucketPart, rows: Tensor) -> None:
    if rows.itemsize < DTYPES[part.dtype].itemsize:
        raise InvalidInput(f"changes of {part.dtype} do not apply to {rows.dtype}", part.name)
    assert part.num_changes is not None
    # A copy only if the part has some of the columns, or the model keeps the tensor in a wider dtype.
    whole = rows.to(DTYPES[part.dtype]).contiguous()
    try:
        apply(buffer[part.start :], part.num_changes, whole)
    except ValueError as error:
        raise InvalidInput(str(error), part.name) from error
    if whole.data_ptr() != rows.data_ptr():
        rows.copy_(whole)


def aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


# --- Messages between a trainer and a sampler, each a JSON object of one of these schemas ---
# The trainer begins.
#
#     trainer: Announcement     sampler: Reply
#     trainer: connect          sampler: Reply, when it has the buffers; calls before it while it joins a group
#     trainer: bucket           sampler: Reply, when it has read it
#     trainer: commit           sampler: Reply, when samples are drawn from the version
#
# The trainer sends `bucket` messages before earlier ones are answered, as far as there are buffers. By `tcp` the
# bucket's bytes follow its message.

NUM_BUFFERS = 2
HANDLE = r"^([0-9a-f]{2}){0,512}$"
VALUE = r"^([0-9a-f]{2}){0,8192}$"


class SyncBroken(Exception):
    """The other end is gone, is silent for too long, or refuses. The message says which."""


class Announcement(Frozen):
    """A sync's first message: the version that will be sent. `shapes_sha256`: of all names and shapes.

    `lora`: the weights are an adapter's; absent: they are the model's own. `base_digest`: changes are to this version.
    `name`: the version replaces the one served under this name, and running samples continue with it. `waits`: without
    a name, whether the sampler waits until nobody uses the version before; otherwise it refuses the sync in that case.
    """

    schema_version: Literal[2] = 2
    run_id: str = Field(max_length=256)
    version: int = Field(ge=0)
    transport: Transport = "shared_memory"
    shapes_sha256: Sha256
    lora: Lora | None = None
    base_digest: Sha256 | None = None
    name: str | None = Field(default=None, min_length=1, max_length=512)
    waits: bool = True
    buffer_bytes: int = Field(gt=0, le=MAX_BUCKET_BYTES)


class GroupPlace(Frozen):
    """A member's place in a group whose rank 0 is the trainer. `name` is drawn anew for each group."""

    rank: int = Field(ge=1, le=64)
    size: int = Field(ge=2, le=65)
    name: Sha256


class CudaHandle(Frozen):
    """A buffer on a CUDA device of this machine, as CUDA's inter-process handles describe it; bytes in hexadecimal."""

    device: int = Field(ge=0, le=63)
    handle: str = Field(pattern=HANDLE)
    storage_bytes: int = Field(ge=0, le=2 * MAX_BUCKET_BYTES)
    storage_offset_bytes: int = Field(ge=0, le=1 << 48)
    counter_handle: str = Field(pattern=HANDLE)
    counter_offset: int = Field(ge=0, le=1 << 48)
    event_handle: str = Field(pattern=HANDLE)
    needs_event: bool


class Connect(Frozen):
    """What a sampler needs besides the announcement. For shared_memory, file descriptors follow with a zero byte."""

    group: GroupPlace | None = None
    handles: tuple[CudaHandle, ...] = Field(default=(), max_length=NUM_BUFFERS)


class Commit(Frozen):
    digest: Sha256


class SyncMessage(Frozen):
    """A message of the trainer after its first: exactly one of these fields is set."""

    connect: Connect | None = None
    bucket: Bucket | None = None
    commit: Commit | None = None


class SyncCall(Frozen):
    """A sampler's call of the store of a group that it joins (transports/collective.py)."""

    do: Literal["set", "get", "check"]
    key: str = Field(max_length=512)
    value: str = Field(default="", pattern=VALUE)


class SyncAnswer(Frozen):
    """`value`: the result of a get, absent if nobody has set it in time. A check gives it if the key is set."""

    value: str | None = Field(default=None, pattern=VALUE)


class SyncReply(Frozen):
    """`refused`: why the sampler takes no more. `needs_all`: it does not have the version that the changes apply to.

    `waits`: the reply will follow, as samples are still drawn from the version before. `call`: this is no reply but a
    call, which the trainer answers.
    """

    refused: str | None = None
    needs_all: bool = False
    waits: bool = False
    call: SyncCall | None = None
