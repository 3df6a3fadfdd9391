"""A host's worker processes, and the pool that shares them among jobs."""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from activities.heartbeats import host_is_leaving
from activities.hosts.programs import SPIN_COUNT, RunningProgram, start
from activities.sandbox.calls import machine_bytes
from activities.telemetry import GPU_SECONDS
from longshore.training import MAX_WORLD_SIZE
from shared.child_environment import child_environment
from shared.errors import LeaseLost, LongshoreError
from shared.jobs.job import WORKER_ID_VARIABLE, LeaseMark, ProcessKey, SamplerKey, WorkerKey, WorkerRecord, check_ranks
from shared.programs import INTERFACE_VARIABLE, NODE_VARIABLE, RENDEZVOUS_VARIABLE
from shared.settings import Settings
from shared.storage.files import private_folder, write_atomically
from shared.storage.host_states import HostAddress
from shared.storage.paths import HostPaths, WorkerPaths

# --- One worker process group ---
# Start it, watch it, end it to the last process, and end what a killed host left behind.

_TERM_GRACE_S = 1.0
_VLLM_TERM_GRACE_S = 15.0  # killed, it leaves hundreds of megabytes in /dev/shm
_STOP_GRACE_S = 5.0
# A killed process can take long to end, or never end, if it is in a system call of a failed device.
_KILL_PATIENCE_S = 60.0
_TAIL_BYTES = 2000
_TAIL_LINES = 15
_NEW_S = 10.0
_POLL_S = 0.01
_log = logging.getLogger(__name__)


class Meeting(Protocol):
    """How a worker's ranks on this machine meet those of its other machines; service/host_http/gangs.py has the rest.

    `at`: the first host's address; the others connect to it. `broken`: why the other parts are lost, once they are.
    `leaves`: another part's host is about to leave. `is_leaving`: this host is. `has_met`: a rank of this machine has
    reached the others' store. `is_whole`: all hosts have connected.
    """

    at: HostAddress
    broken: str | None
    leaves: bool
    is_leaving: bool
    has_met: bool

    @property
    def is_whole(self) -> bool: ...


class WorkerCommand(Protocol):
    """The command line of a worker for a key, which finds its jobs below `folder`."""

    def __call__(self, folder: Path, key: ProcessKey) -> list[str]: ...


def ranks_command(folder: Path, key: ProcessKey) -> list[str]:
    """Return the command that starts one process for each rank of the layout; several are started by a launcher."""
    assert isinstance(key, WorkerKey)
    num = key.layout.ranks_per_node
    launcher = ["megatron_worker.process.launcher", str(num)] if key.layout.world_size > 1 else []
    # -P: a folder named `shared` in the host's working directory must not be imported instead of Longshore's.
    return [sys.executable, "-P", "-m", *launcher, "megatron_worker", "--root", str(folder)]


