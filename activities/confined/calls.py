"""Calls Longshore's own functions on untrusted data, each in a child process under limits of memory and time.

    host ──a socket a call──► fork server (imports done, one thread) ──fork──► child: one call, then it ends

On untrusted data a tokenizer, a Parquet reader or a JSON parser may take any amount of memory, loop, or abort its
process. If the child breaks by itself, its input is at fault: InvalidInput, which is final. If it was killed from
outside, the call may be retried; also if the kernel killed it for lack of memory, unless it used much of it itself.

Requests, signs of life and results are JSON, which pydantic reads (no pickle). The child has no credentials: its caller
stages its inputs from a store, and answers its questions (`answer`). It dies with the fork server, which dies with
its host. When memory runs out, the kernel kills such children first.
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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, TypeVarTuple

from pydantic import TypeAdapter

from activities.confined.fork_server import LENDER, types_of
from activities.isolation import read_frame, write_frame
from shared import errors
from shared.child_environment import Kind as ChildKind
from shared.child_environment import child_environment
from shared.errors import InvalidInput
from shared.programs import ROOM_OF_ENVIRONMENT
from shared.settings import ConfinedSettings

# --- The host's side of confined children: fork servers of this process, and the conversation with one child ---

_MAX_FRAME_BYTES = 256 << 20
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 10.0
AnswerQuestion = Callable[[bytearray], bytes]
"""Answers a child's question. The child reads untrusted data, so it may ask anything."""
_MUCH = 0.5  # share of its memory limit; a child above it is to blame if the host runs out of memory


