"""`collective`: the trainer broadcasts buckets in a group of torch.distributed: gloo on the CPU, NCCL on CUDA.

Each sync has one group: rank 0 is the trainer, the others its samplers. Neither side's default group is used, and there
is no TCPStore, which strangers could write to: members find each other by keys and values over the authenticated
connections. While the group lives, gloo listens at the address over which trainer and sampler reached
each other; gloo's connections are neither authenticated nor encrypted. So before any weights travel, every member
proves in the group that it is the other end of its connection, and checksums and digest come over the connection.

When a member is lost, the trainer forms a group of the remaining ones, and sends the unfinished buckets again.
All waits are bounded. NCCL has never been run.
"""

import hmac
import ipaddress
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    NUM_BUFFERS,
    Bucket,
    Connect,
    GroupPlace,
    SyncAnswer,
    SyncBroken,
    SyncCall,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import Receiver, Receivers, SyncConnection
from megatron_worker.weight_sync.transports.protocol import Messages, make_buffers

# --- How the members of a group find each other ---
# Keys and values that the trainer keeps, asked for over the connections.
#
# torch's groups want a store. Members' ends of it are calls, each one message; the trainer answers them (`answer`)
# until the member says that it has joined.

_MAX_VALUES = 4096


class Values:
    """The keys and values of one group, of a bounded number, until a monotonic time or until it is given up."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            if len(self._values) < _MAX_VALUES:
                self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes | None:
        """Wait for a value; None: nobody has set it in time."""
        with self._changed:
            left = max(0.0, self._until - time.monotonic())
            self._changed.wait_for(lambda: key in self._values or self._is_over, left)
            return self._values.get(key)

    def check(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def give_up(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class RemoteValues:
    """The same for a sampler, by calls."""

    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection

    def set(self, key: str, value: bytes) -> None:
        self._call(SyncCall(do="set", key=key, value=value.hex()))

    def get(self, key: str) -> bytes | None:
        value = self._call(SyncCall(do="get", key=key)).value
        return None if value is None else bytes.fromhex(value)

    def check(self, key: str) -> bool:
        return self._call(SyncCall(do="check", key=key)).value is not None

    def _call(self, call: SyncCall) -> SyncAnswer:
        self._connection.write(SyncReply(call=call))
        return self._connection.read(SyncAnswer)


class MemberStore(dist.Store):
    """The store that torch forms a group with, on top of `Values` or `RemoteValues`. An error ends the forming."""

    def __init__(self, values: Values | RemoteValues) -> None:
        super().__init__()
        self._own = values

    def set(self, key: str, value: bytes | str) -> None:
        self._own.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        value = self._own.get(key)
        if value is None:
            raise RuntimeError(f"nobody has set {key}")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._own.check(key) for key in keys)


def answer_calls(receiver: Receiver, values: Values) -> None:
    """Answer a sampler's calls until its last word, and take the replies that it owes. Raises SyncBroken."""
    while (call := receiver.take_reply().call) is None or call.do in ("set", "get", "check"):
        if call is not None:
            receiver.connection.write(_answer(call, values))
    receiver.num_owed -= 1
    receiver.is_interrupted = call.do == "failed"
    if receiver.is_interrupted:
        values.give_up()


def _answer(call: SyncCall, values: Values) -> SyncAnswer:
    match call.do:
        case "set":
            values.set(call.key, bytes.fromhex(call.value))
        case "get":
            value = values.get(call.key)
            return SyncAnswer(value=None if value is None else value.hex())
        case "check":
            return SyncAnswer(value="" if values.check(call.key) else None)
    return SyncAnswer()


_JOIN_S = 20.0
_BROADCAST_S = 60.0  # of one bucket
_PROOF_BYTES = 32
_POLL_S = 0.0005
_LOOK_S = 0.02  # between looks whether the trainer has given up


class GroupBroken(Exception):
    """A group could not be formed, or a broadcast did not succeed."""


