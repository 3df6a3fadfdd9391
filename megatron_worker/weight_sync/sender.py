"""The trainer's end of a sync: weights into two buffers in turn, to all samplers at once, beside the trainer's work."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from megatron_worker.engine import Outgoing
from megatron_worker.tensors.safetensors_files import all_drawn
from megatron_worker.weight_sync import changes
from megatron_worker.weight_sync.buckets import (
    ALIGNMENT,
    DTYPES,
    Bucket,
    Digest,
    Drawn,
    Part,
    aligned,
    checksum,
    cut,
    fill,
    shapes_sha256,
    view_of,
)
from megatron_worker.weight_sync.messages import Announcement, Commit, Message
from megatron_worker.weight_sync.profile import Phases, Profile
from megatron_worker.weight_sync.receivers import Receivers
from megatron_worker.weight_sync.transports.protocol import Outbound
from megatron_worker.weight_sync.transports.table import TRANSPORTS, choose, why_not
from shared.contract import Sha256
from shared.errors import InvalidInput
from shared.jobs.weight_sync import SamplerPlace, SyncAccess, SyncOutcome, SyncTarget


class Sent:
    """Copies of the last version that was sent, from which changes are found. Host memory as large as the weights."""

    def __init__(self) -> None:
        self.digest: Sha256 | None = None
        self._copies: dict[str, Tensor] = {}

    def rows(self, part: Part) -> Tensor:
        """Return the copy of a part's rows; a new one is of zeros."""
        if part.name not in self._copies:
            self._copies[part.name] = torch.zeros(part.shape, dtype=DTYPES[part.dtype])
        whole = self._copies[part.name]
        return whole[part.first_row : part.first_row + part.num_rows] if whole.dim() else whole


def send(
    outgoing: Outgoing,
    target: SyncTarget,
    run_id: str,
    rank: int,
    world_size: int,
    sent: Sent | None = None,
    host: SyncAccess | None = None,
    phases: Phases | None = None,
) -> "Sending | None":
    """Begin to send a slot's weights from rank 0; the other ranks only take part in gathering them. Collective.

    Args:
        sent: what changes are found against where the target asks for them. Without it whole rows travel.
        host: what the trainer's host tells its worker.
        phases: is told of each phase; a profile unless given.

    Returns:
        None on the other ranks.

    Raises:
        InvalidInput: a row of a tensor is larger than a bucket.
    """
    itemsize, total = outgoing.dtype.itemsize, 0
    for name, shape in outgoing.shapes.items():
        row_bytes = math.prod(shape[1:]) * itemsize
        if row_bytes > target.bucket_bytes:
            message = f"a row of {name} has {row_bytes} bytes, which a bucket of {target.bucket_bytes} does not hold"
            raise InvalidInput(message, "weight_sync.bucket_bytes")
        total += math.prod(shape) * itemsize + ALIGNMENT
    with nullcontext() if world_size == 1 else all_drawn(outgoing.tensors):
        if rank != 0:
            return None
        sent = sent if target.backend == "delta" and outgoing.lora is None else None
        announcement = Announcement(
            run_id=run_id,
            version=target.version,
            transport=choose(target),
            shapes_sha256=shapes_sha256(outgoing.shapes.items()),
            lora=outgoing.lora,
            base_digest=None if sent is None else sent.digest,
            buffer_bytes=min(target.bucket_bytes, total),
            name=target.name,
            waits=target.waits,
        )
        host = host or SyncAccess()
        phases = phases or Profile(host.profile)
        sending = Sending(announcement, outgoing, target.places, host, phases, sent, is_collective=world_size > 1)
        sending.start()
        return sending


