"""Records a host's running activities in its root. If it is killed, the next host there fails them at once.

Temporal notices a dead host only by a missing heartbeat, and runs would wait for that. On the same machine it is
noticed at once, as the kernel frees the locks of a process that ends. A host that was stopped, whose machine is gone,
or whose root is on a file system without locks, is still noticed by missing heartbeats.
"""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from temporalio import activity
from temporalio.client import Client
from temporalio.client import Interceptor as ClientInterceptor
from temporalio.converter import ActivitySerializationContext
from temporalio.service import RPCError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput
from temporalio.worker import Interceptor as WorkerInterceptor

from longshore.fields import Frozen
from shared.errors import LeaseLost

# An activity's result is sent after its end, and may wait for a server that is away, so its token is kept this long.
# Failing an activity whose result has arrived does no harm: the server does not know it any more.
_ANSWERED_S = 30.0
_TELL_S = 10.0
# Errors of file systems that have no locks, or whose lock server is away.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_log = logging.getLogger(__name__)


class _InHand(Frozen):
    """An activity that is executed. `token`: its task token in hexadecimal; its failure is sealed for the rest."""

    token: str
    workflow_id: str | None
    activity_type: str

    def context(self, namespace: str) -> ActivitySerializationContext:
        return ActivitySerializationContext(namespace, None, self.activity_type, None, self.workflow_id, None, False)


class HostRecord(ClientInterceptor, WorkerInterceptor):
    """The record of one host: `hosts/<machine>/<role>-<n>/` of its root, the first one that no running host has locked.

    Several machines may share a root on a network file system, whose locks may only work within a machine.

    As an interceptor of a client, it records the task token of every activity that the client's workers execute.
    `queue` is this host's own task queue, and was that of the host before it: the pool then refuses jobs that wait
    there for workers that are gone, instead of letting them wait for ever.
    """

    def __init__(self, hosts: Path, role: str) -> None:
        machine = socket.gethostname()
        self._lock: int | None = None
        self._in_hand: Path | None = None
        self._left: list[Path] = []
        own_id = uuid.uuid4().hex
        if (claimed := _claim(hosts / machine, role)) is not None:
            folder, self._lock = claimed
            self._in_hand = folder / "in_hand"
            self._in_hand.mkdir(exist_ok=True)
            self._left = list(self._in_hand.iterdir())
            own_id = _own_id(folder / "id")
        # With this machine's name, since a root may be copied to another machine.
        self.queue = f"host-{machine}-{own_id}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the record of a host that leaves in good order: all of its activities were answered."""
        if self._in_hand is not None:
            for token in self._in_hand.iterdir():
                token.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    async def report_lost(self, client: Client) -> None:
        """Fail the activities of a host that was killed here, so that they are retried at once."""
        await asyncio.gather(*(_fail(client, told) for noted in self._left if (told := noted.read_bytes())))
        for noted in self._left:
            noted.unlink()
        self._left.clear()

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return next if self._in_hand is None else _Noting(next, self._in_hand)


class _Noting(ActivityInboundInterceptor):
    """Records an activity's task token while it runs, and for _ANSWERED_S seconds longer."""

    def __init__(self, next: ActivityInboundInterceptor, folder: Path) -> None:
        super().__init__(next)
        self._folder = folder

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        noted = self._folder / uuid.uuid4().hex
        with suppress(OSError):  # a full disk: then a missing heartbeat has to do
            info = activity.info()
            lost = _InHand(token=info.task_token.hex(), workflow_id=info.workflow_id, activity_type=info.activity_type)
            noted.write_text(lost.model_dump_json())
        try:
            return await super().execute_activity(input)
        finally:
            asyncio.get_running_loop().call_later(_ANSWERED_S, noted.unlink, True)


async def _fail(client: Client, told: bytes) -> None:
    try:
        lost = _InHand.model_validate_json(told)
    except ValidationError:  # half-written: a missing heartbeat has to do
        return
    try:
        handle = client.get_async_activity_handle(task_token=bytes.fromhex(lost.token))
        async with asyncio.timeout(_TELL_S):
            await handle.with_context(lost.context(client.namespace)).fail(LeaseLost("its host was killed"))
        _log.warning("failed an activity of a host that was killed")
    except (RPCError, TimeoutError) as error:  # usually it had been answered, and is not known any more
        _log.info("an activity of a host that was killed: %s", error)


def _claim(folders: Path, role: str) -> tuple[Path, int] | None:
    """Lock the first folder that no running host has locked. Returns None if nothing can be locked."""
    number = 0
    while True:
        folder = folders / f"{role}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return folder, _locked(folder / "lock")
        except BlockingIOError:
            number += 1
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("no record of what this host has in hand: %s cannot be locked: %s", folder, error)
            return None


def _locked(path: Path) -> int:
    """Lock a file until this process ends. Raises OSError: another process has locked it, or files cannot be locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _own_id(path: Path) -> str:
    """Read the id at a path, or write a new one."""
    if path.exists() and (known := path.read_text().strip()):
        return known
    new = uuid.uuid4().hex
    path.write_text(new)
    return new
