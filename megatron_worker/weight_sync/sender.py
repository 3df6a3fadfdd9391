"""The trainer's end of a sync: weights into two buffers in turn, to all samplers at once, during the trainer's work."""

import time
from collections.abc import Iterator

import torch

from megatron_worker.engine import Outgoing
from megatron_worker.process.background import BackgroundCall
from megatron_worker.weight_sync.buckets import Bucket, Digest, all_bytes, check_divisible, cut_buckets, shapes_sha256
from megatron_worker.weight_sync.gathering import Gathering, Giving, LastSent
from megatron_worker.weight_sync.messages import Announcement, Commit, SyncMessage
from megatron_worker.weight_sync.profile import SyncProfile
from megatron_worker.weight_sync.sampler_connections import Receivers
from megatron_worker.weight_sync.transports.protocol import Outbound
from megatron_worker.weight_sync.transports.table import choose, ends_of, why_not
from shared.jobs.weight_sync import SyncAccess, SyncOutcome, SyncPlace, SyncTarget


def send(
    outgoing: Outgoing,
    target: SyncTarget,
    run_id: str,
    sent: LastSent | None = None,
    host: SyncAccess | None = None,
    phases: SyncProfile | None = None,
) -> "Sending | Giving | None":
    """Begin to send a slot's weights: rank 0 sends, the other ranks give it their parts. Every rank calls this.

    It returns at once: a thread on each rank works during the passes. The send before must have ended.

    Args:
        sent: the version to find changes against, if the target wants changes. Without it whole rows travel.
        host: the trainer's host's settings for its worker.
        phases: records each phase; a profile unless given.

    Returns:
        What this rank must wait for; None if it takes no part, such as a rank with a copy of another's weights.

    Raises:
        InvalidInput: a row of a tensor is larger than a bucket, or a dtype does not travel. The same on every rank.
    """
    check_divisible(outgoing, target.bucket_bytes)
    if outgoing.ranks.rank not in outgoing.members:
        return None
    bucket_bytes = min(target.bucket_bytes, all_bytes(outgoing))
    sent = sent if target.backend == "delta" and outgoing.lora is None else None
    if outgoing.ranks.rank != 0:
        return Giving(outgoing, bucket_bytes, sent)
    announcement = Announcement(
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
    host = host or SyncAccess()
    sending = Sending(announcement, outgoing, target.places, host, phases or SyncProfile(host.profile), sent)
    sending.start()
    return sending


class Sending:
    """One version on its way, in a thread. The weights must not change before `wait` has returned.

    `sent`: the version to find changes against, replaced by this version afterwards; None: whole rows travel.
    """

    def __init__(
        self,
        announcement: Announcement,
        outgoing: Outgoing,
        places: tuple[SyncPlace, ...],
        host: SyncAccess,
        phases: SyncProfile,
        sent: LastSent | None = None,
    ) -> None:
        self._announcement = announcement
        self._outgoing = outgoing
        self._places = places
        self._secret = bytes.fromhex(host.secret) if host.secret is not None else None
        self._phases = phases
        self._sent = sent
        self._gathering = Gathering(outgoing, sent)
        self._receivers = Receivers()
        self._digest = Digest()
        self._num_bytes = self._weight_bytes = 0
        self._blocked_s = self._duration_s = 0.0
        self._profile_problem: str | None = None
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin to send."""
        began = time.perf_counter()
        self._call = BackgroundCall(lambda _: self._send())
        self._blocked_s += time.perf_counter() - began

    def wait(self) -> SyncOutcome:
        """Wait until every sampler has the version, or has failed; the weights may change afterwards."""
        began = time.perf_counter()
        self._call.result()
        self._blocked_s += time.perf_counter() - began
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

    @torch.inference_mode()
    def _send(self) -> None:
        try:
            self._send_by_transport()
        finally:
            self._gathering.end()

    def _send_by_transport(self) -> None:
        device = self._outgoing.device
        if (reason := why_not(self._announcement.transport, device)) is not None:
            self._fail(reason)
            return
        outbound = ends_of(self._announcement.transport).outbound(device)
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
                self._receivers.send(SyncMessage(commit=Commit(digest=digest)))
                self._receivers.settle(0)
        if base is not None:
            base.digest = digest

    def _buckets(self, outbound: Outbound, is_all: bool) -> Iterator[Bucket]:
        """Fill buffers, each as soon as all samplers have read what was in it; until nobody is left."""
        buffers, only_changes = outbound.buffers, self._sent is not None and not is_all
        for number, pieces in enumerate(cut_buckets(self._outgoing, self._announcement.buffer_bytes)):
            with self._phases(f"settle {number}"):
                outbound.settle(len(buffers) - 1)
            if not self._receivers.living:
                return
            with self._phases(f"fill {number}"):
                bucket = self._gathering.fill(buffers[number % len(buffers)], number, pieces, only_changes)
            yield bucket
