"""Starts workers and samplers as forks of a process that has imported what they need, which saves seconds.

That process belongs to this host. It starts with the first such program, ends with its host, and is restarted if it is
lost. Its programs end with it. Without such a process, programs start as usual. It holds some 300 MB: `longshore dev`
ends it while nothing runs.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from activities.sandbox.calls import Server
from activities.sandbox.kernel import lower_priority, read_frame, write_frame
from shared.programs import SAMPLER_MODULES, TRAINER_MODULES

_IMPORTS = {
    "megatron_worker": (*TRAINER_MODULES, "megatron_worker.megatron.engine"),
    "megatron_worker.process.launcher": (*TRAINER_MODULES, "megatron_worker.megatron.engine"),
    "megatron_worker.sampler": (*SAMPLER_MODULES, "tokenizers", "megatron_worker.sampler.answers"),
    "megatron_worker.training.trial --role gpu": TRAINER_MODULES,
    "megatron_worker.training.trial --role sampler": SAMPLER_MODULES,
}
"""Beginnings of command lines behind `python -P -m`, and what their programs import. The longest that fits counts."""
_PATIENCE_S = 120.0  # for the imports of the first program, on a slow machine
_GRACE_S = 10.0
_UNUSED_S = 30.0
# How often an idle OpenMP thread looks for work before it sleeps: about 10 us. libgomp's default, 300,000 or 3 ms, is
# bad on a busy machine: with 2 threads beside 2 busy processes a step of 0.4 s took 6.6 s; with this value 1.1 s.
SPIN_COUNT = {"GOMP_SPINCOUNT": "1000"}
_log = logging.getLogger(__name__)
# Its libraries must start no threads while they are imported. Each program sets its own number of threads.
_SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_ROOM = {"LONGSHORE_ROOM": " " * 1024}  # a fork's title takes the place of its server's variables
_NICENESS = 5  # a computation of minutes on processors that requests of milliseconds need, too
_server = Server((), "worker", added=SPIN_COUNT | _SINGLE | _ROOM, isolates=False, niceness=_NICENESS)
os.register_at_fork(after_in_child=_server.forget_parents)
_turn = threading.Lock()  # for the three below
_num_starting = 0
_used_at = 0.0
_forks: "WeakSet[Fork]" = WeakSet()


class RunningProgram(Protocol):
    """A running program, as of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


def start(command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> RunningProgram:
    """Start a program in a new session, without input. Raises OSError."""
    if (imports := _imports_of(command)) is not None:
        try:
            with _starting():
                return _fork(command, environment, stdout, stderr, imports)
        except (OSError, EOFError) as error:
            _log.warning("%s starts as a process of its own: %s", command[3], error or "its server has ended")
    program = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    with suppress(OSError):  # it has ended
        lower_priority(program.pid, _NICENESS)
    return program


def prepare(command: Sequence[str]) -> None:
    """Import a program's modules before it is started, if it starts as a fork. Does not block."""

    def ask() -> None:
        with suppress(OSError), Path(os.devnull).open("wb") as nowhere, _starting():
            data, status = _server.fork({"imports": imports}, nowhere.fileno(), nowhere.fileno())
            data.close()  # its child ends, because it gets no program
            os.read(status, 1)
            os.close(status)

    if (imports := _imports_of(command)) is not None:
        threading.Thread(target=ask, daemon=True).start()


def end_if_unused() -> None:
    """End the process that programs are forks of, if for 30 s none ran and none was asked for."""
    global _used_at
    with _turn:
        if _num_starting or any(fork.poll() is None for fork in _forks):
            _used_at = time.monotonic()
        elif time.monotonic() > _used_at + _UNUSED_S:
            _server.end()


@contextmanager
def _starting() -> Iterator[None]:
    global _num_starting, _used_at
    with _turn:
        _num_starting += 1
    try:
        yield
    finally:
        with _turn:
            _num_starting, _used_at = _num_starting - 1, time.monotonic()


def _imports_of(command: Sequence[str]) -> Sequence[str] | None:
    if list(command[:3]) != [sys.executable, "-P", "-m"] or not hasattr(os, "pidfd_open"):
        return None
    return _IMPORTS.get(" ".join(command[3:6])) or _IMPORTS.get(command[3])


def _fork(
    command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int, imports: Sequence[str]
) -> RunningProgram:
    data, status = _server.fork({"imports": imports}, stdout, stderr)
    program = {"command": command, "environment": dict(environment), "cwd": str(Path.cwd())}
    try:
        with data:  # not by way of the server, which is not to see the program's environment
            write_frame(data.fileno(), json.dumps(program).encode())
            pid = int(read_frame(data.fileno(), deadline=time.monotonic() + _PATIENCE_S))
        return Fork(pid, os.pidfd_open(pid), status)
    except BaseException as error:
        os.close(status)  # so the server ends it
        if isinstance(error, TimeoutError):
            _server.end()
        raise


class Fork:
    """A forked program. It is killed when this object is garbage-collected."""

    def __init__(self, pid: int, ended: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._status = status
        self._lock = threading.Lock()
        with _turn:
            _forks.add(self)

    def __del__(self) -> None:
        os.close(self._ended)
        os.close(self._status)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, sig)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and _is_readable(self._ended, timeout_s):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._reported()
        return self.returncode

    def _reported(self) -> int:
        """Return the exit status that the server reported; SIGKILL's if the server was lost or is stopped."""
        told = os.read(self._status, 4096) if _is_readable(self._status, _GRACE_S) else b""
        return int(json.loads(told)[0]) if told else -signal.SIGKILL


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
