"""Passes a session's commands from the store to a leased worker, and their results from the worker into the store."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

from pydantic import ConfigDict, ValidationError
from temporalio import activity

from activities.heartbeats import HOST_LEAVES, host_is_leaving, on_thread
from activities.hosts.workers import WorkerPool, WorkerProcess
from activities.records import newest_first
from longshore.commands import EFFECTS, CommandProblem, CommandResult
from longshore.events import Started, parse_event
from longshore.fields import Fence, Frozen
from longshore.runs import FIRST_TENANT, RunId, Tenant
from longshore.views import CheckpointRef
from shared.errors import CorruptArtifact, HostLeft, NotFound, WorkerLost
from shared.field_rules import first_error
from shared.jobs.commands import CommandHead, Skip
from shared.jobs.job import LeaseMark
from shared.runs.events import SessionResults
from shared.runs.start import MAX_NUMBER
from shared.storage.files import write_atomically
from shared.storage.host_states import HostAddress
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.store import ObjectStore

# --- Sessions that this host serves: the web service sends it their commands by HTTP, and waits for the results ---
#
# A command is in the store before the web service sends it here, and its result before it is returned. If a request is
# lost, both sides find what they need in the store.

_MOST_HELD = 64


class ServedSession:
    """A session whose commands this host gives to a worker. `has_news`: set when something was sent here."""

    def __init__(self, next: int) -> None:
        self.has_news = threading.Event()
        self._is_store_new = False
        self._next = next
        self._is_over = False
        self._lock = threading.Lock()
        self._commands: dict[int, bytes] = {}
        self._waiting: dict[int, list[Future[bytes | None]]] = {}

    def ask(self, number: int, command: bytes) -> "Future[bytes | None]":
        """Take a command that is in the store, and return its result to come. It is None if the store already has it,
        or if this host stops serving the session. `command` may be empty: then it is read from the store.
        """
        result = Future[bytes | None]()
        with self._lock:
            if self._is_over or number < self._next:
                self._is_store_new = True  # 0: the session may be closed
                result.set_result(None)
            else:
                if command and len(self._commands) < _MOST_HELD:
                    self._commands[number] = command
                else:
                    self._is_store_new = True
                others = [each for each in self._waiting.get(number, ()) if not each.cancelled()]
                self._waiting[number] = [*others, result]
        self.has_news.set()
        return result

    def command(self, number: int) -> bytes | None:
        """Return a command that was sent here, once."""
        with self._lock:
            return self._commands.pop(number, None)

    def take_store_news(self) -> bool:
        """Return True if the store may have what was not sent here, once."""
        with self._lock:
            is_new, self._is_store_new = self._is_store_new, False
            return is_new

    def stored(self, next: int, result: bytes) -> None:
        """Give the results of all commands before `next`, which are in the store, to those that wait for them.

        `result`: that of the last of these commands.
        """
        with self._lock:
            self._next = next
            self._commands = {number: each for number, each in self._commands.items() if number >= next}
            done = {number: self._waiting.pop(number) for number in list(self._waiting) if number < next}
        for number, waiting in done.items():
            _answer(waiting, result if number == next - 1 else None)

    def leave(self) -> None:
        """Tell everybody who waits that this host no longer serves the session."""
        with self._lock:
            self._is_over, waiting = True, list(self._waiting.values())
        for each in waiting:
            _answer(each, None)


def _answer(waiting: "list[Future[bytes | None]]", result: bytes | None) -> None:
    for each in waiting:
        if each.set_running_or_notify_cancel():
            each.set_result(result)


class ServedSessions:
    """The sessions whose commands this host passes on. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, ServedSession] = {}

    @contextmanager
    def serving(self, run_id: str, next: int) -> Iterator[ServedSession]:
        """Serve a session for a `with` block. `next`: the number of the next command without a result."""
        session = ServedSession(next)
        with self._lock:
            self._sessions[run_id] = session
        try:
            yield session
        finally:
            with self._lock:
                if self._sessions.get(run_id) is session:
                    del self._sessions[run_id]
            session.leave()

    def find(self, run_id: str) -> ServedSession | None:
        """Return a session, if this host serves it."""
        with self._lock:
            return self._sessions.get(run_id)


