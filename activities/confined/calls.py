"""Calls Longshore's own functions on untrusted data, each in a child process under limits of memory and time.

    host ──a socket a call──► fork server (imports done, one thread) ──fork──► child: one call, then it ends

On untrusted data a tokenizer, a Parquet reader or a JSON parser may take any amount of memory, loop, or abort its
process. If the child breaks by itself, its input is at fault: InvalidInput, which is final. If somebody killed it, the
call may be retried. The same holds if the kernel killed it for lack of memory, unless it had taken much of it itself.

Requests, signs of life and results are JSON, which pydantic reads (no pickle). The child's environment includes the
store's credentials (AWS_*), since it runs only Longshore's code; untrusted code runs in a sandbox without them. The
child dies with the fork server, which dies with its host. When memory runs out, the kernel kills such children first.
"""

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, TypeVarTuple

from pydantic import TypeAdapter

from activities.confined.fork_server import types_of
from activities.isolation.frames import read_frame, write_frame
from shared import errors
from shared.child_environment import child_environment
from shared.errors import InvalidInput
from shared.settings import ConfinedSettings

AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")

_MAX_FRAME_BYTES = 256 << 20
_SLICE_S = 0.5  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 10.0
_MUCH = 0.5  # share of its memory limit from which on a child itself is to blame that the host has run out
_GRADING = 4  # times as many places as for others: graders take little memory, and wait for slow judges

Kind = Literal["short", "dataset", "grading"]


def call(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], AnswerT],
    *arguments: *Arguments,
    kind: Kind = "short",
) -> AnswerT:
    """Call a module-level function in a child process, as soon as there is a place for one more, and return its result.

    Args:
        function: its parameters and its result are annotated with types that JSON can carry.
        kind: `dataset` for what reads all of one, which leaves a place to others; `grading`, which mostly waits for
            judges, has places of its own.

    Raises:
        LongshoreError, OSError: what the function raised. InvalidInput also where the child broke a limit, or broke.
        RuntimeError: somebody killed the child, or the function has a bug.
    """
    _, answer = types_of(function)
    [frame] = _frames(settings, function, arguments, kind)
    result: AnswerT = TypeAdapter(answer).validate_json(frame)
    return result


def stream(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], Iterator[AnswerT]],
    *arguments: *Arguments,
    kind: Kind = "short",
) -> Generator[AnswerT, None, None]:
    """Stream what a generator function yields in a child. Raises as `call` does. Close it to end the child."""
    _, answer = types_of(function)
    adapter: TypeAdapter[AnswerT] = TypeAdapter(answer)
    for frame in _frames(settings, function, arguments, kind):
        yield adapter.validate_json(frame)


def prepare() -> None:
    """Start this process's fork server, which the first call would else wait for."""
    threading.Thread(target=_server.start, daemon=True).start()


def _frames(
    settings: ConfinedSettings, function: Callable[..., Any], arguments: tuple[Any, ...], kind: Kind
) -> Iterator[bytearray]:
    asked, _ = types_of(function)
    limits = settings.model_dump(mode="json")
    opening = {"module": function.__module__, "function": function.__qualname__, "limits": limits}
    with _places.one(settings, kind):
        data, status = _server.fork()
        child = _Child(data, status, settings)
        try:
            child.send(json.dumps(opening).encode())
            child.send(TypeAdapter(asked).dump_json(arguments))
            yield from child.results()
        finally:
            child.close()


class _Places:
    """Bounds the number of this process's children, as they share the machine's memory. Further calls wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[object, Kind] = {}

    @contextmanager
    def one(self, settings: ConfinedSettings, kind: Kind) -> Iterator[None]:
        mine = object()
        try:
            with self._changed:
                while not self._is_free(kind, settings.at_once or _room(settings.memory_bytes)):
                    self._changed.wait(_SLICE_S)
                self._held[mine] = kind
            yield
        finally:
            with self._changed:
                self._held.pop(mine, None)
                self._changed.notify_all()

    def _is_free(self, kind: Kind, at_once: int) -> bool:
        held = Counter(self._held.values())
        match kind:
            case "grading":
                return held["grading"] < _GRADING * at_once
            case "dataset" if held["dataset"] >= at_once - 1:
                return False
            case _:
                return held["short"] + held["dataset"] < at_once


@cache
def _room(memory_bytes: int) -> int:
    """Return how many children fit into the memory of this machine, at least 2."""
    return max(2, machine_bytes() // memory_bytes)


def machine_bytes() -> int:
    """Return the memory of this machine or container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such container, or "max"
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