class WorkerProcess:
    """A worker that this host started. `leases`: those it serves now, by run id; none while it waits in the pool.

    `holds_device`: its last job left the weights on the device (`after: keep`), for the next job of the same lease.
    `offloaded_bytes`: the host memory that its engine holds, by its last report.
    `is_asleep`: a sampler was asked to sleep, and has not been woken since.
    `has_worked`: it has done a step or a session's command, or is a sampler that answers.
    `is_suspect`: a job failed on it before any of that, so that it serves no other run.
    `meeting`: of a worker whose ranks are on several machines.
    """

    def __init__(self, paths: WorkerPaths, key: ProcessKey, process: RunningProgram) -> None:
        self.worker_id = paths.root.name
        self.key = key
        self.paths = paths
        self.leases: dict[str, LeaseMark] = {}
        self.num_jobs: Counter[str] = Counter()
        self.holds_device = False
        self.offloaded_bytes = 0
        self.is_asleep = False
        self.has_worked = False
        self.is_suspect = False
        self.meeting: Meeting | None = None
        self._process = process
        self._lock = threading.Lock()
        self._turn_s, self._turn_until = 0.0, time.monotonic()  # seconds of a lease served since the worker's start
        self._turn_before: dict[str, float] = {}

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def loses_its_host(self) -> bool:
        """Return True while the current activity's host shuts down, or that of another of the worker's machines."""
        return host_is_leaving() or (self.meeting is not None and self.meeting.leaves)

    @property
    def exit_code(self) -> int | None:
        """The exit status; None while it lives; negative: the signal that ended it."""
        return self._process.poll()

    def is_stopped(self) -> bool:
        """True if one of its processes was stopped (SIGSTOP): it lives, and does nothing."""
        return any(_status(process) == psutil.STATUS_STOPPED for process in processes_of(self.worker_id))

    def is_ready(self) -> bool:
        return self.paths.ready.exists()

    def serve(self, lease: LeaseMark) -> None:
        """Serve one more lease. From now on, jobs of no lease or of older ones are refused."""
        write_atomically(self.paths.lease(lease.run_id), lease.model_dump_json().encode())
        self.count_time_of(lease)
        self.leases[lease.run_id] = lease

    def leave(self, lease: LeaseMark) -> None:
        """Serve a lease no longer."""
        self._turn()
        self.paths.offloaded.unlink(missing_ok=True)  # before the lease: the worker then rewrites it
        del self.leases[lease.run_id], self._turn_before[lease.run_id], self.num_jobs[lease.run_id]
        self.paths.lease(lease.run_id).unlink(missing_ok=True)

    def leaves_device(self, timeout_s: float) -> bool:
        """Wait until a worker that serves no lease any more has left its device. False: it did not, or it ended."""
        deadline = time.monotonic() + timeout_s
        while self.holds_device and self.is_alive() and time.monotonic() < deadline:
            if self.paths.offloaded.exists():
                self.holds_device, self.offloaded_bytes = False, int(self.paths.offloaded.read_bytes())
            else:
                time.sleep(_POLL_S)
        return not self.holds_device

    def host_bytes(self) -> int:
        """Return the memory that would be free if its processes ended.

        It is at least the engine's own report, because a driver's pinned pages may not count as the processes'.
        """
        return max(self.offloaded_bytes, sum(_own_bytes(process) for process in processes_of(self.worker_id)))

    def count_time_of(self, lease: LeaseMark) -> None:
        """Start to count a lease's share of the worker's time."""
        self._turn_before[lease.run_id] = self._turn()

    def held_s(self, lease: LeaseMark) -> float:
        """Return a lease's share of the worker's time, in seconds. Time with several leases is divided evenly."""
        return self._turn() - self._turn_before[lease.run_id]

    def _turn(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._turn_s += (now - self._turn_until) / max(1, len(self.leases))
            self._turn_until = now
            return self._turn_s

    def death_report(self) -> str:
        """Describe how the process ended, and the last line that it printed."""
        code = self.exit_code
        how = "is alive" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = last_words(log_tail(self.paths.output))
        return f"the worker process {how}" + (f"; it said last: {said}" if said else "")

    def end(self, polite: bool = False) -> None:
        """End every process of the group, and reap it. Safe to repeat.

        `polite`: ask with the `stop` file first, for a worker without a job in hand. A sampler is asked by SIGTERM.

        Raises OSError: some live on, killed or not.
        """
        if polite and isinstance(self.key, WorkerKey) and self.is_alive():
            with contextlib.suppress(OSError):  # no space for the file: then it is ended unasked
                write_atomically(self.paths.stop, b"")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_GRACE_S)
        end_processes(self.worker_id, self._process.pid if self.is_alive() else None, _grace_s(self.key))
        self._process.wait()

    def remove(self) -> None:
        """Delete its folder, after its end."""
        shutil.rmtree(self.paths.root, ignore_errors=True)


