"""The fork server of calls.py and programs.py: a process with everything imported, which forks a child for each call.

It has one thread, reads no untrusted data, and gets no secrets: each program's own process reads its environment.
Its standard input is a socket of its host, which sends two descriptors a call: an end of the call's own socket, and a
pipe on which the server reports how the child ended. For a program, two more are its output and its errors. When that
socket closes, the host has gone, and the server and its children end. (The kernel's parent-death signal would not do:
it comes when the thread that started the process ends.)

A stack's service and hosts also use the stack's server: each has a socket to it, and asks it for servers of kinds that
have no secrets. It forks these servers from itself. Callers that ask for the same kind share one server. They end with
the stack's server.
"""

import fcntl
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from activities.isolation import die_with_parent, read_frame, write_frame
from shared.programs import ROOM_OF_COMMAND, become, show
from shared.settings import ConfinedSettings

_CHANNEL = 3
"""The descriptor of a child's socket. Its frames begin with their kind (s: sign, q: question, r: result, e: end, x:
exception)."""
_KEPT = _CHANNEL + 1
LENDER = "LONGSHORE_LENDER"
"""In a process that may ask the stack's fork server for servers: the descriptor of its socket to it."""


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
    """Report progress of a confined call, which restarts its time limits. `place`: the current place in the input.

    Does nothing outside a child of the fork server.
    """
    if _sign is not None:
        _sign(place)


_ask: Callable[[bytes], bytearray] | None = None


def ask(question: bytes) -> bytearray:
    """Return the caller's answer to a question (`answer` of calls.py). Only a child may ask."""
    assert _ask is not None, "nobody is there to answer"
    return _ask(question)


# The server.


@dataclass(frozen=True)
class _Running:
    """A child that runs. `status`: the pipe on which its end is reported; the host closes it to end the child.

    `kills`: the count of `_oom_kills` when the child was started.
    """

    status: int
    kills: int


class _Server:
    """A server at work.

    Args:
        control: the socket whose closing ends it.
        clients: further ones that ask it. Whoever closes theirs has its children ended by their pipes.
    """

    def __init__(self, control: socket.socket, *clients: socket.socket) -> None:
        self._control = control
        self._wakes, wakened = os.pipe()
        for end in (self._wakes, wakened):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._clients: dict[int, socket.socket] = {}
        self._running: dict[int, _Running] = {}
        self._lent: dict[bytes, socket.socket] = {}
        self._watched = select.poll()
        self._watched.register(self._wakes, select.POLLIN)
        for client in (control, *clients):
            self._listen(client)

    def _listen(self, client: socket.socket) -> None:
        self._clients[client.fileno()] = client
        self._watched.register(client, select.POLLIN)

    def run(self) -> NoReturn:
        while True:
            for descriptor, _ in self._watched.poll():
                if descriptor in self._clients:
                    self._receive(self._clients[descriptor])
                elif descriptor == self._wakes:
                    with suppress(BlockingIOError):
                        os.read(self._wakes, 4096)
                else:
                    self._watched.unregister(descriptor)
                    for pid, child in self._running.items():
                        if child.status == descriptor:
                            os.kill(pid, signal.SIGKILL)
            _reap(self._running, self._watched)

    def _receive(self, client: socket.socket) -> None:
        kind, given, _, _ = socket.recv_fds(client, 1, 4)
        match kind, given:
            case b"f", [data, status, *output]:
                pid = self._fork_program(data, *output) if output else _fork(data)
                self._running[pid] = _Running(status, _oom_kills())
                self._watched.register(status, 0)  # poll always reports errors: the host has closed its end
                given.remove(status)
            case b"s", [data, asking]:
                self._lend_server(data, asking)
            case b"c", [asking]:
                self._listen(socket.socket(fileno=os.dup(asking)))
            case _:
                self._close(client)
        for taken in given:
            os.close(taken)

    def _close(self, client: socket.socket) -> None:
        """A client has gone; with its host a server ends."""
        if client is self._control:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        self._watched.unregister(client)
        self._clients.pop(client.fileno()).close()

    def _fork_program(self, data: int, *output: int) -> int:
        asked = json.loads(read_frame(data))
        _import(asked["imports"])
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            _program(data, output, [theirs.fileno()] if asked["borrows"] else [])
        theirs.close()
        if asked["borrows"]:
            self._listen(ours)
        else:
            ours.close()
        return pid

    def _lend_server(self, data: int, asking: int) -> None:
        """Hand a client to the server with the modules that it asks for; fork one if there is none."""
        wanted = bytes(read_frame(data))
        if wanted in self._lent:
            with suppress(BrokenPipeError, ConnectionResetError):  # it was killed
                socket.send_fds(self._lent[wanted], [b"c"], [asking])
                return
        self._lent[wanted], theirs = socket.socketpair()
        with theirs:
            if not os.fork():
                _lent_server(json.loads(wanted), theirs.fileno(), asking)


def _serve() -> None:
    for name in sys.argv[1:]:
        if name != ROOM_OF_COMMAND:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in children copy no pages
    _Server(socket.socket(fileno=os.dup(0))).run()


