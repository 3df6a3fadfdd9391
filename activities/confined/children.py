"""The host's side of confined children: fork servers of this process, and the conversation with one child."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter

from activities.confined.fork_server import LENDER, types_of
from activities.isolation.frames import read_frame, write_frame
from shared import errors
from shared.child_environment import Kind, child_environment
from shared.errors import InvalidInput
from shared.programs import ROOM_OF_ENVIRONMENT
from shared.settings import ConfinedSettings

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
        kind: Kind = "confined",
        niceness: int = 0,
        added: Mapping[str, str] | None = None,
        borrows: bool = False,
    ) -> None:
        self._modules = tuple(modules)
        self._kind: Kind = kind
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
