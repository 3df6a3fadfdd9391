"""Calls Longshore's own functions on untrusted data, or untrusted code, each in a child process in a sandbox.

    host ──a socket a call──► server (imports done, one thread) ──fork──► child: one call, then it ends

A child sees Python's files and those that its call names, has no network, starts no process, and has limits of
memory, time, files and answers (kernel.py). On untrusted data a tokenizer, a Parquet reader or a JSON parser may take
any amount of memory, loop, or abort its process. If the child breaks by itself, its input is at fault: InvalidInput,
which is final. If it was killed from outside, the call may be retried; also if the kernel killed it for lack of memory,
unless it used much of it itself.

Requests, signs of life and results are JSON, which pydantic reads (no pickle). The child has no credentials: its caller
stages its inputs from a store, and answers its questions (`answer`). It dies with the server, which dies with its host.
When memory runs out, the kernel kills such children first.
"""

import importlib
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, TypeVarTuple

from pydantic import TypeAdapter

from activities.heartbeats import LOOK_EVERY_S, stop_if_cancelled
from activities.sandbox.child import MESSAGE_BYTES, ask_code, is_child, told, types_of
from activities.sandbox.kernel import TMP_BYTES, launchers, lower_priority, read_frame, write_frame
from shared import errors
from shared.child_environment import Kind as ChildKind
from shared.child_environment import child_environment
from shared.errors import InvalidInput, LongshoreError
from shared.settings import ConfinedSettings

_MAX_FRAME_BYTES = 256 << 20
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 10.0
_MOST_LOOKED_AT = 20_000  # files of a folder, for links
_START_S = 120.0  # for the server's start, on a slow machine
AnswerQuestion = Callable[[bytearray], bytes]
"""Answers a child's question. The child reads untrusted data, so it may ask anything."""
_MUCH = 0.5  # share of its memory limit; a child above it is to blame if the host runs out of memory


# --- The server of this process's children ---


@dataclass(eq=False)
class Server:
    """A sandbox's server, started when it is first needed, and again if it is lost.

    Args:
        modules: imported by the server before the first call, beside the called function's.
        kind: the kind of its environment.
        is_code: its children run untrusted code.
        niceness: its children's, for hosts whose processors others need.
        added: environment variables besides those of its kind.
        isolates: its children are isolated. Our own programs are not.
    """

    modules: Sequence[str]
    kind: ChildKind = "confined"
    is_code: bool = False
    niceness: int = 0
    added: dict[str, str] = field(default_factory=dict)
    isolates: bool = True

    def __post_init__(self) -> None:
        self.forget_parents()

    def forget_parents(self) -> None:
        """Have no server: at first, and again in a forked process, as it belongs to its parent."""
        self.isolation: tuple[str, str | None] = "", None
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> tuple[str, str | None]:
        """Start it. Returns how its children are isolated, and if they are not: why the system refuses."""
        with self._lock:
            self._started()
            return self.isolation

    def fork(self, opening: dict[str, Any], *output: int) -> tuple[socket.socket, int]:
        """Fork a child. Returns its socket, and the pipe on which the server reports how it ended.

        `output`: of a program, the descriptors of its output and its errors.
        """
        message = json.dumps(opening).encode()
        if len(message) > MESSAGE_BYTES:
            raise ValueError("a call that names too many files")
        ours, childs = socket.socketpair()
        told, tells = os.pipe()
        try:
            with self._lock:
                for is_last_try in (False, True):
                    try:
                        socket.send_fds(self._started(), [message], [childs.fileno(), tells, *output])
                        break
                    except (BrokenPipeError, ConnectionResetError):  # it was killed: one more is started
                        self._forget()
                        if is_last_try:
                            raise
        except BaseException:
            ours.close()
            os.close(told)
            raise
        finally:
            childs.close()
            os.close(tells)
        return ours, told

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._control is None:
            bubblewraps = [(launcher, "bubblewrap") for launcher in launchers()]
            for launcher, isolation in [*bubblewraps, ([], "namespaces")] if self.isolates else [([], "programs")]:
                self._execute([*launcher, sys.executable, "-m", "activities.sandbox.child", isolation])
                if self.isolation[1] is None:
                    break
        assert self._control is not None
        return self._control

    def _execute(self, command: list[str]) -> None:
        self._forget()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                start_new_session=True,  # a terminal's Ctrl-C is for the host
                env=child_environment(self.kind) | self.added,
            )
        if self.niceness:
            lower_priority(self._process.pid, self.niceness)
        self._control.settimeout(_START_S)
        told = self._control.recv(MESSAGE_BYTES)
        self._control.settimeout(None)
        self.isolation = tuple(json.loads(told)) if told else ("", "its server does not start")

    def end(self) -> None:
        """End the server, and its children with it."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


# --- One call ---


@dataclass(frozen=True)
class Limits:
    """What one call may take and see.

    Attributes:
        memory_bytes: for untrusted code beside what its server has.
        step_cpu_s, silence_s: seconds, of the processor and in all, from one sign of life to the next. (What untrusted
            code says is no sign: they are for an answer.)
        file_bytes, answer_bytes: of one file that it writes, and of one answer.
        reads, writes: files and folders that it sees.
    """

    memory_bytes: int
    step_cpu_s: int
    silence_s: float
    file_bytes: int = TMP_BYTES
    answer_bytes: int = _MAX_FRAME_BYTES
    reads: Sequence[Path] = ()
    writes: Sequence[Path] = ()

    @classmethod
    def of(cls, settings: ConfinedSettings, reads: Sequence[Path] = (), writes: Sequence[Path] = ()) -> "Limits":
        return cls(**settings.model_dump(exclude={"at_once"}), reads=reads, writes=writes)

    @property
    def numbers(self) -> dict[str, float]:
        """The limits that a child gets."""
        return {name: value for name, value in asdict(self).items() if name not in ("reads", "writes")}

    def within(self, most: "Limits") -> "Limits":
        return replace(self, **{name: min(value, most.numbers[name]) for name, value in self.numbers.items()})  # type: ignore[arg-type]


def _with_links(path: Path) -> Iterator[str]:
    """Yield a path, and the files that the links in it name, which may lie elsewhere: in a hub's cache they do."""
    yield str(path)
    for each in islice(path.rglob("*"), _MOST_LOOKED_AT) if path.is_dir() else ():
        if each.is_symlink() and each.is_file():
            yield os.path.normpath(each.parent / each.readlink())
            yield os.path.realpath(each)


