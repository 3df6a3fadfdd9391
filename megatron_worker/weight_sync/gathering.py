"""The parts of a bucket from the ranks that hold them. Each compares and copies its own blocks alone.

Rank 0 orders a bucket from every other member, which then sends its parts of it, one by one, during the passes
(`SideRanks`); so none of them ever holds more than a block and a part. Messages are int64: an order is one number; for
each part comes first a head of two, the number of changes and the checksum, and then its bytes.
"""

import traceback
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from longshore.fields import Sha256
from megatron_worker.engine import Outgoing, TensorBlock
from megatron_worker.process.background import BackgroundCall
from megatron_worker.process.process_group import SideRanks
from megatron_worker.weight_sync import changes
from megatron_worker.weight_sync.buckets import (
    DTYPES,
    Bucket,
    BucketPart,
    Piece,
    aligned,
    checksum,
    cut_buckets,
    joined,
)

_STOP, _ROWS, _CHANGES = 0, 1, 2  # orders
_WHOLE, _FAILED = -1, -2  # in the place of a number of changes


class LastSent:
    """This rank's part of the last version that was sent, copied to the host, to find changes against.

    `digest`: of that version, on rank 0; None while the copies are not of one version.
    """

    def __init__(self) -> None:
        self.digest: Sha256 | None = None
        self._copies: dict[TensorBlock, Tensor] = {}

    def rows(self, block: TensorBlock, part: BucketPart) -> Tensor:
        """Return the copy of some rows of a block; a new one is of zeros."""
        if block not in self._copies:
            self._copies[block] = torch.zeros(block.shape_of(part.shape), dtype=DTYPES[part.dtype])
        return _rows_of(self._copies[block], block, part)


class OwnBlocks:
    """This rank's blocks, one at a time: asking for a block's first rows makes it, and frees the one before."""

    def __init__(self, outgoing: Outgoing, sent: LastSent | None) -> None:
        self._outgoing, self._sent = outgoing, sent
        self._block: TensorBlock | None = None
        self._held: Tensor | None = None

    def rows(self, block: TensorBlock, part: BucketPart) -> Tensor | None:
        """Return a part's rows; None if another rank has them. To be called for parts in their order."""
        if block != self._block:
            # First: what failed is not asked for again, as other ranks may have sent what they have of it.
            self._block, self._held = block, None
            self._held = self._outgoing.held(block)
        elif self._held is None and block.rank == self._outgoing.ranks.rank:
            raise RuntimeError(f"{block.name} could not be read")
        return None if self._held is None else _rows_of(self._held, block, part)

    def changes(self, piece: Piece, rows: Tensor, out: Tensor | None) -> int | None:
        """Write the changes from the copy to a part's rows into `out`, uint8, and have the copy follow.

        Returns their number. None: they are longer than the rows, or there is no `out`.
        """
        if self._sent is None:
            return None
        copy = self._sent.rows(*piece)
        num = None if out is None else changes.find_changes(rows.cpu(), copy, out)
        copy.copy_(rows)
        return num


