"""The server and the children of a sandbox: a process with our modules imported, which forks a child for each call.

    python -m activities.sandbox.child [bubblewrap | namespaces | programs]

The server has one thread, reads no untrusted data, and has no secrets. Its standard input is a socket of its host,
which sends for each call what is called and two descriptors: an end of the call's own socket, and a pipe on which the
server reports how the child ended. When the host closes that pipe, the child is killed; when it closes the socket, the
server and all children end. (The kernel's parent-death signal would not do: it comes when the thread that started a
process ends.) Standard library alone, as untrusted code runs in forks of it.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from activities.sandbox import kernel
from shared.programs import become

_CHANNEL = 3
"""The descriptor of a child's socket. Its frames begin with their kind (s: sign, q: question, c: a code process's,
r: result, e: end, x: exception)."""
MESSAGE_BYTES = 160 << 10


def types_of(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the types of a function's arguments, as a tuple type, and of its result or of the items that it yields."""
    hints = get_type_hints(function)
    answer = hints.pop("return")
    return types.GenericAlias(tuple, tuple(hints.values())), get_args(answer)[0] if get_origin(answer) in (
        Iterator,
        Generator,
    ) else answer


_sign: Callable[[str | None], None] | None = None


def sign(place: str | None = None) -> None:
    """Report progress of a call, which restarts its time limits. `place`: the current place in the input.

    Does nothing outside a child.
    """
    if _sign is not None:
        _sign(place)


_ask: Callable[..., bytearray] | None = None


def ask(question: bytes = b"") -> bytearray:
    """Return the caller's answer to a question (`answer` of calls.py). Only a child may ask."""
    assert _ask is not None, "nobody is there to answer"
    return _ask(b"q", question)


def ask_code(head: bytes, body: bytes) -> bytearray:
    """Have the caller ask a code process (`CodeProcess` of calls.py). Only a child may ask."""
    assert _ask is not None, "nobody is there to answer"
    return _ask(b"c", head, body)


def is_child() -> bool:
    """Return True in a child, which can start no further ones."""
    return _ask is not None


# --- The server ---


@dataclass(frozen=True)
class _Running:
    """A child that runs. `status`: the pipe on which its end is reported; the host closes it to end the child.

    `kills`: the count of `_oom_kills` when the child was started. `is_kept`: it is a keeper, which ends as its child.
    """

    status: int
    kills: int
    is_kept: bool


class _Server:
    def __init__(self, isolation: str) -> None:
        self._control = socket.socket(fileno=os.dup(0))
        kernel.program_folders()  # found once, for all children
        self._is_isolated = not (refusal := _refusal_of(isolation))
        self._control.send(json.dumps([isolation, refusal]).encode())
        self._wakes, wakened = os.pipe()
        for end in (self._wakes, wakened):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._running: dict[int, _Running] = {}
        self._watched = select.poll()
        for descriptor in (self._wakes, self._control.fileno()):
            self._watched.register(descriptor, select.POLLIN)

    def run(self) -> NoReturn:
        while True:
            for descriptor, _ in self._watched.poll():
                if descriptor == self._control.fileno():
                    self._receive()
                elif descriptor == self._wakes:
                    with suppress(BlockingIOError):
                        os.read(self._wakes, 4096)
                else:
                    self._watched.unregister(descriptor)
                    for pid, child in self._running.items():
                        if child.status == descriptor:
                            os.kill(pid, signal.SIGKILL)
            self._reap()

    def _receive(self) -> None:
        message, given, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        if not message:  # the host has gone
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        opening = json.loads(message)
        _import(opening["imports"])
        data, status, *output = given
        pid = kernel.fork_first() if self._is_isolated else os.fork()
        if not pid:
            if output:
                _program(data, output)
            _call(data, opening, self._is_isolated)
        self._running[pid] = _Running(status, _oom_kills(), is_kept=self._is_isolated)
        self._watched.register(status, 0)  # poll always reports errors: the host has closed its end
        for taken in (data, *output):
            os.close(taken)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:  # there is none
                return
            if not pid:
                return
            if (child := self._running.pop(pid, None)) is None:  # an orphan
                continue
            with suppress(KeyError):
                self._watched.unregister(child.status)
            code = os.waitstatus_to_exitcode(status)
            told = [
                128 - code if child.is_kept and code > 128 else code,
                _oom_kills() > child.kills,
                used.ru_maxrss << 10,
            ]
            with suppress(BrokenPipeError):
                os.write(child.status, json.dumps(told).encode())
            os.close(child.status)