class Child:
    """The host's side of one call's child. `_place`: the place in the input that the child reported last."""

    def __init__(
        self, server: Server, limits: Limits, function: Callable[..., Any], arguments: tuple[Any, ...] | bytes
    ) -> None:
        """Start to call a function. `arguments`: bytes are their JSON."""
        self._limits = limits
        self._is_code = server.is_code
        self._place: str | None = None
        self._is_abandoned = False
        asked, _ = types_of(function)
        opening = {
            "imports": [*server.modules, function.__module__],
            "module": function.__module__,
            "function": function.__qualname__,
            "limits": limits.numbers,
            "is_code": server.is_code,
            "reads": list(dict.fromkeys(shown for path in limits.reads for shown in _with_links(path.absolute()))),
            "writes": [str(path.absolute()) for path in limits.writes],
        }
        self._data, self._status = server.fork(opening)
        self._data.setblocking(False)  # a child need not read what it is sent
        self._is_open = True
        try:
            self.send(arguments if isinstance(arguments, bytes) else TypeAdapter(asked).dump_json(arguments))
        except BaseException:
            self.close()
            raise

    def abandon(self) -> None:
        """Make another thread's wait for the child end, with an error. It then closes the connection."""
        self._is_abandoned = True
        with suppress(OSError):  # it is closed
            self._data.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the server then ends the child."""
        if self._is_open:
            self._is_open = False
            self._data.close()
            os.close(self._status)

    def send(self, frame: bytes) -> None:
        with suppress(BrokenPipeError):  # `_ended` raises the reason
            write_frame(self._data.fileno(), frame, check=stop_if_cancelled)

    def results(self, answer: AnswerQuestion | None = None) -> Generator[bytearray, None, None]:
        """Yield the frames of results. `answer`: answers the child's questions; its errors are raised.

        Raises the child's error, or one that says how the child ended.
        """
        began, code, has_begun = time.monotonic() + _START_S, _CodeOfChild(self._limits), False
        try:
            while True:
                frame = self._receive(began)
                if not self._is_code or not has_begun:  # untrusted code cannot send something that lengthens its time
                    began, has_begun = time.monotonic(), True
                match chr(frame.pop(0)) if frame else "":
                    case "s":
                        self._place = _parsed(frame, self._place) or self._place
                    case "r":
                        yield frame
                        began = time.monotonic()
                    case "e":
                        return
                    case "q" if answer is not None:
                        self.send(answer(frame))
                    case "c" if not self._is_code:
                        self.send(code.answer(_parsed(frame, self._place), bytes(self._receive(began))))
                    case "x":
                        _raise(_parsed(frame, self._place), self._place, self._limits)
                    case _:
                        _refuse(self._place)
        finally:
            code.close()

    def _receive(self, began: float) -> bytearray:
        silence_s, most = self._limits.silence_s, self._limits.answer_bytes + 1
        try:
            return read_frame(self._data.fileno(), most, began + silence_s, stop_if_cancelled)
        except OverflowError as error:
            rule = f"its result is larger than the {self._limits.answer_bytes:,} bytes that it may have"
            raise InvalidInput(rule, self._place) from error
        except TimeoutError as error:
            raise InvalidInput(f"it takes longer than {silence_s:g} s and was stopped", self._place) from error
        except (EOFError, ConnectionResetError):
            self._ended()

    def _ended(self) -> NoReturn:
        """Raise the reason why the child ended without a result."""
        if self._is_abandoned:
            raise RuntimeError("nobody waits for this call any more")
        if not select.select([self._status], [], [], _GRACE_S)[0] or not (told := os.read(self._status, 4096)):
            raise RuntimeError("the sandbox ended, and the process of this call with it")
        code, out_of_memory, peak_bytes = json.loads(told)
        limits = self._limits
        if code < 0:
            number = -code
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
        if self._is_code:
            raise InvalidInput(f"it ended its process with status {code}", self._place)
        raise RuntimeError(f"the process of this call ended with status {code}")


def _parsed(frame: bytearray, place: str | None) -> Any:
    """Parse a frame's JSON. Raises InvalidInput: the child is not ours any more."""
    try:
        return json.loads(frame[:MESSAGE_BYTES])
    except (ValueError, RecursionError):
        _refuse(place)


