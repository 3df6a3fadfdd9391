"""`collective`: the trainer broadcasts buckets in a group of torch.distributed: NCCL on CUDA, gloo on the CPU.

Each sync has one group: rank 0 is the trainer, the others its samplers. Neither side's default group is used, and there
is no TCPStore, which strangers could write to: members find each other by keys and values over the authenticated
connections. gloo and NCCL neither authenticate nor encrypt. So before any weights travel, every member proves in the
group that it is the other end of its connection, and checksums and digest come over the connection.

When a member is lost, the sync ends for all of them, which then load the version from the store: `tcp` has no group,
and continues with the others. All waits are bounded. NCCL has never been run.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    Bucket,
    Connect,
    GroupPlace,
    SyncAnswer,
    SyncBroken,
    SyncCall,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import SyncConnection
from megatron_worker.weight_sync.transports.protocol import Inbound, Outbound, Receiver, make_buffers

_JOIN_S = 20.0
_BROADCAST_S = 60.0  # of one bucket
_PROOF_BYTES = 32
_POLL_S = 0.0005
_LOOK_S = 0.02  # between looks whether the trainer is there


class GroupBroken(OSError):
    """A group could not be formed, or a broadcast did not succeed: the sync ends for all of its members."""


class RemoteStore(dist.Store):
    """A sampler's access to the store that torch forms a group with, which the trainer keeps: each call a message."""

    def __init__(self, connection: SyncConnection) -> None:
        super().__init__()
        self._connection = connection

    def set(self, key: str, value: bytes | str) -> None:
        self._call(
            SyncCall(do="set", key=key, value=(value.encode() if isinstance(value, str) else bytes(value)).hex())
        )

    def get(self, key: str) -> bytes:
        value = self._call(SyncCall(do="get", key=key)).value
        if value is None:
            raise RuntimeError(f"nobody has set {key}")
        return bytes.fromhex(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._call(SyncCall(do="check", key=key)).value is not None for key in keys)

    def _call(self, call: SyncCall) -> SyncAnswer:
        self._connection.write(SyncReply(call=call))
        return self._connection.read(SyncAnswer)


def _invite(receiver: Receiver, place: GroupPlace, store: dist.Store) -> None:
    """Have a sampler join a group, and answer its calls until it has. Raises SyncBroken."""
    receiver.send(SyncMessage(connect=Connect(group=place)))
    while receiver.num_owed:
        if (call := receiver.take_reply().call) is not None:
            receiver.connection.write(_answer(call, store))


def _answer(call: SyncCall, store: dist.Store) -> SyncAnswer:
    match call.do:
        case "set":
            store.set(call.key, bytes.fromhex(call.value))  # type: ignore[arg-type]
        case "get":
            try:
                return SyncAnswer(value=bytes(store.get(call.key)).hex())
            except RuntimeError:  # nobody has set it in time
                return SyncAnswer()
        case "check":
            return SyncAnswer(value="" if store.check([call.key]) else None)
    return SyncAnswer()