class _Child:
    """The host's side of one call's child. `_place`: the place in the input that the child reported last."""

    def __init__(self, data: socket.socket, status: int, settings: ConfinedSettings) -> None:
        self._data = data
        self._status = status
        self._settings = settings
        self._place: str | None = None

    def close(self) -> None:
        """Close the connection; the fork server then ends the child."""
        self._data.close()
        os.close(self._status)

    def send(self, frame: bytes) -> None:
        with suppress(BrokenPipeError):  # `_ended` raises the reason
            write_frame(self._data.fileno(), frame)

    def results(self) -> Iterator[bytearray]:
        """Yield the frames of results. Raises what the child raised, or an error that says how it ended."""
        while True:
            frame = self._receive()
            kind = frame.pop(0)
            match chr(kind):
                case "s":
                    self._place = json.loads(frame) or self._place
                case "r":
                    yield frame
                case "e":
                    return
                case _:
                    _raise(json.loads(frame), self._place)

    def _receive(self) -> bytearray:
        silence_s = self._settings.silence_s
        try:
            return read_frame(self._data.fileno(), _MAX_FRAME_BYTES, time.monotonic() + silence_s)
        except OverflowError as error:
            raise InvalidInput("what it comes to is larger than may be handed on", self._place) from error
        except TimeoutError as error:
            raise InvalidInput(f"it takes longer than {silence_s:g} s", self._place) from error
        except (EOFError, ConnectionResetError):
            self._ended()

    def _ended(self) -> NoReturn:
        """Raise the reason why the child ended without a result."""
        if not select.select([self._status], [], [], _GRACE_S)[0] or not (told := os.read(self._status, 4096)):
            raise RuntimeError("the fork server ended, and the process of this call with it")
        status, out_of_memory, peak_bytes = json.loads(told)
        limits = self._settings
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGXCPU:
                raise InvalidInput(f"it takes more than {limits.step_cpu_s} s of processor time", self._place)
            if number == signal.SIGKILL and out_of_memory and peak_bytes >= _MUCH * limits.memory_bytes:
                raise InvalidInput("it takes more memory than this host has left", self._place)
            if number in _FROM_OUTSIDE:
                raise RuntimeError(f"the process of this call was killed by signal {number}")
            raise InvalidInput(
                f"reading it aborts its process ({signal.Signals(number).name}), as too much memory does: "
                f"the limit is {_in_words(limits.memory_bytes)}",
                self._place,
            )
        raise RuntimeError(f"the process of this call ended with status {os.waitstatus_to_exitcode(status)}")


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g} GiB"


def _raise(told: dict[str, Any], place: str | None) -> NoReturn:
    """Raise what the function raised in the child."""
    match told:
        case {"error": "InvalidInput" | "CorruptArtifact" as name, "message": message, "place": where}:
            raise getattr(errors, name)(message, where)
        case {"error": name, "message": message}:
            raise getattr(errors, name)(message)
        case {"memory": limit}:
            raise InvalidInput(f"reading it takes more memory than the {_in_words(limit)} that it may", place)
        case {"panic": message}:
            raise InvalidInput(f"it cannot be read: {message}", place)
        case {"errno": number, "strerror": text, "filename": filename}:
            raise OSError(number, text, filename)
        case _:
            raise RuntimeError(f"in a process of its own:\n{told['bug']}")


class _ForkServer:
    """This process's fork server, started when it is first needed, and again when it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._lock:
            self._started()

    def fork(self) -> tuple[socket.socket, int]:
        """Fork a child. Returns its socket, and the pipe on which the fork server reports how it ended."""
        ours, childs = socket.socketpair()
        told, tells = os.pipe()
        try:
            self._hand_over(childs.fileno(), tells)
        except BaseException:
            ours.close()
            os.close(told)
            raise
        finally:
            childs.close()
            os.close(tells)
        return ours, told

    def _hand_over(self, data: int, status: int) -> None:
        with self._lock:
            for is_last_try in (False, True):
                try:
                    socket.send_fds(self._started(), [b"f"], [data, status])
                    return
                except OSError as error:  # it was killed: one more is started
                    if is_last_try or error.errno not in (errno.EPIPE, errno.ECONNRESET):
                        raise
                    self._forget()

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "activities.confined.fork_server"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd=Path(__file__).parents[2],
                    start_new_session=True,  # a terminal's Ctrl-C is for the host
                    env=child_environment("confined"),
                )
        return self._control

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


_server = _ForkServer()
_places = _Places()
os.register_at_fork(after_in_child=_server.__init__)  # type: ignore[misc]
os.register_at_fork(after_in_child=_places.__init__)  # type: ignore[misc]