def _refuse(place: str | None) -> NoReturn:
    raise InvalidInput("its process answers what ours do not", place)


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g} GiB"


def _raise(told: dict[str, Any], place: str | None, limits: Limits) -> NoReturn:
    """Raise the error that the function raised in the child."""
    match told:
        case {"error": "InvalidInput" | "CorruptArtifact" as name, "message": str(message), "place": where}:
            raise getattr(errors, name)(message, where)
        case {"error": str(name), "message": str(message)}:
            kind = getattr(errors, name, None)
            raise (kind if isinstance(kind, type) and issubclass(kind, LongshoreError) else LongshoreError)(message)
        case {"memory": _}:
            rule = f"reading it takes more memory than the {_in_words(limits.memory_bytes)} that it may"
            raise InvalidInput(rule, place)
        case {"panic": message}:
            raise InvalidInput(f"it cannot be read: {message}", place)
        case {"errno": int(number), "strerror": text, "filename": filename}:
            raise OSError(number, text, filename)
        case {"bug": str(text)}:
            raise RuntimeError(f"in a process of its own:\n{text}")
        case _:
            _refuse(place)


# --- Untrusted code: chat templates and graders ---

_CODE_FUNCTIONS = {
    "render": ("activities.tokenizing.chat_template", "render_asked"),
    "grade": ("activities.grading.run_grader", "run_grader"),
    "environment": ("activities.grading.run_grader", "run_environment"),
}
_ISOLATED = ("grade", "environment")  # only where the system allows namespaces
_MOST_CODE_PROCESSES = 16  # of one child
_numbers = count()


class CodeProcess:
    """A child for untrusted code, which answers one question after another. A child has its caller start it."""

    def __init__(self, function: str, arguments: bytes, limits: Limits) -> None:
        """
        Args:
            function: the name of one of `_CODE_FUNCTIONS`. It may be a generator that asks for questions (`ask`).
            arguments: the JSON of its arguments.

        Raises InvalidInput: the system refuses to isolate it.
        """
        self._child: Child | None = None
        self._question, self._number = b"", next(_numbers)
        if is_child():
            self._relayed({"function": function, "limits": limits.numbers}, arguments)
            return
        if function in _ISOLATED and (refusal := CODE.start()[1]):
            raise InvalidInput(
                f"this system refuses the isolation that python graders and environments need ({refusal})", "grader"
            )
        module, name = _CODE_FUNCTIONS[function]
        server = _PLAYING if function == "environment" else CODE
        self._child = Child(server, limits, getattr(importlib.import_module(module), name), arguments)
        self._answers = self._child.results(lambda _: self._question)

    def answer(self, question: bytes = b"") -> bytearray:
        """Return the JSON of its next answer, which may be anything. Raises as `call` does."""
        if self._child is None:
            return self._relayed({}, question)
        self._question = question
        for frame in self._answers:
            return frame
        _refuse(None)

    def kill(self) -> None:
        """End it now; a call in another thread raises. (In a child such a call ends by its limits.)"""
        if self._child is not None:
            self._child.abandon()

    def close(self) -> None:
        if self._child is None:
            self._relayed({"close": True})
        else:
            self._child.close()

    def _relayed(self, head: dict[str, Any], body: bytes = b"") -> bytearray:
        frame = ask_code(json.dumps(head | {"number": self._number}).encode(), body)
        if frame.pop(0) == ord("x"):
            _raise(json.loads(frame), None, Limits(0, 0, 0))
        return frame