_POLL_S, _IDLE_POLL_S = 0.001, 0.05
# Seconds between looks into the store for a command, and for the session's end, if the web service has sent nothing.
_LOOK_EACH_S, _CLOSED_EACH_S = 3.0, 6.0
_SAVED_POLL_S = 0.02
_MOST_AHEAD = 32  # commands that are queued at the worker beyond its current one
_SKIP, _DROP = (Skip(drops=drops).model_dump_json().encode() for drops in (False, True))


class ApplyRequest(Frozen):
    """Have a worker do a session's commands from number `next` on; all before it have results.

    The activity returns after `most` commands, or when none has come for `idle_s` seconds.
    """

    run_id: RunId
    job_id: str
    fence: Fence
    worker_id: str
    next: int
    most: int
    idle_s: float
    tenant: Tenant = FIRST_TENANT


class AppliedCommands(Frozen):
    """How far a session's commands have come.

    Attributes:
        next: the number of the command that is done next.
        idle: no command came for `idle_s` seconds.
        checkpoint: a checkpoint to publish, as the result of the command before `next`.
    """

    next: int
    idle: bool = False
    checkpoint: CheckpointRef | None = None


class ApplyCommands:
    """Gives sessions' commands to the workers of this host. Retrying the activity does not repeat commands.

    Args:
        sessions: receives commands from the web service, and returns their results.
        at: the address at which the web service reaches this host.
    """

    def __init__(self, pool: WorkerPool, store: ObjectStore, sessions: ServedSessions, at: HostAddress) -> None:
        self._pool = pool
        self._store = store
        self._sessions = sessions
        self._at = at

    @on_thread("apply_commands")
    def apply_commands(self, request: ApplyRequest) -> AppliedCommands:
        """Give commands to the worker in order, once the session's job has begun there. Returns when none come, the
        session is closed, or a saved state must be published.

        Raises:
            WorkerLost: the worker ended, serves another lease, or this host leaves.
            CorruptArtifact: an object in the store is not a command, or a needed command is missing.
        """
        lease = LeaseMark(run_id=request.run_id, fence=request.fence)
        served = self._sessions.serving(request.run_id, request.next)
        with self._pool.using(request.worker_id, lease) as worker, served as session:
            self._store.put_bytes(RunKeys(request.run_id).host, self._at.model_dump_json().encode())
            return _Applying(worker, request, self._store, session).run()


class _ResultHead(Frozen):
    """The fields of a result that are needed to pass it on; all others are ignored."""

    model_config = ConfigDict(extra="ignore")

    kind: str
    step: int | None
    problem: CommandProblem | None