def _lent_server(asked: dict[str, Any], *sockets: int) -> NoReturn:
    """Serve in a fork of the stack's server, shown as if it had been started by itself."""
    try:
        _begin(sockets[0], 2, 2, kept=sockets[1:])
        os.nice(asked["niceness"])
        show(asked["command"], asked["environment"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        _import(asked["imports"])
        _Server(socket.socket(fileno=_CHANNEL), socket.socket(fileno=_KEPT)).run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _fork(data: int) -> int:
    pid = os.fork()
    if not pid:
        _child(data)
    return pid


def _import(names: list[str]) -> None:
    """Import a program's modules. If that fails, the program itself reports it."""
    gc.disable()  # collections would take a quarter of the time
    with suppress(Exception):
        for name in names:
            importlib.import_module(name)
    gc.enable()
    gc.freeze()


def _reap(running: dict[int, _Running], watched: select.poll) -> None:
    while True:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:  # there is none
            return
        if not pid:
            return
        if (child := running.pop(pid, None)) is None:  # a server
            continue
        with suppress(KeyError):
            watched.unregister(child.status)
        told = json.dumps([status, _oom_kills() > child.kills, used.ru_maxrss << 10])
        with suppress(BrokenPipeError):
            os.write(child.status, told.encode())
        os.close(child.status)


def _oom_kills() -> int:
    """Count the processes that this machine's kernel has killed for lack of memory."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _begin(data: int, *output: int, kept: Sequence[int] = ()) -> None:
    """Have a child keep nothing of its server but its socket, and `kept` from _KEPT on. Its standard streams are
    `output`, or go nowhere.
    """
    server = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(data, _CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    for number, descriptor in enumerate((null, *output) if output else (null, null)):
        os.dup2(descriptor, number)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in kept]
    for number, descriptor in enumerate(aside, start=_KEPT):
        os.dup2(descriptor, number)
    os.closerange(_KEPT + len(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    die_with_parent(server)


def _program(data: int, output: tuple[int, ...], lent: Sequence[int]) -> NoReturn:
    """Run one of our programs, and send the host its pid as soon as others can find the process."""

    def tell() -> None:
        with suppress(BrokenPipeError):
            write_frame(_CHANNEL, str(os.getpid()).encode())
        os.close(_CHANNEL)

    _begin(data, *output, kept=lent)
    try:
        asked = json.loads(read_frame(_CHANNEL))
    except EOFError:  # the caller has gone
        os._exit(0)
    if lent:
        asked["environment"][LENDER] = str(_KEPT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.chdir(asked["cwd"])
    become(asked["command"], asked["environment"], tell)


# The child. It runs our own code, on data that may be anything.


def _child(data: int) -> NoReturn:
    status = 1
    try:
        _begin(data)
        opening = json.loads(read_frame(_CHANNEL))
        limits = ConfinedSettings.model_validate(opening["limits"])
        _limit(limits)
        _work(opening["module"], opening["function"], bytes(read_frame(_CHANNEL)), limits)
        status = 0
    except EOFError:  # the caller has gone
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _limit(limits: ConfinedSettings) -> None:
    bounds = {
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))
    with suppress(OSError):  # on systems without it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _work(module: str, name: str, question: bytes, limits: ConfinedSettings) -> None:
    global _sign, _ask
    reserve: list[bytes] = [bytes(1 << 20)]  # freed when memory has run out, so that the error can be reported
    turn = threading.Lock()  # the called function may call `sign` from several threads

    def tell(place: str | None) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        bound = int(used.ru_utime + used.ru_stime) + limits.step_cpu_s + 1
        resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
        with turn:
            write_frame(_CHANNEL, b"s", json.dumps(place).encode())

    def ask_caller(question: bytes) -> bytearray:
        with turn:
            write_frame(_CHANNEL, b"q", question)
            return read_frame(_CHANNEL)

    tell(None)
    _sign, _ask = tell, ask_caller
    try:
        for frame in _results(module, name, question):
            with turn:
                write_frame(_CHANNEL, b"r", frame)
        with turn:
            write_frame(_CHANNEL, b"e")
    except MemoryError:
        reserve.clear()
        turn.acquire()
        write_frame(_CHANNEL, b"x", json.dumps({"memory": limits.memory_bytes}).encode())
    except BaseException as error:
        turn.acquire()
        write_frame(_CHANNEL, b"x", json.dumps(_told(error)).encode())


def _results(module: str, name: str, question: bytes) -> Iterator[bytes]:
    from pydantic import TypeAdapter

    function = getattr(importlib.import_module(module), name)
    asked, answer = types_of(function)
    adapter: TypeAdapter[Any] = TypeAdapter(answer)
    result = function(*TypeAdapter(asked).validate_json(question))
    if not isinstance(result, types.GeneratorType):
        result = [result]
    for each in result:
        yield adapter.dump_json(each)


def _told(error: BaseException) -> dict[str, Any]:
    """Describe an exception as JSON; `_raise` in calls.py restores it."""
    from shared.errors import InvalidInput, LongshoreError

    match error:
        case InvalidInput():
            return {"error": type(error).__name__, "message": error.message, "place": error.place}
        case LongshoreError():
            return {"error": type(error).__name__, "message": str(error)}
        case OSError(errno=int(number)):
            return {"errno": number, "strerror": error.strerror, "filename": str(error.filename or "")}
    if type(error).__name__ == "PanicException":  # a panic of a library in Rust, which is not an Exception
        return {"panic": str(error)}
    return {"bug": "".join(traceback.format_exception(error))[-8000:]}


if __name__ == "__main__":
    # Run from the imported module and not from `__main__`, so that `_sign` is set in the module that others import.
    from activities.confined import fork_server

    fork_server._serve()
