"""How the members of a group find each other: keys and values that the trainer keeps, asked for over the connections.

torch's groups want a store. Members' ends of it are calls, each one message; the trainer answers them (`answer`) until
the member says that it has joined.
"""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_worker.weight_sync.connections import SyncConnection
from megatron_worker.weight_sync.messages import SyncAnswer, SyncCall, SyncReply
from megatron_worker.weight_sync.sampler_connections import Receiver

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
