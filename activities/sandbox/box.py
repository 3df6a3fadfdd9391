"""A box: programs that nobody trusts, with a root, a network and processes of their own. An agent runs in one.

    host ──a socket──► pid 1 of the box ──fork──► `sh -c COMMAND`, with processes and loopback sockets, without rights

Unlike a call (calls.py), a program may start others, and open sockets. It sees the system's programs and those of
`Shown`, all read-only, and keeps its files in memory until the box is closed. It reaches no network. What it finds on
its loopback is the host: pid 1 opens a listening socket there and gives it to the host, which answers its connections.
So whoever asks at that socket is this box. Standard library alone within the box.
"""

import base64
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from activities.sandbox import kernel

PORT = 8321
HOME = "/home/agent"
_UP_S = 60.0  # for a box's start, on a slow machine
_LOOK_EVERY_S = 0.5
_MAX_FRAME_BYTES = 64 << 20
_PRINTED_BYTES = 4096
_NICENESS = 10  # as of environments
_MOST_COMPUTING = 4  # tasks of a box at once, before they only get what no other process on the host wants
_OPEN_FILES = 4096
_SIOCSIFFLAGS, _UP = 0x8914, 1 | 64
_DEVICES = ("null", "zero", "full", "random", "urandom")
_OF_ETC = ("ssl", "ca-certificates", "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_APART = {"/logs/agent": "16m", "/logs/verifier": "16m", "/tests": "64m"}
"""Folders with room of their own, so that a program that fills the disk has no effect on the verifier after it."""
_FIRST_USER = 1 << 21  # each box has its user, as the kernel counts processes by user
_BEYOND = {
    *("socket", "socketpair", "clone", "fork", "vfork", "clone3", "execve", "execveat"),
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"),
}
_log = logging.getLogger(__name__)
_DENIED = {name: number for name, number in kernel.DENIED.items() if name not in _BEYOND}


# --- The host's end ---


@dataclass(frozen=True)
class BoxLimits:
    """What a box may take and see.

    Attributes:
        memory_bytes: of all its processes, beside its files.
        disk_bytes: of its files, which are in memory.
        processes: at once, threads included.
        shown: folders of the host that it sees, read-only. The `bin` of each is on its PATH.
    """

    memory_bytes: int
    disk_bytes: int
    processes: int
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, or that of a shell for a signal; and what ended it, if that was a limit."""

    code: int
    limit: Literal["time", "memory"] | None = None


class BoxLost(Exception):
    """The box, or the host's connection to it, was lost. Another box may be opened."""


class Box:
    """A box of the host's. Close it: all its processes end.

    Attributes:
        listening: the socket of the box's loopback, at port `PORT`. Closed with the box.
    """

    def __init__(self, limits: BoxLimits, check: Callable[[], None] = lambda: None) -> None:
        """Open a box.

        Args:
            check: is called while the box is waited for; an error of it ends the wait.

        Raises:
            IsolationRefused: this system refuses to isolate it. BoxLost: it does not start.
        """
        self._check = check
        opening = {**asdict(limits), "shown": _shown(limits.shown), "path": _path_of(limits.shown)}
        for launcher in [*kernel.launchers(), []]:
            self._start([*launcher, sys.executable, "-m", "activities.sandbox.box", "bwrap" if launcher else "own"])
            try:
                if (refusal := self._ask(opening)["refused"]) is None:
                    self.listening = self._sent_socket()
                    return
            except BoxLost as lost:
                refusal = self._end() or str(lost)
                if not launcher:
                    raise BoxLost(refusal) from lost
            except BaseException:
                self._end()
                raise
            self._end()
            if launcher:
                _tell_of_launcher(launcher[0], refusal)
        raise kernel.IsolationRefused(refusal)

    def put(self, path: str, content: bytes, *, is_program: bool = False) -> None:
        """Write a file, and the folders that it is in. Raises OSError: it cannot be written there; BoxLost."""
        text = base64.b64encode(content).decode()
        told = self._ask({"put": path, "content": text, "mode": 0o755 if is_program else 0o644})
        if told["refused"]:
            raise OSError(f"{path}: {told['refused']}")

    def get(self, path: str, most_bytes: int, *, from_end: bool = False) -> bytes | None:
        """Return the first bytes of a file, or its last ones; None if there is no such file. Raises BoxLost."""
        content = self._ask({"get": path, "most": most_bytes, "from_end": from_end})["content"]
        return None if content is None else base64.b64decode(content)

    def run(self, command: str, variables: Mapping[str, str], folder: str, output: str, time_s: float) -> Ran:
        """Run a shell's command in a folder until it ends, and then end all processes of the box.

        Args:
            variables: of its environment, beside PATH, HOME, LANG and TMPDIR.
            output: the file that its output and errors go to.

        Raises BoxLost, and the errors of `check`.
        """
        asked = {"run": command, "variables": dict(variables), "folder": folder, "output": output, "time_s": time_s}
        return Ran(**self._ask(asked, time_s + _UP_S))

    def close(self) -> None:
        self.listening.close()
        self._end()

    def _end(self) -> str:
        """End its processes. Returns what the first one, or its launcher, has printed: why it does not start."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        if (printed := self._process.stderr) is None or printed.closed:
            return ""
        with printed:
            os.set_blocking(printed.fileno(), False)  # others may still have it open
            return (printed.read(_PRINTED_BYTES) or b"").decode(errors="replace").strip()

    def _start(self, command: list[str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=Path(__file__).parents[2],
                start_new_session=True,  # a terminal's Ctrl-C is for the host
                env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            )

    def _sent_socket(self) -> socket.socket:
        given: list[int] = []
        if select.select([self._control], [], [], _UP_S)[0]:
            _, given, _, _ = socket.recv_fds(self._control, 1, 1)
        if not given:
            raise BoxLost("it sends no socket")
        return socket.socket(fileno=given[0])

    def _ask(self, question: dict[str, Any], time_s: float = _UP_S) -> dict[str, Any]:
        self._send(question)
        return self._told(time_s)

    def _send(self, question: dict[str, Any]) -> None:
        try:
            kernel.write_frame(self._control.fileno(), json.dumps(question).encode(), check=self._check)
        except OSError as error:
            raise BoxLost(f"its first process is gone: {error}") from error

    def _told(self, time_s: float) -> dict[str, Any]:
        try:
            frame = kernel.read_frame(
                self._control.fileno(), _MAX_FRAME_BYTES, time.monotonic() + time_s, check=self._check
            )
        except (EOFError, OSError, OverflowError) as error:
            raise BoxLost(f"its first process does not answer: {error!r}") from error
        told: dict[str, Any] = json.loads(frame)
        return told


@cache
def _tell_of_launcher(launcher: str, refusal: str) -> None:
    """Tell the operator, once for each reason."""
    _log.warning("%s opens no boxes here, so Longshore's own launcher does: %s", launcher, refusal)


def _shown(folders: tuple[str, ...]) -> list[str]:
    """Return the folders that a box shows: the system's programs, the host's Python, and those that are named."""
    return sorted({"/usr", os.path.realpath(sys.base_prefix), *map(os.path.realpath, folders)})


def _path_of(folders: tuple[str, ...]) -> str:
    bins = [f"{folder}/bin" for folder in (*map(os.path.realpath, folders), os.path.realpath(sys.base_prefix))]
    return ":".join(dict.fromkeys([*bins, "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]))


# --- The box's end: its pid 1 ---


class _Box:
    """Does what the host asks, each thing in a child that has no rights."""

    def __init__(self, control: socket.socket, opening: dict[str, Any], user: int, group: int | None) -> None:
        self._control, self._opening, self._user, self._group = control, opening, user, group
        self._wakes, wakened = os.pipe()
        for end in (self._wakes, wakened):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        with suppress(EOFError, OSError):
            while True:
                asked = json.loads(kernel.read_frame(self._control.fileno()))
                if "run" in asked:
                    told: dict[str, Any] = self._run(asked)
                    self._end_all()
                else:
                    told = json.loads(self._in_child(asked) or '{"refused": "it has no room", "content": null}')
                kernel.write_frame(self._control.fileno(), json.dumps(told).encode())
        os._exit(0)  # the host has closed the box; the kernel ends all its processes

    def _in_child(self, asked: dict[str, Any]) -> bytes:
        """Put or get a file as the box's user, since a path may be a link that a program has made."""
        read_end, write_end = os.pipe()
        if not os.fork():
            with suppress(BaseException):
                os.close(read_end)
                self._give_up_rights()
                told = _put(asked) if "put" in asked else _get(asked)
                with os.fdopen(write_end, "wb") as file:
                    file.write(json.dumps(told).encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            told_bytes = file.read()
        self._end_all()
        return told_bytes

    def _run(self, asked: dict[str, Any]) -> dict[str, Any]:
        if not (pid := os.fork()):
            with suppress(BaseException):
                self._become(asked)
            os._exit(127)
        until = time.monotonic() + asked["time_s"]
        while True:
            for ended, status in _ended():
                if ended == pid:
                    code = os.waitstatus_to_exitcode(status)
                    return {"code": 128 - code if code < 0 else code}
            if time.monotonic() > until:
                return {"code": 137, "limit": "time"}
            if _is_over(self._opening["memory_bytes"]):
                return {"code": 137, "limit": "memory"}
            _put_crowds_last()
            ready, _, _ = select.select([self._control.fileno(), self._wakes], [], [], _LOOK_EVERY_S)
            if self._wakes in ready:
                with suppress(BlockingIOError):
                    os.read(self._wakes, 4096)
            if self._control.fileno() in ready:  # the host says nothing while a command runs: it has closed the box
                os._exit(0)

    def _end_all(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _become(self, asked: dict[str, Any]) -> NoReturn:
        """Become a shell's command."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        kernel.lower_priority(0, _NICENESS)
        if self._group is not None:
            with suppress(OSError):
                os.write(self._group, b"0")
        self._give_up_rights()
        for folder in (Path(asked["folder"]), Path(asked["output"]).parent):
            folder.mkdir(parents=True, exist_ok=True)
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open("/dev/null", os.O_RDONLY)
        for stream, descriptor in enumerate((null, output, output)):
            os.dup2(descriptor, stream)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.chdir(asked["folder"])
        own = {"PATH": self._opening["path"], "HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        os.execve("/bin/sh", ["sh", "-c", asked["run"]], own | asked["variables"])

    def _give_up_rights(self) -> None:
        bounds = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_NPROC: self._opening["processes"],
        }
        for kind, bound in bounds.items():
            hard = resource.getrlimit(kind)[1]
            bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (bound, bound))
        with suppress(PermissionError):  # in a user namespace there is one user alone
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        kernel.drop_capabilities()
        kernel.filter_calls(_DENIED, threads=True, programs=True)


def _put(asked: dict[str, Any]) -> dict[str, Any]:
    path = Path(asked["put"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, asked["mode"]), "wb") as file:
            file.write(base64.b64decode(asked["content"]))
    except OSError as error:
        return {"refused": error.strerror}
    return {"refused": None}


def _get(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        # A pipe would be waited for.
        with os.fdopen(os.open(asked["get"], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if asked["from_end"] and (size := os.fstat(file.fileno()).st_size) > asked["most"]:
                file.seek(size - asked["most"])
            return {"content": base64.b64encode(file.read(asked["most"]) or b"").decode()}
    except OSError:
        return {"content": None}


def _ended() -> list[tuple[int, int]]:
    """Return the children that have ended, orphans too, and their statuses."""
    found = []
    with suppress(ChildProcessError):
        while (each := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(each)
    return found


def _is_over(memory_bytes: int) -> bool:
    """Return True if all processes but this one have more memory of their own."""
    others = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit() and folder.name != "1"]
    if sum(map(_resident_bytes, others)) <= memory_bytes:
        return False
    return sum(map(_own_bytes, others)) > memory_bytes  # takes longer, and counts what forks share once


def _put_crowds_last() -> None:
    """If many tasks compute, let them only have what no other process wants: a share would be for each of them."""
    tasks = [task for task in Path("/proc").glob("[0-9]*/task/*") if task.parts[2] != "1"]
    computing = [task for task in tasks if len(tasks) > _MOST_COMPUTING and _is_computing(task)]
    for task in computing if len(computing) > _MOST_COMPUTING else ():
        with suppress(OSError):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def _is_computing(task: Path) -> bool:
    with suppress(OSError):
        return (task / "stat").read_text().rpartition(") ")[2].startswith("R")
    return False


def _resident_bytes(process: Path) -> int:
    with suppress(OSError):
        _, resident, shared, *_ = (process / "statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0


def _own_bytes(process: Path) -> int:
    with suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0


def _enter_root(opening: dict[str, Any], user: int) -> None:
    """Replace this process's root by one in memory, which belongs to the box's user. Raises IsolationRefused."""
    os.umask(0o022)
    root = kernel.empty_root("box", f"size={opening['disk_bytes']},nr_inodes=256k,mode=755")
    for path in opening["shown"]:
        if Path(path).is_dir():
            kernel.bind(path, root + path, writable=False)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):  # most are links into /usr, which an agent could replace
        if Path("/", name).is_dir():
            kernel.bind(os.path.realpath(f"/{name}"), f"{root}/{name}", writable=False)
    for name in _OF_ETC:
        if Path("/etc", name).exists():
            kernel.bind(os.path.realpath(f"/etc/{name}"), f"{root}/etc/{name}", writable=False)
    Path(root, "etc").mkdir(exist_ok=True)
    Path(root, "etc", "passwd").write_text(f"agent:x:{user}:{user}::{HOME}:/bin/sh\n")
    Path(root, "etc", "group").write_text(f"agent:x:{user}:\n")
    Path(root, "etc", "hosts").write_text("127.0.0.1 localhost\n")
    for name in _DEVICES:
        kernel.bind(f"/dev/{name}", f"{root}/dev/{name}", writable=True, is_device=True)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        Path(root, "dev", name).symlink_to(target)
    for name, mode in (("tmp", 0o1777), ("dev/shm", 0o1777), ("home/agent", 0o755), ("proc", 0o555)):
        Path(root, name).mkdir(parents=True, exist_ok=True)
        Path(root, name).chmod(mode)
    for name, size in _APART.items():
        Path(root + name).mkdir(parents=True)
        kernel.mount("box", root + name, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size},mode=755")
    around = {parent for path in opening["shown"] for parent in map(str, Path(path).parents)}
    for folder in {"/", "/home", HOME, "/logs", *_APART, *around}:
        with suppress(OSError):  # in a user namespace there is one user alone; or it is shown, and not ours
            os.chown(root + folder, user, user)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{root}/proc", "proc", flags)
    kernel.pivot_to(root)
    os.chdir("/")
    kernel.libc.sethostname(b"box", 3)


def _listening() -> socket.socket:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _UP))
    return socket.create_server(("127.0.0.1", PORT), backlog=256)


def _serve(isolation: str) -> NoReturn:
    control = socket.socket(fileno=os.dup(0))
    opening = json.loads(kernel.read_frame(control.fileno()))
    user, group = _FIRST_USER + os.getpid(), kernel.box_group()
    with suppress(OSError):  # on systems without it
        Path("/proc/self/oom_score_adj").write_text("1000")  # ends before what is the host's, if memory runs out
    try:
        if isolation == "own":
            kernel.enter_namespaces()
        listening = _listening()
        _enter_root(opening, user)
        kernel.filter_program(_DENIED, threads=True, programs=True)
    except (kernel.IsolationRefused, OSError) as error:
        kernel.write_frame(control.fileno(), json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    kernel.write_frame(control.fileno(), json.dumps({"refused": None}).encode())
    socket.send_fds(control, [b"s"], [listening.fileno()])
    listening.close()
    _Box(control, opening, user, group).serve()


if __name__ == "__main__":
    _serve(sys.argv[1])