def room_for_ranks(limit: int) -> int:
    """Return the most ranks that this machine can run: one for each GPU if it has any, and at most `limit`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    else:
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return min(limit, gpus) if gpus else limit


def launch(
    paths: HostPaths,
    key: ProcessKey,
    command: WorkerCommand,
    environment: Mapping[str, str],
    max_ranks: int = MAX_WORLD_SIZE,
    node: int = 0,
) -> WorkerProcess:
    """Start a worker in a new folder, or this `node`'s part of a worker that has several machines.

    Its folder and record, still without a pid, are written before it is started. If this host is killed in between,
    the next host finds the process by the mark in its environment.

    Raises InvalidInput: the layout has more ranks a machine than `max_ranks`.
    """
    place: dict[str, str] = {}
    if isinstance(key, WorkerKey):
        check_ranks(key.layout, max_ranks)
    worker_id = uuid.uuid4().hex
    worker = paths.worker(worker_id)
    if isinstance(key, WorkerKey) and key.layout.nodes > 1:
        place = {NODE_VARIABLE: f"{node}/{key.layout.nodes}", RENDEZVOUS_VARIABLE: str(worker.meeting)}
    arguments = command(worker.root, key)
    private_folder(worker.root)
    host = psutil.Process()
    record = WorkerRecord(
        worker_id=worker_id, pid=0, started_at=0.0, host_pid=host.pid, host_started_at=host.create_time(), key=key
    )
    write_atomically(worker.record, record.model_dump_json().encode())
    temporary = worker.root / "tmp"  # deleted with the worker's folder
    temporary.mkdir()
    marks = {
        WORKER_ID_VARIABLE: worker_id,
        "OMP_NUM_THREADS": str(key.threads if isinstance(key, SamplerKey) else key.threads_per_rank),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
        **place,
    }
    # The caches of compiled kernels: outside the worker's TMPDIR and any home, so that the next worker can use them.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(paths.compiled), "TRITON_CACHE_DIR": str(paths.compiled / "triton")}
    with worker.output.open("wb") as output:
        variables = {**SPIN_COUNT, **kept, **child_environment("worker"), **environment, **marks}
        process = start(arguments, variables, output.fileno(), output.fileno())
    started = WorkerProcess(worker, key, process)
    record = record.model_copy(update={"pid": process.pid, "started_at": _start_time(process.pid)})
    try:
        write_atomically(worker.record, record.model_dump_json().encode())
    except OSError:  # the next host could not find it
        started.end()
        started.remove()
        raise
    return started


def end_leftover_workers(paths: HostPaths, kind: type[object] = object) -> list[ProcessKey]:
    """End the workers of hosts that are gone, and delete their folders. Workers of living hosts are left alone.

    `kind`: of their keys; those of another kind are left to the pool of that kind.

    Returns the keys of those that were serving a lease.
    """
    were: list[ProcessKey] = []
    for folder in sorted(paths.workers.glob("*")):
        record = _read_record(folder / "worker.json")
        if record is not None and _is_running(record.host_pid, record.host_started_at):
            continue
        if record is not None and not isinstance(record.key, kind):
            continue
        if record is None and _is_new(folder):  # another host of this root is just making it; it has no process yet
            continue
        if record is not None and any(WorkerPaths(folder).leases.glob("*.json")):
            were.append(record.key)
        known = record is not None and _is_running(record.pid, record.started_at)
        grace_s = _grace_s(record.key) if record is not None else _TERM_GRACE_S
        end_processes(folder.name, record.pid if record is not None and known else None, grace_s)
        shutil.rmtree(folder, ignore_errors=True)
        _log.warning("ended worker %s, left behind by a host that is gone", folder.name)
    return were


def processes_of(worker_id: str, pid: int | None = None) -> list[psutil.Process]:
    """Find all living processes of a worker: the tree below `pid`, and every process that carries the worker's mark."""
    found: dict[int, psutil.Process] = {}
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {p.pid: p for p in [root, *root.children(recursive=True)]}
    found |= {p.pid: p for p in psutil.process_iter() if _is_of(p, worker_id)}
    return [p for p in found.values() if p.pid != os.getpid() and _lives(p)]


def end_processes(worker_id: str, pid: int | None = None, grace_s: float = _TERM_GRACE_S) -> None:
    """SIGTERM, a grace, then SIGKILL until none is left: ranks have sessions of their own, and may start more.

    Raises OSError: some live on, killed or not.
    """
    asked = processes_of(worker_id, pid)
    for process in asked:
        _signal(process, kill=False)
    _wait_until_gone(asked, grace_s)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while left := [p for p in asked if _lives(p)] or processes_of(worker_id, pid):
        if time.monotonic() > deadline:
            told = ", ".join(f"{process.pid} ({_status(process)})" for process in left)
            raise OSError(f"processes of worker {worker_id} live on, though they were killed: {told}")
        for process in left:
            _signal(process, kill=True)
        _wait_until_gone(left, 0.2)
        asked = left


def _grace_s(key: ProcessKey) -> float:
    return _VLLM_TERM_GRACE_S if isinstance(key, SamplerKey) and key.sampler == "vllm" else _TERM_GRACE_S


def log_tail(path: Path) -> str:
    """The last lines of a text file, or nothing."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def last_words(output: str) -> str:
    """Return the last line of an output that is not part of a stack trace."""
    lines = (line.strip() for line in output.splitlines() if line[:1].strip() and not line.startswith("Traceback"))
    return next((line for line in reversed(list(lines)) if line), "")


def _signal(process: psutil.Process, kill: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill() if kill else process.terminate()


def _wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(_lives(p) for p in processes):
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    """Return True if the process exists and is not a zombie, which only its parent can remove."""
    return process.is_running() and _status(process) not in (None, psutil.STATUS_ZOMBIE)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def _is_of(process: psutil.Process, worker_id: str) -> bool:
    """Return True if a process carries a worker's mark, or, as a fork, names its folder in its title."""
    try:
        is_named = worker_id in re.split("[/ ]", " ".join(process.cmdline()))
        return is_named or process.environ().get(WORKER_ID_VARIABLE) == worker_id
    except (psutil.Error, OSError):
        return False


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _is_running(pid: int, started_at: float) -> bool:
    if pid == 0:
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_at) < 1.0 and _lives(process)
    except psutil.NoSuchProcess:
        return False