class Child:
    """The host's side of one call's child. `_place`: the place in the input that the child reported last."""

    def __init__(self, data: socket.socket, status: int, settings: ConfinedSettings) -> None:
        self._data = data
        self._status = status
        self._settings = settings
        self._place: str | None = None
        self._is_abandoned = False

    def ask(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: AnswerQuestion | None = None
    ) -> Iterator[bytearray]:
        """Have the child call a function, and yield its results as JSON. Raises as `results` does."""
        asked, _ = types_of(function)
        limits = self._settings.model_dump(mode="json")
        opening = {"module": function.__module__, "function": function.__qualname__, "limits": limits}
        self.send(json.dumps(opening).encode())
        self.send(TypeAdapter(asked).dump_json(arguments))
        return self.results(answer)

    def abandon(self) -> None:
        """Make another thread's wait for the child end, with an error. It then closes the connection."""
        self._is_abandoned = True
        with suppress(OSError):  # it is closed
            self._data.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the fork server then ends the child."""
        self._data.close()
        os.close(self._status)

    def send(self, frame: bytes) -> None:
        with suppress(BrokenPipeError):  # `_ended` raises the reason
            write_frame(self._data.fileno(), frame)

    def results(self, answer: AnswerQuestion | None = None) -> Iterator[bytearray]:
        """Yield the frames of results. `answer`: answers the child's questions; its errors are raised.

        Raises the child's error, or one that says how the child ended.
        """
        while True:
            frame = self._receive()
            kind = frame.pop(0)
            match chr(kind):
                case "s":
                    self._place = json.loads(frame) or self._place
                case "q" if answer is not None:
                    self.send(answer(frame))
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
            raise InvalidInput("its result is larger than the limit", self._place) from error
        except TimeoutError as error:
            raise InvalidInput(f"it takes longer than {silence_s:g} s", self._place) from error
        except (EOFError, ConnectionResetError):
            self._ended()

    def _ended(self) -> NoReturn:
        """Raise the reason why the child ended without a result."""
        if self._is_abandoned:
            raise RuntimeError("nobody waits for this call any more")
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
    """Raise the error that the function raised in the child."""
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


class ForkServer:
    """A fork server of this process, started when it is first needed, and again if it is lost.

    Args:
        modules: imported by the server, so that its children need not import them.
        kind: the kind of its environment.
        niceness: its children's, for hosts whose processors others need.
        added: environment variables besides those of its kind.
        borrows: in a stack's process, use a fork of the stack's server, shared by all that ask for the same modules.
    """

    def __init__(
        self,
        modules: Sequence[str],
        kind: ChildKind = "confined",
        niceness: int = 0,
        added: Mapping[str, str] | None = None,
        borrows: bool = False,
    ) -> None:
        self._modules = tuple(modules)
        self._kind: ChildKind = kind
        self._niceness = niceness
        self._added = dict(added or {})
        self._lock = threading.Lock()
        self._borrows = borrows
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def forget_parents(self) -> None:
        """Reset the state in a forked process: the server belongs to its parent."""
        self.__init__(self._modules, self._kind, self._niceness, self._added, self._borrows)  # type: ignore[misc]

    def start(self) -> None:
        with self._lock:
            self._started()

    def fork(self, *output: int, opening: bytes | None = None) -> tuple[socket.socket, int]:
        """Fork a child. Returns its socket, and the pipe on which the fork server reports how it ended.

        Args:
            output: of a program, the descriptors of its output and its errors.
            opening: of a program, its first frame, a small one: the server is not to wait for it.
        """
        ours, childs = socket.socketpair()
        told, tells = os.pipe()
        try:
            if opening is not None:
                write_frame(ours.fileno(), opening)
            self._hand_over(childs.fileno(), tells, *output)
        except BaseException:
            ours.close()
            os.close(told)
            raise
        finally:
            childs.close()
            os.close(tells)
        return ours, told

    def _hand_over(self, *descriptors: int) -> None:
        with self._lock:
            for is_last_try in (False, True):
                try:
                    socket.send_fds(self._started(), [b"f"], descriptors)
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
                if not (self._borrows and self._borrow(theirs)):
                    self._execute(theirs)
        return self._control

    def _execute(self, theirs: socket.socket) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # a terminal's Ctrl-C is for the host
            env=self._environment,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, self._niceness)

    def _borrow(self, theirs: socket.socket) -> bool:
        """Use a fork of the stack's server. Returns False if there is no stack's server."""
        if LENDER not in os.environ:
            return False
        environment = {name: value for name, value in self._environment.items() if name not in ROOM_OF_ENVIRONMENT}
        asked = {"command": self._command, "environment": environment, "niceness": self._niceness}
        ours, childs = socket.socketpair()
        with ours, childs, socket.socket(fileno=os.dup(int(os.environ[LENDER]))) as lender:
            write_frame(ours.fileno(), json.dumps(asked | {"imports": self._modules}).encode())
            try:
                socket.send_fds(lender, [b"s"], [childs.fileno(), theirs.fileno()])
            except OSError:
                return False
        return True

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-m", "activities.confined.fork_server", *self._modules]

    @property
    def _environment(self) -> dict[str, str]:
        return child_environment(self._kind) | self._added

    def end(self) -> None:
        """Drop a server that does not answer. Its children end with it, unless it is shared."""
        with self._lock:
            self._borrows = False
            self._forget()

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")

_SLICE_S = 0.5  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits
_GRADING = 4  # times as many places as for others: graders take little memory, and wait for slow judges

# Modules that calls need, imported once; others would be imported in every child.
_PRELOADED = (
    "numpy",
    "tokenizers",
    "pyarrow",
    "pyarrow.parquet",
    "activities.grading.grade",
    "activities.models.files",
    "activities.models.gguf_file",
    "activities.publishing.export",
    "activities.sampling.score",
    "activities.trajectories.pack_trajectories",
    "activities.tokenizing.tokenize",
    "activities.tokenizing.render_prompts",
    "activities.tokenizing.tokenize",
)

Kind = Literal["short", "dataset", "grading"]


def call(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], AnswerT],
    *arguments: *Arguments,
    kind: Kind = "short",
    answer: AnswerQuestion | None = None,
) -> AnswerT:
    """Call a module-level function in a child process, as soon as a place is free, and return its result.

    Args:
        function: its parameters and its result are annotated with types that JSON can carry.
        kind: `dataset` calls read a whole dataset and always leave one place to other calls; `grading` calls mostly
            wait for judges and have separate places.
        answer: answers the function's questions (`ask` of fork_server.py).

    Raises:
        LongshoreError, OSError: what the function raised. InvalidInput also if the child broke a limit or crashed.
        RuntimeError: the child was killed from outside, or the function has a bug.
    """
    _, result_type = types_of(function)
    [frame] = _frames(settings, function, arguments, kind, answer)
    result: AnswerT = TypeAdapter(result_type).validate_json(frame)
    return result


def stream(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], Iterator[AnswerT]],
    *arguments: *Arguments,
    kind: Kind = "short",
) -> Generator[AnswerT, None, None]:
    """Stream a generator function's items from a child. Raises as `call` does. Close it to end the child."""
    _, answer = types_of(function)
    adapter: TypeAdapter[AnswerT] = TypeAdapter(answer)
    for frame in _frames(settings, function, arguments, kind):
        yield adapter.validate_json(frame)


def prepare() -> None:
    """Start this process's fork server, which the first call would else wait for."""
    threading.Thread(target=_server.start, daemon=True).start()


def _frames(
    settings: ConfinedSettings,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    kind: Kind,
    answer: AnswerQuestion | None = None,
) -> Iterator[bytearray]:
    with _places.one(settings, kind):
        data, status = _server.fork()
        child = Child(data, status, settings)
        try:
            yield from child.ask(function, arguments, answer)
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


_server = ForkServer(_PRELOADED)
_places = _Places()
os.register_at_fork(after_in_child=_server.forget_parents)
os.register_at_fork(after_in_child=_places.__init__)  # type: ignore[misc]