class SyncGroup:
    """A process group outside the default one."""

    def __init__(self, store: MemberStore, rank: int, size: int, device: torch.device, host: str) -> None:
        """Join. `host`: this machine's address at which gloo listens. Raises GroupBroken: the others are not there."""
        self.size = size
        self._device = device
        try:
            self._own = _process_group(store, rank, size, device, host)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Begin. Raises GroupBroken."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, timedelta(seconds=_BROADCAST_S)
        try:
            return self._own.broadcast([tensor], options)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error

    def wait(self, work: dist.Work, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for a broadcast. Raises GroupBroken: it failed, took too long, or was given up."""
        until, look = time.monotonic() + _BROADCAST_S, time.monotonic() + _LOOK_S
        while not work.is_completed():
            if (now := time.monotonic()) > until:
                raise GroupBroken(f"a broadcast took more than {_BROADCAST_S:g} s")
            if now > look:
                if is_given_up():
                    raise GroupBroken("the trainer has given this group up")
                look = now + _LOOK_S
            time.sleep(_POLL_S)
        try:
            work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error

    def prove(self, own: bytes, rank: int) -> list[bytes]:
        """Show every member's proofs to all. Returns the trainer's, one for each sampler, then each sampler's.

        `own`: what this rank shows. Raises GroupBroken.
        """
        sizes = [_PROOF_BYTES * (self.size - 1), *[_PROOF_BYTES] * (self.size - 1)]
        shown = b""
        for root, size in enumerate(sizes):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if root == rank:
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


class _Member:
    """The base of both ends: the group that they have joined, None before and after."""

    _group: SyncGroup | None = None

    def _leave(self) -> None:
        if self._group is not None:
            self._group.drop()
        self._group = None


class CollectiveOutbound(_Member):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: list[tuple[Bucket, dist.Work | None]] = []
        self.buffers: Sequence[Tensor] = ()

    def prepare(self, num_bytes: int) -> None:
        self.buffers = make_buffers(num_bytes, self._device)

    def connect(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._form()

    def send(self, bucket: Bucket) -> None:
        self._under_way = [*self._under_way, (bucket, None)][-NUM_BUFFERS:]
        self._broadcast(len(self._under_way) - 1)

    def _broadcast(self, place: int) -> None:
        bucket, _ = self._under_way[place]
        self._receivers.send(SyncMessage(bucket=bucket))
        if self._group is None or not bucket.num_bytes:
            return
        try:
            used = self.buffers[bucket.number % NUM_BUFFERS][: bucket.num_bytes]
            self._under_way[place] = bucket, self._group.broadcast(used, 0)
        except GroupBroken:
            self._leave()

    def settle(self, num_under_way: int) -> None:
        while self._receivers.living and not self._is_settled(num_under_way):
            self._form()
            for place in range(len(self._under_way)):
                self._broadcast(place)

    def _is_settled(self, num_under_way: int) -> bool:
        """Wait as `settle` does. Returns False as soon as a member is lost or the group broke."""
        if self._group is None:
            return False
        try:
            for _, work in self._under_way[: max(0, len(self._under_way) - num_under_way)]:
                if work is not None:
                    self._group.wait(work)
        except GroupBroken:
            return False
        self._receivers.settle_together(num_under_way)
        living = self._receivers.living
        return len(living) == self._group.size - 1 and not any(one.is_interrupted for one in living)

    def _form(self) -> None:
        """Form a group of all who live; of fewer, while members are lost by it."""
        self._leave()
        while living := self._invited():
            why = self._join(living, secrets.token_hex(32))
            if why is None and len(self._receivers.living) == len(living):
                return
            self._leave()
            if len(self._receivers.living) == len(living):  # nobody was lost: it would be the same again
                for receiver in living:
                    self._receivers.lose(receiver, f"no group could be formed: {why}")

    def _invited(self) -> list[Receiver]:
        """Return the samplers that can be in one group, and lose those that the others cannot reach."""
        at_loopback = [one for one in self._receivers.living if _is_loopback(one.connection.local_host)]
        if len(at_loopback) < len(self._receivers.living):
            for one in at_loopback:
                self._receivers.lose(one, "its address is loopback, where samplers of other machines cannot reach it")
        return list(self._receivers.living)

    def _join(self, living: list[Receiver], name: str) -> str | None:
        """Have the samplers join a group, and join it as rank 0. Returns why there is none."""
        values = Values(time.monotonic() + _JOIN_S)
        for rank, receiver in enumerate(living, 1):
            place = GroupPlace(rank=rank, size=len(living) + 1, name=name)
            with suppress(SyncBroken):  # reading its calls shows that it is gone
                receiver.send(SyncMessage(connect=Connect(group=place)))
        found: dict[str, str] = {}
        threads = [threading.Thread(target=_serve, args=(one, values, found), daemon=True) for one in living]
        for thread in threads:
            thread.start()
        why = None
        try:
            host = living[0].connection.local_host
            self._group = SyncGroup(MemberStore(values), 0, len(living) + 1, self._device, host)
            self._prove(self._group, living, name)
        except GroupBroken as broken:
            values.give_up()
            why = str(broken)
        for thread in threads:
            thread.join()
        for one in living:
            if one.place.socket in found:
                self._receivers.lose(one, found[one.place.socket])
        return why or ("a sampler did not join" if any(one.is_interrupted for one in living) else None)

    def _prove(self, group: SyncGroup, living: list[Receiver], name: str) -> None:
        shown = group.prove(b"".join(one.connection.proof("trainer", name) for one in living), 0)
        for receiver, proof in zip(living, shown[len(living) :], strict=True):
            if not hmac.compare_digest(proof, receiver.connection.proof("sampler", name)):
                raise GroupBroken("a member of the group is a stranger")

    def finalize(self) -> None:
        self._leave()
        self._under_way, self.buffers = [], ()


def _serve(receiver: Receiver, values: Values, lost: dict[str, str]) -> None:
    """Answer a sampler while it joins. One that is gone is put down in `lost`."""
    try:
        answer_calls(receiver, values)
    except SyncBroken as broken:
        values.give_up()
        lost[receiver.place.socket] = str(broken)


class CollectiveInbound(_Member):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: Sequence[Tensor] = ()

    def prepare(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def connect(self, messages: Messages, given: Connect) -> None:
        if given.group is None or messages.connection.key is None:
            raise SyncBroken("a group is joined by its place, over a connection with a key")
        self._messages = messages
        self._leave()
        # New ones, as a broadcast that was given up may still hold those before.
        self._buffers = make_buffers(self._num_bytes, self._device)
        try:
            self._join(given.group)
        except GroupBroken:
            self._leave()
        messages.connection.write(SyncReply(call=SyncCall(do="failed" if self._group is None else "joined")))

    def _join(self, place: GroupPlace) -> None:
        connection = self._messages.connection
        store = MemberStore(RemoteValues(connection))
        self._group = SyncGroup(store, place.rank, place.size, self._device, connection.local_host)
        shown = self._group.prove(connection.proof("sampler", place.name), place.rank)
        if not hmac.compare_digest(shown[place.rank - 1], connection.proof("trainer", place.name)):
            raise GroupBroken("rank 0 of the group is a stranger")

    def receive(self, bucket: Bucket) -> Tensor | None:
        if self._group is None:
            return None
        buffer = self._buffers[bucket.number % NUM_BUFFERS]
        if not bucket.num_bytes:
            return buffer
        try:
            work = self._group.broadcast(buffer[: bucket.num_bytes], 0)
            self._group.wait(work, self._messages.is_interrupted)
        except GroupBroken:
            self._leave()
            return None
        return buffer

    def finalize(self) -> None:
        self._leave()
        self._buffers = ()


def _process_group(store: MemberStore, rank: int, size: int, device: torch.device, host: str) -> dist.ProcessGroup:
    """Make torch's group. Raises RuntimeError."""
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=4 * _BROADCAST_S)  # after ours: torch ends the process at its own
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, size, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout, gloo._threads = timedelta(seconds=_JOIN_S), 1
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, gloo))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0]