def _is_new(folder: Path) -> bool:
    try:
        return folder.stat().st_mtime > time.time() - _NEW_S
    except FileNotFoundError:
        return False


def _read_record(path: Path) -> WorkerRecord | None:
    try:
        return WorkerRecord.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


# --- The worker processes of one host ---
# Leases them to runs, keeps them warm after a lease, ends those idle too long.
#
# A worker that no run has holds nothing on the device, so those of several bases may stay beside the one in use, as
# long as a budget of host memory allows.

_OFFLOAD_PATIENCE_S = 60.0
_WARM_SHARE = 4  # of the machine's memory; the part that idle workers may hold unless another budget is given


@dataclass(frozen=True)
class Sharing:
    """How many runs may train on a worker at once, and for how many seconds after its lease began others may join it.

    After that time the worker becomes free when its runs have ended, so that runs that need another worker get a turn.
    """

    max_runs: int = 1
    window_s: float = 0.0


@dataclass(eq=False, repr=False)
class WorkerPool:
    """Starts a worker when a lease asks for one, adopts a warm one of an equal key, ends it after an idle time.

    While a worker is leased, idle ones of other keys stay if together they hold at most `warm_bytes` of host memory (a
    quarter of it if None): those that were leased least recently are ended first. A sampler keeps its weights on the
    device, so it is ended before another one starts.

    Safe to use from several threads. The constructor ends workers that a killed host left behind, and restarts one of
    them, which may fetch a model's files.
    """

    paths: HostPaths
    command: WorkerCommand
    environment: Mapping[str, str]
    idle_limit_s: float
    max_ranks: int = MAX_WORLD_SIZE
    sharing: Sharing = Sharing()
    warm_bytes: int | None = None
    kind: type[object] = object

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._leased: dict[str, WorkerProcess] = {}
        self._shared: dict[str, tuple[WorkerProcess, float]] = {}
        self._warm_bytes = machine_bytes() // _WARM_SHARE if self.warm_bytes is None else self.warm_bytes
        # With the bytes of host memory that each holds. The one that was leased last is last.
        self._idle: dict[str, tuple[WorkerProcess, int]] = {}
        self._released_at = self._counted_until = time.monotonic()
        for key in end_leftover_workers(self.paths, self.kind)[:1]:  # the device has room for one
            if not isinstance(key, WorkerKey) or key.layout.nodes == 1:
                self._start_again(key)

    def _start_again(self, key: ProcessKey) -> None:
        """Start a worker with the key of one that a killed host left: its run will soon lease one again."""
        if self.idle_limit_s <= 0:
            return
        try:
            worker = launch(self.paths, key, self.command, self.environment, self.max_ranks)
        except (OSError, LongshoreError) as error:  # the lease that asks for it will report the error
            _log.warning("a worker as the one left behind does not start: %s", error)
            return
        self._idle[worker.worker_id] = worker, 0

    def acquire(self, key: ProcessKey, lease: LeaseMark, node: int = 0) -> WorkerProcess:
        """Return a worker for a lease, or the part of it that is on a node. Idle ones are ended first, unless they are
        off the device and within the budget.

        Raises InvalidInput: the key has more ranks than this host takes.
        """
        with self._lock:
            fit = self._take_idle(key)
            for worker in self._take_beyond(self._warm_bytes):
                _dispose(worker)
            worker = fit or launch(self.paths, key, self.command, self.environment, self.max_ranks, node)
            try:
                worker.serve(lease)
            except OSError:
                _dispose(worker)
                raise
            self._leased[worker.worker_id] = worker
            return worker

    def _take_idle(self, key: ProcessKey) -> WorkerProcess | None:
        """Take an idle worker of a key out of the idle ones. One that is not well is ended."""
        for worker in [worker for worker, _ in self._idle.values() if worker.key == key]:
            del self._idle[worker.worker_id]
            if worker.is_alive() and not worker.is_stopped():
                return worker
            _dispose(worker)
        return None

    def _take_beyond(self, budget: int) -> list[WorkerProcess]:
        """Remove idle workers that exceed a memory budget, are dead, or are on the device.

        Once a worker does not fit, workers that were used before it do not fit either.
        """
        taken: list[WorkerProcess] = []
        for worker, num_bytes in reversed(list(self._idle.values())):
            budget -= num_bytes
            if budget <= 0 or not worker.is_alive() or isinstance(worker.key, SamplerKey):
                del self._idle[worker.worker_id]
                taken.append(worker)
        return taken

    def share(self, queue: str, worker: WorkerProcess) -> None:
        """Let leases of a queue join a worker, within the host's limits of time and number (`Sharing`)."""
        with self._lock:
            self._shared[queue] = worker, time.monotonic() + self.sharing.window_s

    def join(self, queue: str, lease: LeaseMark) -> WorkerProcess | None:
        """Add a lease to the worker that leases of this queue share. Waits until an older lease of the run has left it.

        Returns None if there is no such worker, it takes no more leases, or it serves this lease already.
        """
        while True:
            with self._lock:
                worker, until = self._shared.get(queue, (None, 0.0))
                if worker is None or not worker.is_alive() or time.monotonic() > until:
                    return None
                if (of_run := worker.leases.get(lease.run_id)) is None:
                    if len(worker.leases) >= self.sharing.max_runs:
                        return None
                    worker.serve(lease)
                    return worker
                if not of_run.fence.is_older_than(lease.fence):
                    return None
            time.sleep(0.02)

    def release(self, worker: WorkerProcess, lease: LeaseMark) -> None:
        """Take a lease off its worker, after its running jobs have ended. A worker without leases becomes idle.

        It first moves off the device. It is ended instead if it is dead, suspect or of several machines, cannot move
        off, or if the idle time is 0. Other idle workers are ended if there is no memory for both.
        """
        while worker.num_jobs[lease.run_id]:
            time.sleep(0.02)
        with self._lock:
            worker.leave(lease)
            if worker.leases:
                return
            self._shared = {queue: shared for queue, shared in self._shared.items() if shared[0] is not worker}
        is_wanted = self.idle_limit_s > 0 and not worker.is_suspect and worker.meeting is None
        stays = is_wanted and worker.leaves_device(_OFFLOAD_PATIENCE_S) and worker.is_alive()
        num_bytes = worker.host_bytes() if stays else 0
        with self._lock:
            del self._leased[worker.worker_id]
            self._released_at = time.monotonic()
            over = self._take_beyond(self._warm_bytes - num_bytes) if stays else [worker]
            if stays:
                self._idle[worker.worker_id] = worker, num_bytes
        for each in over:
            _dispose(each)

    @contextmanager
    def using(self, worker_id: str, lease: LeaseMark) -> Iterator[WorkerProcess]:
        """Yield the worker of a lease. `release` waits until the block ends.

        Raises LeaseLost: this host has no such worker any more, or it serves another lease.
        """
        with self._lock:
            worker = self._leased.get(worker_id)
            if worker is None or worker.leases.get(lease.run_id) != lease:
                raise LeaseLost(f"worker {worker_id} no longer serves this run's lease")
            worker.num_jobs[lease.run_id] += 1
        try:
            yield worker
        finally:
            with self._lock:
                worker.num_jobs[lease.run_id] -= 1

    def end_idle(self) -> None:
        """End the idle workers that have died, and all when none was leased for the idle time. Called again and again.

        Those that are leased are counted since the last call.
        """
        now = time.monotonic()
        with self._lock:
            keys = [worker.key for worker in self._leased.values()]
            num_ranks = sum(key.layout.ranks_per_node for key in keys if isinstance(key, WorkerKey))
            GPU_SECONDS.inc(num_ranks * (now - self._counted_until))
            self._counted_until = now
            is_over = not self._leased and now - self._released_at > self.idle_limit_s
            over = [worker for worker, _ in self._idle.values() if is_over or not worker.is_alive()]
            for worker in over:
                del self._idle[worker.worker_id]
        for worker in over:
            _dispose(worker)

    def close(self) -> None:
        """End all workers, idle or leased, as the host shuts down."""
        with self._lock:
            workers = [*self._leased.values(), *(worker for worker, _ in self._idle.values())]
            self._idle.clear()
        for worker in workers:
            _dispose(worker)


def worker_environment(settings: Settings) -> dict[str, str]:
    """Return the settings that worker processes get besides their environment."""
    address = str(settings.host_address)
    interfaces = [name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own)]
    environment = {
        "LONGSHORE_ROOT": str(settings.root_path),
        "LONGSHORE_KERNELS": settings.kernels,
        "LONGSHORE_SLOT_BYTES": str(settings.slot_bytes) if settings.slot_bytes else None,
        INTERFACE_VARIABLE: next(iter(interfaces), None),
    }
    return {name: value for name, value in environment.items() if value}


def _dispose(worker: WorkerProcess) -> None:
    worker.end(polite=worker.is_ready())  # one that is still starting does not read the `stop` file yet
    worker.remove()
    _log.info("worker %s has ended", worker.worker_id)