class _Applying:
    """The state of passing on commands: those before `_next` have results in the store, and the worker has been given
    those up to `_through`.
    """

    def __init__(
        self, worker: WorkerProcess, request: ApplyRequest, store: ObjectStore, session: ServedSession
    ) -> None:
        self._worker = worker
        self._session = session
        self._request = request
        self._store = store
        self._keys = RunKeys(request.run_id)
        self._results = SessionResults(store, request.run_id)
        outputs = worker.paths.outputs(request.run_id, request.job_id, request.fence)
        self._log, self._folder = outputs / "log.jsonl", outputs / "commands"
        job = worker.paths.job(request.run_id, request.job_id, request.fence)
        self._archived = worker.paths.archive / job.name
        self._next = request.next
        self._through = request.next - 1
        self._publishes = False
        self._to_publish: CheckpointRef | None = None
        self._look_at, self._ask_at = 0.0, 0.0  # when the store is asked for a command, and for the session's end

    def run(self) -> AppliedCommands:
        began_after = self._wait_for_start()
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._path(self._through).exists():  # the first call on this lease's worker
            self._begin_behind(began_after)
        behind, idle_since = self._request.next + self._request.most, time.monotonic()
        while self._to_publish is None and self._next < behind:
            if self._carry() or self._give():
                idle_since = time.monotonic()
            elif self._next > self._through and (now := time.monotonic()) > min(
                self._ask_at, idle_since + self._request.idle_s
            ):
                self._ask_at = now + _CLOSED_EACH_S
                if self._store.head(self._keys.is_closed) is not None and self._command(self._next) is None:
                    break
                if now > idle_since + self._request.idle_s:
                    return AppliedCommands(next=self._next, idle=True)
            elif self._next > self._through:
                self._check()
                self._session.has_news.wait(_IDLE_POLL_S)
            else:
                self._pause()
        return AppliedCommands(next=self._next, checkpoint=self._to_publish)

    def _wait_for_start(self) -> int:
        """Wait for the first event of the worker's log. Returns the number of the last command in its state."""
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

    def _begin_behind(self, command: int) -> None:
        """Bring a worker that starts from the state after `command` up to the last command that has a result.

        It repeats the commands in between (`_again`). Up to `command`, all others have
        results, as `carry_results` stores them before the state: commands without one were to save that state.
        """
        while self._next <= command and self._to_publish is None:
            if self._has_result():
                self._next += 1
                continue
            head = self._head(self._next, self._command(self._next) or b"")
            if head.kind == "gap":
                self._next = head.through + 1
            else:
                self._saved(head, self._checkpoint(self._next) or self._checkpoint(command))
        while self._has_result():
            self._next += 1
        self._through = command
        while self._through < self._next - 1:
            number = self._through + 1
            data = self._command(number)
            if data is None:
                message = f"the session goes on after command {command}, and command {number} has gone"
                raise CorruptArtifact(message, self._keys.command(number))
            head = self._head(number, data)
            loaded = head.checkpoint
            # A state that was loaded may have gone. That matters if the state that the session saved was damaged.
            key = unquote(loaded.uri.removeprefix(f"{self._store.uri}/")) if loaded is not None else ""
            is_gone = loaded is not None and self._store.head(f"{key}/{MANIFEST}") is None
            if loaded is not None and is_gone and self._problem(number) is None:
                raise CorruptArtifact(f"the state that command {number} loaded has gone", loaded.uri)
            self._write(number, self._again(number, head, data), head.through)

    def _again(self, number: int, head: CommandHead, data: bytes) -> bytes:
        """Return a new worker's replacement for a command that has a result: the same command, if it changes state.

        An `error`, such as a full device, might not happen again. Its effect is repeated, because the client knows it.
        """
        effect = EFFECTS.get(head.kind)
        if effect == "nothing":
            return _SKIP
        if head.kind == "gap" or (problem := self._problem(number)) is None or problem.kind != "error":
            return data
        return _DROP if effect == "slot" else _SKIP

    def _problem(self, number: int) -> CommandProblem | None:
        return _ResultHead.model_validate_json(self._store.get_bytes(self._keys.command_result(number))).problem

    def _has_result(self) -> bool:
        return self._results.has(self._next)

    def _give(self) -> bool:
        """Give the next command to the worker, if it has arrived and the worker has fewer than _MOST_AHEAD waiting.

        Returns False if there was nothing to give.
        """
        now, number = time.monotonic(), self._through + 1
        if self._publishes or number >= self._next + _MOST_AHEAD:
            return False
        if self._session.has_news.is_set():
            self._session.has_news.clear()  # before the store is asked, so that nothing is missed
            if self._session.take_store_news():
                self._look_at = self._ask_at = 0.0
        data = self._session.command(number)
        if data is None:
            if now < self._look_at:
                return False
            data = self._command(number)
        if data is None:
            self._look_at = now + _LOOK_EACH_S
            return False
        head = self._head(number, data)
        if head.kind == "gap":
            if number > self._next:  # commands before it are still being done
                return False
            self._next = head.through + 1  # their results were stored when they were dropped
        self._publishes = head.publish
        self._write(number, data, head.through)
        return True

    def _carry(self) -> bool:
        """Put the next result into the store, if the worker has written it. That of a saved state waits for the state.

        Returns False if there is no result yet.
        """
        if self._next > self._through:
            return False
        try:
            data = self._path(self._next).with_suffix(".result.json").read_bytes()
        except FileNotFoundError:
            return False
        result = _ResultHead.model_validate_json(data)
        if _saves_state(result.kind) and result.step is not None:
            # A newer state counts as well: with a slow store, the uploader skips states that newer ones wait behind.
            # (A state to be published is the newest, as no commands are given to the worker after it.)
            while (checkpoint := self._checkpoint()) is None or checkpoint.step < result.step:
                self._pause(_SAVED_POLL_S)
            if self._publishes and self._next == self._through:
                self._to_publish, self._next = checkpoint, self._next + 1
                return True
        self._results.put(self._next, data)
        self._next += 1
        self._session.stored(self._next, data)
        self._publishes = self._publishes and self._next <= self._through
        return True

    def _saved(self, head: CommandHead, checkpoint: CheckpointRef | None) -> None:
        """Finish the next command, which saved a state and lost its result: store it, or ask to publish the state."""
        if checkpoint is None:
            raise CorruptArtifact("the state that was saved has gone", self._keys.checkpoints)
        if head.publish:
            self._to_publish = checkpoint
        else:
            step = self._next if head.kind == "load_state" else checkpoint.step
            result = CommandResult(number=self._next, kind=head.kind, step=step)
            self._results.put(self._next, result.model_dump_json().encode())
        self._next += 1

    def _checkpoint(self, most: int = MAX_NUMBER) -> CheckpointRef | None:
        """Return the newest state in the store that is after command `most` or an earlier one."""
        found = newest_first(self._store, self._request.run_id)
        return next((checkpoint for checkpoint in found if checkpoint.step <= most), None)

    def _command(self, number: int) -> bytes | None:
        if (sent := self._session.command(number)) is not None:
            return sent
        with suppress(NotFound):
            return self._store.get_bytes(self._keys.command(number))
        return None

    def _head(self, number: int, data: bytes) -> CommandHead:
        try:
            return CommandHead.of(data)
        except ValidationError as error:
            raise CorruptArtifact(first_error(error)[1], self._keys.command(number)) from None

    def _write(self, number: int, data: bytes, through: int) -> None:
        """Write a command's file for the worker, unless it exists. A gap's file covers all commands up to `through`."""
        if not self._path(number).exists():
            write_atomically(self._path(number), data, is_durable=False)
        self._through = max(number, through)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"

    def _pause(self, seconds: float = _POLL_S) -> None:
        self._check()
        time.sleep(seconds)

    def _check(self) -> None:
        """Raise WorkerLost if the worker does not do the session's commands any more."""
        if host_is_leaving():
            raise HostLeft(HOST_LEAVES)
        if activity.is_cancelled() or not self._worker.is_alive():
            raise WorkerLost("the session's worker ended, or was given back")
        if self._archived.exists():  # the worker may still run, for other runs
            raise WorkerLost("the session's job has ended")


def carry_results(results: SessionResults, folder: Path, through: int) -> None:
    """Put results that are not in the store yet there, before a state that includes their commands is uploaded.

    A worker that continues from that state does not repeat the commands, so the results would be lost. Results of
    commands that save a state are left out, because they wait for the upload.
    """
    missing = []
    for number in range(through, 0, -1):
        path = folder / f"{number:08d}.result.json"
        if not path.exists() or results.has(number):
            break
        missing.append((number, path.read_bytes()))
    for number, data in reversed(missing):
        result = _ResultHead.model_validate_json(data)
        if not (_saves_state(result.kind) or result.kind == "skip") or result.problem is not None:
            results.put(number, data)


def _saves_state(kind: str) -> bool:
    return EFFECTS.get(kind) == "saved_state"
