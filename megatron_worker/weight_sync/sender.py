"""The trainer's end of a sync: weights into two buffers in turn, to all samplers at once, during the trainer's work."""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshore.fields import Sha256
from longshore.training import SyncOutcome, Transport
from megatron_worker.engine import Outgoing, TensorBlock
from megatron_worker.process.ranks import BackgroundCall, SideRanks
from megatron_worker.weight_sync import buckets
from megatron_worker.weight_sync.buckets import (
    DTYPES,
    Announcement,
    Bucket,
    BucketPart,
    Commit,
    Digest,
    Piece,
    SyncMessage,
    aligned,
    all_bytes,
    check_divisible,
    checksum,
    cut_buckets,
    shapes_sha256,
)
from megatron_worker.weight_sync.transports.protocol import Outbound
from megatron_worker.weight_sync.transports.table import choose, ends_of, why_not
from shared.jobs.job import SyncAccess, SyncTarget

# --- Profile ---
# The phases of a sync as each rank sees them, and their traces in files that chrome://tracing and Perfetto read.

_MAX_BYTES = 64 << 20


class SyncProfile:
    """Appends the phases of one sync to a file: a JSON array with an event a line, never closed, as the format allows.

    Without a path nothing is kept or written. The file of another rank than 0 has the rank in its name, before the
    suffix, and is on its own machine.
    """

    def __init__(self, path: str | None, rank: int = 0) -> None:
        file = Path(path) if path is not None else None
        self._path = file.with_name(f"{file.stem}.rank{rank}{file.suffix}") if file is not None and rank else file
        self._rank = rank
        self._events: list[dict[str, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter a phase. Rank 0: prepare, connect; for each bucket settle, fill and send; settle, commit, finalize.
        Each rank first: offload, if the optimizer's state leaves the device.

        Another rank, for each bucket: wait (for rank 0's order) and give.
        """
        began = time.time()
        try:
            yield
        finally:
            name, _, bucket = name.partition(" ")
            times = {"ts": round(began * 1e6), "dur": round((time.time() - began) * 1e6)}  # microseconds
            arguments = {"bucket": int(bucket)} if bucket else {}
            self._events.append({"name": name, "ph": "X", "pid": os.getpid(), "tid": 0, **times, "args": arguments})

    def end(self, run_id: str, version: int, transport: Transport) -> str | None:
        """End a sync. Returns why its trace could not be written."""
        if self._path is None:
            return None
        whose = {"run": run_id, "version": version, "transport": transport, "rank": self._rank}
        lines = "".join(json.dumps(event | {"args": whose | event["args"]}) + ",\n" for event in self._events)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags, 0o600), "w") as file:
                size = os.fstat(file.fileno()).st_size
                if size + len(lines) > _MAX_BYTES:
                    return f"the profile has {size} bytes, of {_MAX_BYTES} that it may have"
                file.write(("" if size else "[\n") + lines)
        except OSError as error:
            return f"the profile cannot be written: {error.strerror}"
        return None


# --- The parts of a bucket from the ranks that hold them. Each compares and copies its own blocks alone ---
#
# Rank 0 orders a bucket from every other member, which then sends its parts of it, one by one, during the passes
# (`SideRanks`); so none of them ever holds more than a block and a part. Messages are int64: an order is one number;
# for each part comes first a head of two, the number of changes and the checksum, and then its bytes.

_STOP, _ROWS, _CHANGES = 0, 1, 2  # orders
_WHOLE, _FAILED = -1, -2  # in the place of a number of changes


class DeltaBase:
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

    def __init__(self, outgoing: Outgoing, sent: DeltaBase | None) -> None:
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
        num = None if out is None else buckets.find_changes(rows.cpu(), copy, out)
        copy.copy_(rows)
        return num


class Gathering:
    """Rank 0's end. `end` must be called once, after errors too."""

    def __init__(self, outgoing: Outgoing, sent: DeltaBase | None) -> None:
        self._own = OwnBlocks(outgoing, sent)
        self._ranks = outgoing.ranks
        self._others = [rank for rank in outgoing.members if rank != outgoing.ranks.rank]

    def fill(self, buffer: Tensor, number: int, pieces: Sequence[Piece], only_changes: bool) -> Bucket:
        """Fill a buffer of bytes, uint8, with a bucket's parts: with their changes if those are shorter.

        Raises OSError: another rank could not read what it holds. Every rank has ended with this bucket, as without it.
        """
        self._order(_CHANGES if only_changes else _ROWS)
        parts, end = list[BucketPart](), 0
        fault: Exception | None = None
        for piece in pieces:
            part, start = piece[1], aligned(end)
            room = buffer[start : start + part.num_bytes]
            try:
                num, found = self._fill_part(piece, room, only_changes)
            except Exception as error:  # the other ranks continue sending
                fault, num, found = fault or error, 0, 0
            parts.append(part.model_copy(update={"start": start, "num_changes": num, "checksum": found}))
            end = start + (part.num_bytes if num is None else buckets.num_bytes(num))
        if fault is not None:
            raise fault
        return Bucket(number=number, parts=tuple(parts), num_bytes=end)

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
        self._ranks.receive(room if num == _WHOLE else room[: buckets.num_bytes(num)], block.rank)
        return None if num == _WHOLE else num, found % (1 << 64)

    def end(self) -> None:
        """Let the other members go."""
        self._order(_STOP)

    def _order(self, what: int) -> None:
        for rank in self._others:
            self._ranks.send(torch.tensor([what]), rank)


@torch.inference_mode()
def _give_all(outgoing: Outgoing, bucket_bytes: int, sent: DeltaBase | None, phases: SyncProfile) -> None:
    """Do another member's part: give rank 0 what it needs. The weights must not change before."""
    own, order = OwnBlocks(outgoing, sent), torch.zeros(1, dtype=torch.int64)
    # After the last bucket, too, comes an order to stop.
    for number, pieces in enumerate(chain(cut_buckets(outgoing, bucket_bytes), [[]])):
        with phases(f"wait {number}"):
            outgoing.ranks.receive(order, 0)
        if order == _STOP:
            return
        with phases(f"give {number}"):
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
        data = rows.reshape(-1).view(torch.uint8) if num is None or out is None else out[: buckets.num_bytes(num)]
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


def send(
    outgoing: Outgoing,
    target: SyncTarget,
    run_id: str,
    sent: DeltaBase | None = None,
    host: SyncAccess | None = None,
    phases: SyncProfile | None = None,
    made_room: bool = False,
) -> "Sending | BackgroundCall[None] | None":
    """Begin to send a slot's weights: rank 0 sends, the other ranks give it their parts. Every rank calls this.

    It returns at once: a thread on each rank works during the passes. The send before must have ended.

    Args:
        sent: the version to find changes against, if the target wants changes. Without it whole rows travel.
        host: the trainer's host's settings for its worker.
        phases: records each phase; a profile unless given.
        made_room: the optimizer's state has left the device for it, which the outcome reports.

    Returns:
        What this rank must wait for, by `result`; None if it takes no part, as it has a copy of another's weights.

    Raises:
        InvalidInput: a row of a tensor is larger than a bucket, or a dtype does not travel. The same on every rank.
    """
    check_divisible(outgoing, target.bucket_bytes)
    if outgoing.ranks.rank not in outgoing.members:
        return None
    bucket_bytes = min(target.bucket_bytes, all_bytes(outgoing))
    sent = sent if target.backend == "delta" and outgoing.lora is None else None
    if (rank := outgoing.ranks.rank) != 0:
        traced = phases or SyncProfile(host.profile if host is not None else None, rank)

        def give() -> None:
            _give_all(outgoing, bucket_bytes, sent, traced)
            if (problem := traced.end(run_id, target.version, choose(target))) is not None:
                print(f"rank {rank}: {problem}", file=sys.stderr, flush=True)

        return BackgroundCall(lambda _: give())
    return Sending(outgoing, target, run_id, bucket_bytes, sent, host or SyncAccess(), phases, made_room)


class Sending:
    """One version on its way, in a thread. The weights must not change before `result` has returned.

    `sent`: the version to find changes against, replaced by this version afterwards; None: whole rows travel.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        target: SyncTarget,
        run_id: str,
        bucket_bytes: int,
        sent: DeltaBase | None,
        host: SyncAccess,
        phases: SyncProfile | None,
        made_room: bool,
    ) -> None:
        self._announcement = Announcement(
            run_id=run_id,
            version=target.version,
            transport=choose(target),
            shapes_sha256=shapes_sha256(outgoing.shapes.items()),
            lora=outgoing.lora,
            base_digest=None if sent is None else sent.digest,
            buffer_bytes=bucket_bytes,
            name=target.name,
            waits=target.waits,
        )
        self._outgoing, self._places, self._sent = outgoing, target.places, sent
        self._secret = bytes.fromhex(host.secret) if host.secret is not None else None
        self._phases = phases or SyncProfile(host.profile)
        self.outbound = Outbound(outgoing.device)  # until the transport's takes its place
        self._gathering = Gathering(outgoing, sent)
        self._digest = Digest()
        self._num_bytes = self._weight_bytes = 0
        self._made_room = made_room
        self._outcome: SyncOutcome | None = None
        self._call = BackgroundCall(lambda _: self._send())

    def result(self) -> SyncOutcome:
        """Wait until every sampler has the version, or has failed; the weights may change afterwards."""
        if self._outcome is not None:
            return self._outcome
        began = time.perf_counter()
        duration_s, profile_problem = self._call.result()
        self._outcome = SyncOutcome(
            version=self._announcement.version,
            digest=self._digest.value if self.outbound.living else None,
            num_bytes=self._num_bytes,
            weight_bytes=self._weight_bytes,
            blocked_s=time.perf_counter() - began,
            duration_s=duration_s,
            problems=self.outbound.problems,
            transport=self._announcement.transport,
            profile_problem=profile_problem,
            made_room=self._made_room,
        )
        return self._outcome

    @torch.inference_mode()
    def _send(self) -> tuple[float, str | None]:
        """Return the seconds that it took, and why its trace could not be written."""
        began = time.perf_counter()
        with ExitStack() as at_end:
            at_end.callback(self._gathering.end)
            device, transport = self._outgoing.device, self._announcement.transport
            if (reason := why_not(transport, device)) is not None:
                self.outbound.fail(self._places, reason)
                return 0.0, None
            self.outbound = ends_of(transport).outbound(device)
            at_end.callback(self._finalize)
            try:
                with self._phases("prepare"):
                    self.outbound.prepare(self._announcement.buffer_bytes)
                with self._phases("connect"):
                    is_all = self.outbound.announce(self._places, self._announcement, self._secret)
                    self.outbound.connect()
                self._send_buckets(is_all)
            except OSError as error:
                self.outbound.fail(self._places, str(error))
        told = self._announcement
        return time.perf_counter() - began, self._phases.end(told.run_id, told.version, told.transport)

    def _finalize(self) -> None:
        with self._phases("finalize"):
            self.outbound.finalize()

    def _send_buckets(self, is_all: bool) -> None:
        """Fill buffers, each as soon as all samplers have read what was in it; until nobody is left."""
        base, digest, outbound = self._sent, None, self.outbound
        if base is not None:
            base.digest = None  # until all of its copies are of one version again
        for number, pieces in enumerate(cut_buckets(self._outgoing, self._announcement.buffer_bytes)):
            with self._phases(f"settle {number}"):
                outbound.settle(len(outbound.buffers) - 1)
            if not outbound.living:
                break
            with self._phases(f"fill {number}"):
                only_changes = base is not None and not is_all
                buffer = outbound.buffers[number % len(outbound.buffers)]
                bucket = self._gathering.fill(buffer, number, pieces, only_changes)
            self._digest.add(bucket)
            self._num_bytes += bucket.num_bytes
            self._weight_bytes += sum(part.num_bytes for part in bucket.parts)
            with self._phases(f"send {number}"):
                outbound.send(bucket)
        with self._phases("settle"):
            outbound.settle(0)
        if outbound.living:
            digest = self._digest.value
            with self._phases("commit"):
                outbound.tell(SyncMessage(commit=Commit(digest=digest)))
                outbound.take_replies()
        if base is not None:
            base.digest = digest