class Gathering:
    """Rank 0's end. `end` must be called once, after errors too."""

    def __init__(self, outgoing: Outgoing, sent: LastSent | None) -> None:
        self._own = OwnBlocks(outgoing, sent)
        self._ranks = outgoing.ranks
        self._others = [rank for rank in outgoing.members if rank != outgoing.ranks.rank]

    def fill(self, buffer: Tensor, number: int, pieces: Sequence[Piece], only_changes: bool) -> Bucket:
        """Fill a buffer of bytes, uint8, with a bucket's parts: with their changes if those are shorter.

        Raises OSError: another rank could not read what it holds. Every rank has ended with this bucket, as without it.
        """
        self._order(_CHANGES if only_changes else _ROWS)
        parts, sums, end = list[BucketPart](), list[int](), 0
        fault: Exception | None = None
        for piece in pieces:
            part, start = piece[1], aligned(end)
            room = buffer[start : start + part.num_bytes]
            try:
                num, found = self._fill_part(piece, room, only_changes)
            except Exception as error:  # the other ranks continue sending
                fault, num, found = fault or error, 0, 0
            parts.append(part.model_copy(update={"start": start, "num_changes": num}))
            sums.append(found)
            end = start + (part.num_bytes if num is None else changes.num_bytes(num))
        if fault is not None:
            raise fault
        return Bucket(number=number, parts=tuple(parts), num_bytes=end, checksum=joined(sums))

    def _fill_part(self, piece: Piece, room: Tensor, only_changes: bool) -> tuple[int | None, int]:
        """Fill `room` with a part. Returns the number of changes (None: it is the rows), and the rows' checksum."""
        block, part = piece
        if block.rank != self._ranks.rank:
            return self._take(block, room)
        rows = self._own.rows(block, part)
        assert rows is not None
        num = self._own.changes(piece, rows, room if only_changes else None)
        if num is None:
            room.view(rows.dtype).view(rows.shape).copy_(rows)
        return num, checksum([rows])

    def _take(self, block: TensorBlock, room: Tensor) -> tuple[int | None, int]:
        head = torch.zeros(2, dtype=torch.int64)
        self._ranks.receive(head, block.rank)
        num, found = head.tolist()
        if num == _FAILED:
            raise OSError(f"rank {block.rank} could not read its part of {block.name}: its output says why")
        self._ranks.receive(room if num == _WHOLE else room[: changes.num_bytes(num)], block.rank)
        return None if num == _WHOLE else num, found % (1 << 64)

    def end(self) -> None:
        """Let the other members go."""
        self._order(_STOP)

    def _order(self, what: int) -> None:
        for rank in self._others:
            self._ranks.send(torch.tensor([what]), rank)


class Giving:
    """Another member's end. Its weights must not change before `wait` has returned."""

    def __init__(self, outgoing: Outgoing, bucket_bytes: int, sent: LastSent | None) -> None:
        self._call = BackgroundCall(lambda _: _give_all(outgoing, bucket_bytes, sent))

    def wait(self) -> None:
        """Wait until rank 0 needs nothing more of this rank."""
        self._call.result()


@torch.inference_mode()
def _give_all(outgoing: Outgoing, bucket_bytes: int, sent: LastSent | None) -> None:
    own, order = OwnBlocks(outgoing, sent), torch.zeros(1, dtype=torch.int64)
    for pieces in chain(
        cut_buckets(outgoing, bucket_bytes), [[]]
    ):  # after the last bucket, too, comes an order to stop
        outgoing.ranks.receive(order, 0)
        if order == _STOP:
            return
        for piece in pieces:
            _give(own, piece, outgoing.ranks, bool(order == _CHANGES))


def _give(own: OwnBlocks, piece: Piece, ranks: SideRanks, only_changes: bool) -> None:
    """Send a part to rank 0, if this rank holds it."""
    block, part = piece
    head, data = [_FAILED, 0], torch.empty(0, dtype=torch.uint8)
    try:
        if (rows := own.rows(block, part)) is None:
            return
        out = torch.empty(part.num_bytes, dtype=torch.uint8) if only_changes else None
        num, found = own.changes(piece, rows, out), checksum([rows])
        head = [_WHOLE if num is None else num, found if found < 1 << 63 else found - (1 << 64)]
        data = rows.reshape(-1).view(torch.uint8) if num is None or out is None else out[: changes.num_bytes(num)]
    except Exception:  # rank 0 gets the error
        traceback.print_exc()
    if block.rank == ranks.rank:
        ranks.send(torch.tensor(head), 0)
        ranks.send(data, 0)


def _rows_of(held: Tensor, block: TensorBlock, part: BucketPart) -> Tensor:
    if not held.dim():
        return held
    first = part.first_row - block.first_row
    return held[first : first + part.num_rows]
