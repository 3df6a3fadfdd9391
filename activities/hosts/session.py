"""A session's commands on a leased worker: brought from the store, given to the worker, their results carried back."""

import hashlib
import time
from pathlib import Path

from temporalio import activity

from activities.host_context import HOST_LEAVES, beating, host_is_leaving
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess
from activities.records.checkpoints import stored_checkpoints
from shared.contract import Fence, Frozen
from shared.errors import CorruptArtifact, HostLeft, WorkerLost
from shared.jobs.commands import CommandResult, Skip
from shared.jobs.events import Started, parse_event
from shared.jobs.leases import LeaseMark
from shared.runs.requests import RunId
from shared.runs.sessions import CommandRef
from shared.runs.status import CheckpointRef
from shared.storage.artifacts import find
from shared.storage.paths import RunKeys, write_atomically
from shared.storage.store import ObjectStore

_POLL_S = 0.002


class ApplyRequest(Frozen):
    """Commands for a session's worker. Those before `first` were done before, and come with a lease's first call: they
    are done again, where the worker has gone on from a state that lacks them.
    """

    run_id: RunId
    job_id: str
    fence: Fence
    worker_id: str
    commands: tuple[CommandRef, ...]
    first: int


class Applied(Frozen):
    """What came of the commands from `first` on. `checkpoint`: of the last one, if it saved a state."""

    failed: tuple[int, ...] = ()
    checkpoint: CheckpointRef | None = None


class ApplyCommands:
    """Gives sessions' commands to the workers of this host. Safe to be tried again: what is there stays."""

    def __init__(self, pool: WorkerPool, store: ObjectStore) -> None:
        self._pool = pool
        self._store = store

    @activity.defn(name="apply_commands", no_thread_cancel_exception=True)
    def apply_commands(self, request: ApplyRequest) -> Applied:
        """Have commands done, in order, after the session's job has begun on the worker.

        Raises:
            WorkerLost: the worker ended, serves another lease, or this host leaves.
            CorruptArtifact: a command in the store is not what was accepted, or one between has gone.
        """
        lease = LeaseMark(run_id=request.run_id, fence=request.fence)
        with self._pool.using(request.worker_id, lease) as worker, beating():
            return _Applying(worker, request, self._store).run()


class _Applying:
    def __init__(self, worker: WorkerProcess, request: ApplyRequest, store: ObjectStore) -> None:
        self._worker = worker
        self._request = request
        self._store = store
        self._keys = RunKeys(request.run_id)
        outputs = worker.paths.outputs(request.run_id, request.job_id, request.fence)
        self._log, self._folder = outputs / "log.jsonl", outputs / "commands"

    def run(self) -> Applied:
        began_after = self._wait_for_start()
        wanted = [ref for ref in self._request.commands if ref.number > began_after]
        first = wanted[0].number if wanted else began_after + 1
        if first > began_after + 1 and not self._path(first - 1).exists():
            message = f"the session goes on after command {began_after}, and the next one known is {first}"
            raise CorruptArtifact(message, self._keys.prefix)
        self._folder.mkdir(parents=True, exist_ok=True)
        for ref in wanted:
            self._give(ref)
        failed, checkpoint = [], None
        for ref in self._request.commands:
            if ref.number >= self._request.first:
                result = self._carry(ref)
                failed += [ref.number] if result.problem else []
                if result.step is not None and ref is self._request.commands[-1]:
                    checkpoint = self._checkpoint(result.step)
        return Applied(failed=tuple(failed), checkpoint=checkpoint)

    def _wait_for_start(self) -> int:
        """The command after which the worker goes on, as its log says first."""
        while not (line := self._first_line()).endswith(b"\n"):
            self._pause()
        event = parse_event(line)
        if not isinstance(event, Started):
            raise WorkerLost("the session's job did not begin")
        return event.first_step

    def _first_line(self) -> bytes:
        try:
            with self._log.open("rb") as log:
                return log.readline()
        except FileNotFoundError:
            return b""

    def _give(self, ref: CommandRef) -> None:
        """Write a command's file, once. One that changes nothing and has its result is a number to be passed over."""
        path = self._path(ref.number)
        if path.exists():
            return
        if ref.number < self._request.first and not ref.changes_state:
            data = Skip().model_dump_json().encode()
        else:
            data = self._store.get_bytes(self._keys.command(ref.number, ref.sha256))
            if hashlib.sha256(data).hexdigest() != ref.sha256:
                key = self._keys.command(ref.number, ref.sha256)
                raise CorruptArtifact("the command is not the one that was accepted", key)
        write_atomically(path, data, is_durable=False)

    def _carry(self, ref: CommandRef) -> CommandResult:
        """Wait for a command's result, and put it into the store; that of a publication waits for the publication."""
        path = self._path(ref.number).with_suffix(".result.json")
        while not path.exists():
            self._pause()
        data = path.read_bytes()
        result = CommandResult.model_validate_json(data)
        if not ref.publish or result.problem is not None:
            self._store.put_bytes(self._keys.command_result(ref.number, ref.sha256), data)
        return result

    def _checkpoint(self, step: int) -> CheckpointRef:
        """Wait until a checkpoint of a step stands in the store: the session's job carries it there, unless this lease
        began with it.
        """
        while True:
            for stored in reversed(stored_checkpoints(self._store, self._request.run_id)):
                if stored.step == step and (artifact := find(self._store, stored.key)) is not None:
                    return CheckpointRef(step=step, fence=Fence.from_label(stored.fence_label), artifact=artifact)
            self._pause(0.02)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"

    def _pause(self, seconds: float = _POLL_S) -> None:
        if host_is_leaving():
            raise HostLeft(HOST_LEAVES)
        if activity.is_cancelled() or not self._worker.is_alive():
            raise WorkerLost("the session's worker ended, or was given back")
        time.sleep(seconds)
