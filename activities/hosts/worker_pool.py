"""The worker processes of one host: leases them to runs, keeps them warm after a lease, ends those idle too long."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from activities.hosts.worker_process import WorkerCommand, WorkerProcess, end_leftovers, launch
from shared.errors import LeaseLost, LongshoreError
from shared.jobs.layout import MAX_WORLD_SIZE
from shared.jobs.leases import LeaseMark, ProcessKey
from shared.storage.paths import HostPaths

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

    Safe to use from several threads. The constructor ends workers that a killed host left behind, and starts one of
    them anew, which may fetch a model's files.
    """

    def __init__(
        self,
        paths: HostPaths,
        command: WorkerCommand,
        environment: Mapping[str, str],
        idle_limit_s: float,
        max_ranks: int = MAX_WORLD_SIZE,
        sharing: "Sharing | None" = None,
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
        self._idle: dict[str, tuple[WorkerProcess, float]] = {}
        for key in end_leftovers(paths)[:1]:  # the device has room for one
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
        self._idle[worker.worker_id] = (worker, time.monotonic())

    def acquire(self, key: ProcessKey, lease: LeaseMark) -> WorkerProcess:
        """Return a worker for a lease. Idle workers of other keys are ended first, as the device has room for one.

        Raises:
            InvalidInput: the key has more ranks than this host takes.
        """
        with self._lock:
            idle = [worker for worker, _ in self._idle.values()]
            self._idle.clear()
            fit = next((w for w in idle if w.key == key and w.is_alive() and not w.is_stopped()), None)
            for worker in idle:
                if worker is not fit:
                    _dispose(worker)
            worker = fit or launch(self._paths, key, self._command, self._environment, self._max_ranks)
            try:
                worker.serve(lease)
            except OSError:
                _dispose(worker)
                raise
            self._leased[worker.worker_id] = worker
            return worker

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

        It is ended instead if it is dead, if its weights are still on the device, or if the idle time is 0.
        """
        while worker.num_jobs[lease.run_id]:
            time.sleep(0.02)
        with self._lock:
            worker.leave(lease)
            if worker.leases:
                return
            del self._leased[worker.worker_id]
            self._shared = {queue: shared for queue, shared in self._shared.items() if shared[0] is not worker}
            if worker.is_alive() and not worker.holds_device and self._idle_limit_s > 0:
                self._idle[worker.worker_id] = (worker, time.monotonic())
                return
        _dispose(worker)

    @contextmanager
    def using(self, worker_id: str, lease: LeaseMark) -> Iterator[WorkerProcess]:
        """Yield the worker of a lease. `release` waits until the block ends.

        Raises:
            LeaseLost: this host has no such worker any more, or it serves another lease.
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
        """End the idle workers whose idle time is over, and those that have died."""
        now = time.monotonic()
        with self._lock:
            over = [
                worker
                for worker, since in self._idle.values()
                if now - since > self._idle_limit_s or not worker.is_alive()
            ]
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


def _dispose(worker: WorkerProcess) -> None:
    worker.end(polite=worker.is_ready())  # one that is still starting does not read the `stop` file yet
    worker.remove()
    _log.info("worker %s has ended", worker.worker_id)