def _refusal_of(isolation: str) -> str | None:
    """Try the isolation in a child, and return why the system refuses it."""
    if isolation == "programs":
        return "none is asked for"
    read_end, write_end = os.pipe()
    try:
        if not (pid := kernel.fork_first()):
            try:
                kernel.enter_root([], [], is_code=True)
                kernel.give_up_rights(1 << 40, 1 << 20, is_code=True, is_alone=True)
            except BaseException as error:
                os.write(write_end, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
    except kernel.IsolationRefused as refused:
        return str(refused)
    finally:
        os.close(write_end)
        reason = os.read(read_end, 4096).decode()
        os.close(read_end)
    return reason or None


def _import(names: list[str]) -> None:
    """Import modules for the children. If that fails, the call itself reports it."""
    if all(name in sys.modules for name in names):
        return
    gc.disable()  # collections would take a quarter of the time
    with suppress(Exception):
        for name in names:
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that collections in children copy no pages


def _oom_kills() -> int:
    """Count the processes that this machine's kernel has killed for lack of memory."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _begin(data: int, *output: int) -> None:
    """Have a child keep nothing of its server but its socket. Its standard streams are `output`, or go nowhere."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(data, _CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    for number, descriptor in enumerate((null, *output) if output else (null, null, null)):
        os.dup2(descriptor, number)
    os.closerange(_CHANNEL + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


# --- The child that becomes a program ---


def _program(data: int, output: list[int]) -> NoReturn:
    """Run one of our programs, and send the host its pid as soon as others can find the process."""

    def tell() -> None:
        with suppress(BrokenPipeError):
            kernel.write_frame(_CHANNEL, str(os.getpid()).encode())
        os.close(_CHANNEL)

    server = os.getppid()
    _begin(data, *output)
    kernel.die_with_parent(server)
    try:
        asked = json.loads(kernel.read_frame(_CHANNEL))
    except EOFError:  # the caller has gone
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kernel.begin_session()
    os.chdir(asked["cwd"])
    become(asked["command"], asked["environment"], tell)


# --- The child of a call ---


def _call(data: int, opening: dict[str, Any], is_isolated: bool) -> NoReturn:
    """Isolate this process, as pid 1 of its namespace if it has one, and do the call in a child of it."""
    status = 1
    try:
        server = os.getppid() if not is_isolated else None
        _begin(data)
        kernel.die_with_parent(server)
        with suppress(OSError):  # on systems without it
            Path("/proc/self/oom_score_adj").write_text("1000")
        limits, is_code = opening["limits"], opening["is_code"]
        with suppress(OSError):
            if is_code:  # besides what the server has
                limits["memory_bytes"] += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if is_isolated:
            kernel.enter_root(opening["reads"], opening["writes"], is_code)
            if child := os.fork():
                os.close(_CHANNEL)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os._exit(128 - code if code < 0 else code)
            kernel.die_with_parent(1)
        kernel.give_up_rights(limits["memory_bytes"], limits["file_bytes"], is_code, is_isolated)
        kernel.die_with_parent(1 if is_isolated else server)  # again, since changing the user resets it
        _work(opening, bytes(kernel.read_frame(_CHANNEL)))
        status = 0
    except EOFError:  # the caller has gone
        status = 0
    except BaseException as error:
        with suppress(OSError):
            kernel.write_frame(_CHANNEL, b"x", json.dumps(told(error)).encode())
    os._exit(status)


def _work(opening: dict[str, Any], question: bytes) -> None:
    global _sign, _ask
    limits = opening["limits"]
    reserve: list[bytes] = [bytes(1 << 20)]  # freed when memory has run out, so that the error can be reported
    turn, asking = threading.Lock(), threading.Lock()  # the called function may have several threads

    def tell(place: str | None) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        bound = int(used.ru_utime + used.ru_stime) + limits["step_cpu_s"] + 1
        resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
        with turn:
            kernel.write_frame(_CHANNEL, b"s", json.dumps(place).encode())

    def ask_caller(kind: bytes, *frames: bytes) -> bytearray:
        with asking:
            with turn:
                kernel.write_frame(_CHANNEL, kind, frames[0])
                for frame in frames[1:]:
                    kernel.write_frame(_CHANNEL, frame)
            return kernel.read_frame(_CHANNEL)

    tell(None)
    _sign, _ask = tell, ask_caller
    try:
        for frame in _results(opening, question):
            with turn:
                kernel.write_frame(_CHANNEL, b"r", frame)
        with turn:
            kernel.write_frame(_CHANNEL, b"e")
    except MemoryError:
        reserve.clear()
        turn.acquire()
        kernel.write_frame(_CHANNEL, b"x", json.dumps({"memory": True}).encode())
    except BaseException as error:
        turn.acquire()
        kernel.write_frame(_CHANNEL, b"x", json.dumps(told(error)).encode())


def _results(opening: dict[str, Any], question: bytes) -> Iterator[bytes]:
    function = getattr(importlib.import_module(opening["module"]), opening["function"])
    if opening["is_code"]:  # where pydantic is not imported: its values are JSON's
        for each in _items(function(*json.loads(question))):
            yield json.dumps(each).encode()
        return
    from pydantic import TypeAdapter

    asked, answer = types_of(function)
    adapter: TypeAdapter[Any] = TypeAdapter(answer)
    for each in _items(function(*TypeAdapter(asked).validate_json(question))):
        yield adapter.dump_json(each)


def _items(result: Any) -> Iterator[Any]:
    return result if isinstance(result, types.GeneratorType) else iter([result])


def told(error: BaseException) -> dict[str, Any]:
    """Describe an exception as JSON; `_raise` in calls.py restores it."""
    known = sys.modules.get("shared.errors")  # untrusted code has it not
    if known is not None and isinstance(error, known.LongshoreError):
        name, place = type(error).__name__, getattr(error, "place", None)
        return {"error": name, "message": getattr(error, "message", str(error)), "place": place}
    if isinstance(error, OSError) and error.errno is not None:
        return {"errno": error.errno, "strerror": error.strerror, "filename": str(error.filename or "")}
    if type(error).__name__ == "PanicException":  # a panic of a library in Rust, which is not an Exception
        return {"panic": str(error)}
    return {"bug": "".join(traceback.format_exception(error))[-8000:]}


def _serve(isolation: str) -> NoReturn:
    if isolation == "namespaces":
        with suppress(kernel.IsolationRefused):
            kernel.enter_namespaces()
    _Server(isolation).run()


if __name__ == "__main__":
    # Run from the imported module and not from `__main__`, so that `_sign` is set in the module that others import.
    from activities.sandbox import child

    child._serve(sys.argv[1])