class _CodeOfChild:
    """The code processes that a child has started. It is not trusted: it may ask anything."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._processes: dict[int, CodeProcess] = {}

    def answer(self, head: Any, body: bytes) -> bytes:
        """Do what the child asks for. Returns a frame: a result, or an error."""
        try:
            match head:
                case {"number": int(number), "function": str(function), "limits": dict(given)} if (
                    function in _CODE_FUNCTIONS and len(self._processes) < _MOST_CODE_PROCESSES
                ):
                    self._processes[number] = CodeProcess(function, body, Limits(**given).within(self._limits))
                    return b"r"
                case {"number": int(number), "close": True}:
                    if (process := self._processes.pop(number, None)) is not None:
                        process.close()
                    return b"r"
                case {"number": int(number)} if number in self._processes:
                    return b"r" + self._processes[number].answer(body)
            _refuse(None)
        except (LongshoreError, RuntimeError, OSError, ValueError, TypeError) as error:
            return b"x" + json.dumps(told(error)).encode()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


# --- Calls of hosts, and how many there may be at once ---

AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")

_GRADING = 4  # times as many places as for others: graders take little memory, and wait for slow judges

Kind = Literal["short", "dataset", "grading"]


def call(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], AnswerT],
    *arguments: *Arguments,
    kind: Kind = "short",
    answer: AnswerQuestion | None = None,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
) -> AnswerT:
    """Call a module-level function in a child process, as soon as a place is free, and return its result.

    Args:
        function: its parameters and its result are annotated with types that JSON can carry.
        kind: `dataset` calls read a whole dataset and always leave one place to other calls; `grading` calls mostly
            wait for judges and have separate places.
        answer: answers the function's questions (`ask` of child.py).
        reads, writes: the files and folders that the function sees beside Python's own.

    Raises:
        LongshoreError, OSError: what the function raised. InvalidInput also if the child broke a limit or crashed.
        RuntimeError: the child was killed from outside, or the function has a bug.
    """
    _, result_type = types_of(function)
    [frame] = _frames(Limits.of(settings, reads, writes), function, arguments, settings.at_once, kind, answer)
    result: AnswerT = TypeAdapter(result_type).validate_json(frame)
    return result


def stream(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], Iterator[AnswerT]],
    *arguments: *Arguments,
    kind: Kind = "short",
    answer: AnswerQuestion | None = None,
    reads: Sequence[Path] = (),
) -> Generator[AnswerT, None, None]:
    """Stream a generator function's items from a child. Raises as `call` does. Close it to end the child."""
    _, item = types_of(function)
    adapter: TypeAdapter[AnswerT] = TypeAdapter(item)
    for frame in _frames(Limits.of(settings, reads), function, arguments, settings.at_once, kind, answer):
        yield adapter.validate_json(frame)


def prepare() -> None:
    """Start this process's server, which the first call would else wait for."""
    threading.Thread(target=_server.start, daemon=True).start()


def _frames(
    limits: Limits,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    at_once: int | None,
    kind: Kind,
    answer: AnswerQuestion | None,
) -> Iterator[bytearray]:
    with _places.one(limits.memory_bytes, at_once, kind):
        child = Child(_server, limits, function, arguments)
        try:
            yield from child.results(answer)
        finally:
            child.close()


class _Places:
    """Bounds the number of this process's children, as they share the machine's memory. Further calls wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[object, Kind] = {}

    @contextmanager
    def one(self, memory_bytes: int, at_once: int | None, kind: Kind) -> Iterator[None]:
        mine = object()
        try:
            with self._changed:
                while not self._is_free(kind, at_once or _room(memory_bytes)):
                    stop_if_cancelled()
                    self._changed.wait(LOOK_EVERY_S)
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


_server = Server(("pydantic.type_adapter", "shared.settings", "numpy", "pyarrow.parquet", "tokenizers"))
CODE = Server((), "template", is_code=True)
_PLAYING = Server((), "template", is_code=True, niceness=10)
"""Servers of this process: for its own functions on untrusted data, for untrusted code, and for environments, which may
compute for long beside chats that wait for a template.
"""
_places = _Places()
for _each in (_server, CODE, _PLAYING):
    os.register_at_fork(after_in_child=_each.forget_parents)
os.register_at_fork(after_in_child=_places.__init__)  # type: ignore[misc]
