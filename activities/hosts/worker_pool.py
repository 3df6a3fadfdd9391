"""The worker processes of one host: leases them to runs, keeps them warm after a lease, ends those idle too long.

A worker that no run has holds nothing on the device, so those of several bases may stay beside the one in use, as long
as a budget of host memory allows.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from activities.confined.calls import machine_bytes
from activities.hosts.worker_process import WorkerCommand, WorkerProcess, end_leftover_workers, launch
from activities.telemetry import GPU_SECONDS
from longshore.layout import MAX_WORLD_SIZE
from shared.errors import LeaseLost, LongshoreError
from shared.jobs.leases import LeaseMark, ProcessKey, SamplerKey, WorkerKey
from shared.programs import INTERFACE_VARIABLE
from shared.settings import Settings
from shared.storage.paths import HostPaths

_OFFLOAD_PATIENCE_S = 60.0
_WARM_SHARE = 4  # of the machine's memory; the part that idle workers may hold unless another budget is given
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharing:
    """How many runs may train on a worker at once, and for how many seconds after its lease began others may join it.

    After that time the worker becomes free when its runs have ended, so that runs that need another worker get a turn.
    """

    max_runs: int = 1
    window_s: float = 0.0


class WorkerPool:
    """Starts a worker when a lease asks for one, adopts a warm one of an equal key, ends it after an idle time.

    While a worker is leased, idle ones of other keys stay if together they hold at most `warm_bytes` of host memory (a
    quarter of it if None): those that were leased least recently are ended first. A sampler keeps its weights on the
    device, so it is ended before another one starts.

    Safe to use from several threads. The constructor ends workers that a killed host left behind, and restarts one of
    them, which may fetch a model's files.
    """

    def __init__(
        self,
        paths: HostPaths,
        command: WorkerCommand,
        environment: Mapping[str, str],
        idle_limit_s: float,
        max_ranks: int = MAX_WORLD_SIZE,
        sharing: "Sharing | None" = None,
        warm_bytes: int | None = None,
    ) -> None:
        self._paths = paths
        self._command = command
        self._environment = dict(environment)
        self._idle_limit_s = idle_limit_s
        self._max_ranks = max_ranks
        self._sharing = sharing or Sharing()
        self._lock = threading.Lock()
        self._leased: dict[str, WorkerProcess] = {}
        self._shared: dict[str, tuple[WorkerProcess, float]] = {}
        self._warm_bytes = machine_bytes() // _WARM_SHARE if warm_bytes is None else warm_bytes
        # With the bytes of host memory that each holds. The one that was leased last is last.
        self._idle: dict[str, tuple[WorkerProcess, int]] = {}
        self._released_at = self._counted_until = time.monotonic()
        for key in end_leftover_workers(paths)[:1]:  # the device has room for one
            if not isinstance(key, WorkerKey) or key.layout.nodes == 1:
                self._start_again(key)

    def _start_again(self, key: ProcessKey) -> None:
        """Start a worker with the key of one that a killed host left: its run will soon lease one again."""
        if self._idle_limit_s <= 0:
            return
        try:
            worker = launch(self._paths, key, self._command, self._environment, self._max_ranks)
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
            worker = fit or launch(self._paths, key, self._command, self._environment, self._max_ranks, node)
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
            self._shared[queue] = worker, time.monotonic() + self._sharing.window_s

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
                    if len(worker.leases) >= self._sharing.max_runs:
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
        is_wanted = self._idle_limit_s > 0 and not worker.is_suspect and worker.meeting is None
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
            is_over = not self._leased and now - self._released_at > self._idle_limit_s
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
    environment = {
        "LONGSHORE_ROOT": str(settings.root_path),
        "LONGSHORE_KERNELS": settings.kernels,
        "LONGSHORE_SLOT_BYTES": str(settings.slot_bytes) if settings.slot_bytes else None,
        INTERFACE_VARIABLE: _interface(str(settings.host_address)),
    }
    return {name: value for name, value in environment.items() if value}


def _interface(address: str) -> str | None:
    """Return the name of this machine's network interface that has an address."""
    has = psutil.net_if_addrs().items()
    return next((name for name, addresses in has if any(each.address == address for each in addresses)), None)


def _dispose(worker: WorkerProcess) -> None:
    worker.end(polite=worker.is_ready())  # one that is still starting does not read the `stop` file yet
    worker.remove()
    _log.info("worker %s has ended", worker.worker_id)