class SyncGroup:
    """A process group outside the default one. Every method raises GroupBroken."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, host: str) -> None:
        """Join. `host`: this machine's address at which gloo listens."""
        self._rank, self._size, self._device = rank, size, device
        try:
            self._own = _process_group(store, rank, size, device, host)
        except (RuntimeError, SyncBroken) as error:
            raise GroupBroken(f"no group could be formed: {_first_line(error)}") from error

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Begin."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, timedelta(seconds=_BROADCAST_S)
        try:
            return self._own.broadcast([tensor], options)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error

    def wait(self, work: dist.Work, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for a broadcast, unless it takes too long or is given up."""
        until, look = time.monotonic() + _BROADCAST_S, time.monotonic() + _LOOK_S
        while not work.is_completed():
            if (now := time.monotonic()) > until:
                raise GroupBroken(f"a broadcast took more than {_BROADCAST_S:g} s")
            if now > look:
                if is_given_up():
                    raise GroupBroken("the other end is gone")
                look = now + _LOOK_S
            time.sleep(_POLL_S)
        try:
            work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error

    def prove(self, own: bytes) -> list[bytes]:
        """Show every member's proofs to all. Returns the trainer's, one for each sampler, then each sampler's.

        `own`: what this rank shows.
        """
        sizes = [_PROOF_BYTES * (self._size - 1), *[_PROOF_BYTES] * (self._size - 1)]
        shown = b""
        for root, size in enumerate(sizes):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if root == self._rank:
                tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            there = tensor.to(self._device)
            self.wait(self.broadcast(there, root))
            shown += bytes(there.tolist())
        return [shown[at : at + _PROOF_BYTES] for at in range(0, len(shown), _PROOF_BYTES)]

    def drop(self) -> None:
        """Leave. A running collective ends by its timeout, in a thread that nobody waits for."""
        held = [self._own]
        del self._own  # first: whoever drops torch's group last waits for running work in its destructor
        threading.Thread(target=lambda: held.pop().abort(), name="weights-group", daemon=True).start()


class CollectiveOutbound(Outbound):
    _group: SyncGroup | None = None

    def connect(self) -> None:
        """Have the samplers join a group, and join it as rank 0."""
        self._works = list[dist.Work]()
        self._members = living = list(self.living)
        if not living:
            return
        name, store, size = secrets.token_hex(32), dist.HashStore(), len(living) + 1
        store.set_timeout(timedelta(seconds=_JOIN_S))
        with ThreadPoolExecutor(len(living)) as threads:
            for rank, one in enumerate(living, 1):
                place = GroupPlace(rank=rank, size=size, name=name)
                threads.submit(self.do, partial(_invite, place=place, store=store), one)
            self._group = SyncGroup(store, 0, size, self.device, living[0].connection.local_host)
            shown = self._group.prove(b"".join(one.connection.proof("trainer", name) for one in living))
        self._check_members()
        for one, proof in zip(living, shown[len(living) :], strict=True):
            if not hmac.compare_digest(proof, one.connection.proof("sampler", name)):
                raise GroupBroken("a member of the group is a stranger")

    def send(self, bucket: Bucket) -> None:
        super().send(bucket)
        self._check_members()
        if self._group is not None and bucket.num_bytes:
            buffer = self.buffers[bucket.number % len(self.buffers)]
            self._works.append(self._group.broadcast(buffer[: bucket.num_bytes], 0))

    def settle(self, num_under_way: int) -> None:
        while self._group is not None and len(self._works) > num_under_way:
            self._group.wait(self._works.pop(0), lambda: any(one.connection.is_gone() for one in self._members))
        super().settle(num_under_way)
        self._check_members()

    def _check_members(self) -> None:
        if len(self.living) < len(self._members):
            raise GroupBroken("another sampler of the group is lost")

    def finalize(self) -> None:
        super().finalize()
        if self._group is not None:
            self._group.drop()


class CollectiveInbound(Inbound):
    _group: SyncGroup | None = None

    def opened(self, given: Connect) -> list[Tensor]:
        if given.group is None or self.connection.key is None:
            raise SyncBroken("a group is joined by its place, over a connection with a key")
        place, connection = given.group, self.connection
        buffers = make_buffers(self.num_bytes, self.device)
        store = RemoteStore(connection)
        self._group = SyncGroup(store, place.rank, place.size, self.device, connection.local_host)
        shown = self._group.prove(connection.proof("sampler", place.name))
        if not hmac.compare_digest(shown[place.rank - 1], connection.proof("trainer", place.name)):
            raise GroupBroken("rank 0 of the group is a stranger")
        return buffers

    def receive(self, bucket: Bucket) -> Tensor:
        buffer = super().receive(bucket)
        if self._group is not None and bucket.num_bytes:
            self._group.wait(self._group.broadcast(buffer[: bucket.num_bytes], 0), self.connection.is_gone)
        return buffer

    def finalize(self) -> None:
        super().finalize()
        if self._group is not None:
            self._group.drop()


def _process_group(store: dist.Store, rank: int, size: int, device: torch.device, host: str) -> dist.ProcessGroup:
    """Make torch's group. Raises RuntimeError."""
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=4 * _BROADCAST_S)  # after ours: torch ends the process at its own
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, size, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout, gloo._threads = timedelta(seconds=_JOIN_S), 1
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, gloo))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