class Sending:
    """One version on its way. The weights must not change before `wait` has returned.

    Args:
        outgoing: gathering its tensors may be collective (`is_collective`): they are then drawn by the caller's thread,
            and `start` returns when the last is in a buffer. Otherwise a thread draws them.
        sent: what changes are found against, and what is left of this version afterwards; None: whole rows travel.
    """

    def __init__(
        self,
        announcement: Announcement,
        outgoing: Outgoing,
        places: tuple[SamplerPlace, ...],
        host: SyncAccess,
        phases: Phases,
        sent: Sent | None = None,
        is_collective: bool = False,
    ) -> None:
        self._announcement = announcement
        self._outgoing = outgoing
        self._places = places
        self._secret = bytes.fromhex(host.secret) if host.secret is not None else None
        self._phases = phases
        self._sent = sent
        self._is_collective = is_collective
        self._receivers = Receivers()
        self._digest = Digest()
        self._num_bytes = self._weight_bytes = 0
        self._blocked_s = self._duration_s = 0.0
        self._profile_problem: str | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin to send. Raises InvalidInput for tensors that do not go into the buckets, if it draws them itself."""
        began = time.perf_counter()
        if self._is_collective:
            self._send()
        else:
            self._thread = threading.Thread(target=self._run, name="weight-sync", daemon=True)
            self._thread.start()
        self._blocked_s += time.perf_counter() - began

    def wait(self) -> SyncOutcome:
        """Wait until every sampler has the version, or has failed; the weights may change afterwards.

        Raises:
            InvalidInput: a tensor has a dtype that does not travel.
        """
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        self._blocked_s += time.perf_counter() - began
        if self._error is not None:
            raise self._error
        return SyncOutcome(
            version=self._announcement.version,
            digest=self._digest.value if self._receivers.living else None,
            num_bytes=self._num_bytes,
            weight_bytes=self._weight_bytes,
            blocked_s=self._blocked_s,
            duration_s=self._duration_s,
            problems=self._receivers.problems,
            transport=self._announcement.transport,
            profile_problem=self._profile_problem,
        )

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._send()
        except BaseException as error:  # the caller's to handle
            self._error = error

    def _send(self) -> None:
        device = self._outgoing.device
        if (reason := why_not(self._announcement.transport, device)) is not None:
            self._fail(reason)
            return
        outbound = TRANSPORTS[self._announcement.transport].outbound(device)
        try:
            with self._phases("prepare"):
                outbound.prepare(self._announcement.buffer_bytes)
            with self._phases("connect"):
                is_all = self._receivers.announce(self._places, self._announcement, self._secret)
                outbound.connect(self._receivers)
            self._send_buckets(outbound, is_all)
        except OSError as error:
            self._fail(str(error))
        finally:
            with self._phases("finalize"):
                outbound.finalize()
                self._receivers.close()
            self._duration_s = time.perf_counter() - self._began
            self._profile_problem = self._phases.end(self._announcement)

    def _fail(self, why: str) -> None:
        for receiver in list(self._receivers.living):
            self._receivers.lose(receiver, why)
        for place in self._places:
            self._receivers.problems.setdefault(place.socket, why)

    def _send_buckets(self, outbound: Outbound, is_all: bool) -> None:
        base, digest = self._sent, None
        if base is not None:
            base.digest = None  # until all of its copies are of one version again
        for bucket in self._buckets(outbound, is_all):
            self._digest.add(bucket)
            self._num_bytes += bucket.num_bytes
            self._weight_bytes += sum(part.num_bytes for part in bucket.parts)
            with self._phases(f"send {bucket.number}"):
                outbound.send(bucket)
        with self._phases("settle"):
            outbound.settle(0)
        if self._receivers.living:
            digest = self._digest.value
            with self._phases("commit"):
                self._receivers.send(Message(commit=Commit(digest=digest)))
                self._receivers.settle(0)
        if base is not None:
            base.digest = digest

    def _buckets(self, outbound: Outbound, is_all: bool) -> Iterator[Bucket]:
        """Fill buffers, each as soon as all samplers have read what was in it; until nobody is left."""
        buffers, outgoing = outbound.buffers, self._outgoing
        drawn = Drawn(outgoing.tensors)
        for number, parts in enumerate(cut(outgoing.shapes, outgoing.dtype, self._announcement.buffer_bytes)):
            with self._phases(f"settle {number}"):
                outbound.settle(len(buffers) - 1)
            if not self._receivers.living:
                return
            with self._phases(f"fill {number}"):
                bucket = self._fill(buffers[number % len(buffers)], number, parts, drawn, is_all)
            yield bucket

    def _fill(self, buffer: Tensor, number: int, parts: tuple[Part, ...], drawn: Drawn, is_all: bool) -> Bucket:
        if self._sent is not None and not is_all:
            return _fill_with_changes(buffer, number, parts, drawn, self._sent)
        bucket = fill(buffer, number, parts, drawn)
        if self._sent is not None:
            for part in parts:
                self._sent.rows(part).copy_(view_of(buffer, part))
        return bucket


def _fill_with_changes(buffer: Tensor, number: int, parts: tuple[Part, ...], drawn: Drawn, sent: Sent) -> Bucket:
    """Write the changes of each part where they are shorter than its rows, and keep the rows as sent."""
    written, end, found = list[Part](), 0, 0
    for part in parts:
        start, tensor = aligned(end), drawn.rows(part).contiguous()
        num = changes.find(tensor.cpu(), sent.rows(part), buffer[start : start + part.num_bytes])
        written.append(part.model_copy(update={"start": start, "num_changes": num}))
        if num is None:
            view_of(buffer, written[-1]).copy_(tensor)
        end = start + (part.num_bytes if num is None else changes.num_bytes(num))
        found = checksum([tensor], found)
        sent.rows(part).copy_(tensor)
        del tensor  # before the next one is drawn
    return Bucket(number=number, parts=tuple(written), num_bytes=end, checksum=found)
