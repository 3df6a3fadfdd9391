"""What a host has in hand, written down in its root: of a host that was killed, the next one there tells Temporal.

Temporal itself hears of a dead host by a heartbeat that does not come, and a run would wait so long. On the machine it
is known at once, for whoever ends lets go of its locks. A host that was stopped, or whose machine is gone, is found by
its silence as before.
"""

import asyncio
import fcntl
import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from temporalio import activity
from temporalio.client import Client
from temporalio.client import Interceptor as ClientInterceptor
from temporalio.service import RPCError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput
from temporalio.worker import Interceptor as WorkerInterceptor

from shared.errors import WorkerLost

# An answer is sent after the activity's end, and may wait for a server that is away. To tell of an activity whose
# answer did arrive harms nothing: the server knows it no more.
_ANSWERED_S = 30.0
_TELL_S = 10.0
_log = logging.getLogger(__name__)


class HostRecord(ClientInterceptor, WorkerInterceptor):
    """The record of one host: `hosts/<role>-<n>/` of its root, the first that no living host holds.

    Given to a client, it writes down the task token of every activity that workers of this client have in hand.
    `queue` is that of this host alone, and the one of the host before it: jobs that wait there for workers that are
    gone are refused by the pool, instead of waiting for a host that never comes.
    """

    def __init__(self, hosts: Path, role: str) -> None:
        folder, self._lock = _claim(hosts, role)
        self._in_hand = folder / "in_hand"
        self._in_hand.mkdir(exist_ok=True)
        self._left = list(self._in_hand.iterdir())
        # With this machine's name: a root that was copied is another host's.
        self.queue = f"host-{socket.gethostname()}-{_own_id(folder / 'id')}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The host leaves in good order: everything in hand was answered."""
        for token in self._in_hand.iterdir():
            token.unlink(missing_ok=True)
        os.close(self._lock)

    async def report_lost(self, client: Client) -> None:
        """Fail what a host had in hand that was killed here, so that it is done anew at once."""
        await asyncio.gather(*(_fail(client, token) for noted in self._left if (token := noted.read_bytes())))
        for noted in self._left:
            noted.unlink()
        self._left.clear()

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Noting(next, self._in_hand)


class _Noting(ActivityInboundInterceptor):
    """Writes an activity's task token down while it is in hand, and somewhat longer."""

    def __init__(self, next: ActivityInboundInterceptor, folder: Path) -> None:
        super().__init__(next)
        self._folder = folder

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        noted = self._folder / uuid.uuid4().hex
        with suppress(OSError):  # a full disk: its silence will tell
            noted.write_bytes(activity.info().task_token)
        try:
            return await super().execute_activity(input)
        finally:
            asyncio.get_running_loop().call_later(_ANSWERED_S, noted.unlink, True)


async def _fail(client: Client, token: bytes) -> None:
    try:
        async with asyncio.timeout(_TELL_S):
            await client.get_async_activity_handle(task_token=token).fail(WorkerLost("its host was killed"))
        _log.warning("told Temporal of an activity of a host that was killed")
    except (RPCError, TimeoutError) as error:  # most had been answered, and are not known any more
        _log.info("an activity of a host that was killed: %s", error)


def _claim(hosts: Path, role: str) -> tuple[Path, int]:
    """The first folder that no living host holds, and the lock by which this one does."""
    number = 0
    while True:
        folder = hosts / f"{role}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := _locked(folder / "lock")) is not None:
            return folder, lock
        number += 1


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock until this process ends; None while another one does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _own_id(path: Path) -> str:
    """What stands there, or a new id, which stands there from now on."""
    if path.exists() and (known := path.read_text().strip()):
        return known
    new = uuid.uuid4().hex
    path.write_text(new)
    return new
