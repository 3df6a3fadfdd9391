"""The lease: one run's right to one worker process, held by a long activity on the queue of a shape of hosts."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from temporalio import activity

from activities.host_context import HOST_LEAVES, beating, host_is_leaving
from activities.hosts.progress import Signals
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess, last_words, tail
from shared.contract import Fence, Frozen
from shared.errors import InvalidInput, LongshoreError, WorkerLost
from shared.jobs.leases import LeaseGrant, LeaseMark, ProcessKey, SamplerKey, WorkerKey
from shared.runs.requests import RunId
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_POLL_S = 0.05
_LOOK_EVERY_S = 60.0  # at whether the process was stopped: whoever asks a sampler would wait for ever
_UNUSABLE_MODEL = 2  # a sampler's exit status


class LeaseRequest(Frozen):
    """A run's request for a worker."""

    run_id: RunId
    epoch: int
    key: WorkerKey
    ready_timeout_s: float


class LeaseRecord(Frozen):
    """The store's record of a lease, kept for ever, so that later executions of the run fence above it."""

    run_id: RunId
    fence: Fence
    host: str
    host_queue: str
    workflow_run_id: str


class ProcessLease:
    """The part that all leases share: start or adopt a process, signal the run, and watch until the lease ends.

    Args:
        signal: what the run is told with.
    """

    def __init__(self, pool: WorkerPool, signals: Signals, host_queue: str, signal: str) -> None:
        self._pool = pool
        self._signals = signals
        self._host_queue = host_queue
        self._signal = signal

    @contextmanager
    def begin(self, key: ProcessKey, mark: LeaseMark, ready_timeout_s: float) -> Iterator[WorkerProcess | None]:
        """A process that is up, given back when the block ends; None when the lease ended first.

        Raises:
            WorkerLost: it ended or did not come up in time, or this host leaves.
            InvalidInput: a sampler cannot use its model.
        """
        worker = self._pool.acquire(key)
        try:
            worker.serve(mark)
            yield worker if _is_up(worker, ready_timeout_s) else None
        finally:
            self._pool.release(worker)

    def hold(self, worker: WorkerProcess, fence: Fence) -> None:
        """Tell the run, and keep the process until the lease ends. Raises as `begin` does."""
        if not self._tell(worker, fence):
            return
        look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, False
        while _is_held(worker):
            if time.monotonic() > look_at:
                look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, _is_stopped(worker, was_stopped)
            time.sleep(_POLL_S)

    def _tell(self, worker: WorkerProcess, fence: Fence) -> bool:
        """Tell the run, as often as it takes; False when the lease ended first."""
        grant = LeaseGrant(fence=fence, host_queue=self._host_queue, worker_id=worker.worker_id)
        while not self._signals.send(self._signal, grant).result():
            if not _is_held(worker):
                return False
            time.sleep(1.0)
        return True


class Lease:
    """Starts or adopts a worker, tells the run about it, and holds it until the lease is cancelled."""

    def __init__(self, pool: WorkerPool, store: ObjectStore, signals: Signals, host_queue: str) -> None:
        self._lease = ProcessLease(pool, signals, host_queue, "leased")
        self._store = store
        self._host_queue = host_queue

    @activity.defn(name="lease", no_thread_cancel_exception=True)
    def lease(self, request: LeaseRequest) -> None:
        """Hold a worker until this activity is cancelled, which is the release.

        Raises:
            WorkerLost: the worker ended or did not come up, this host leaves, or the epoch was leased before.
        """
        fence = Fence(epoch=request.epoch, attempt=activity.info().attempt)
        mark = LeaseMark(run_id=request.run_id, fence=fence)
        with beating():
            self._record(request.run_id, fence)
            with self._lease.begin(request.key, mark, request.ready_timeout_s) as worker:
                if worker is not None:
                    self._lease.hold(worker, fence)

    def _record(self, run_id: str, fence: Fence) -> None:
        record = LeaseRecord(
            run_id=run_id,
            fence=fence,
            host=socket.gethostname(),
            host_queue=self._host_queue,
            workflow_run_id=activity.info().workflow_run_id or "",
        )
        if not self._store.put_if_absent(RunKeys(run_id).lease(fence.epoch), record.model_dump_json().encode()):
            raise WorkerLost(f"lease {fence.label} of {run_id} was taken before")


def _is_up(worker: WorkerProcess, timeout_s: float) -> bool:
    """Wait for the worker; False when the lease ended first."""
    deadline = time.monotonic() + timeout_s
    while not worker.is_ready():
        if not _is_held(worker):
            return False
        if time.monotonic() > deadline:
            worker.end()
            raise WorkerLost(f"no worker within {timeout_s:g} s; {worker.death_report()}")
        time.sleep(_POLL_S)
    return True


def _is_held(worker: WorkerProcess) -> bool:
    """True while the lease goes on. Raises WorkerLost when it cannot, and InvalidInput when no other could either."""
    if host_is_leaving():
        raise WorkerLost(HOST_LEAVES)
    if activity.is_cancelled():
        return False
    if not worker.is_alive():
        raise _loss(worker)
    return True


def _is_stopped(worker: WorkerProcess, before: bool) -> bool:
    """True if the process is stopped now. Raises WorkerLost when it was at the look before, too."""
    now = worker.is_stopped()
    if now and before:
        worker.end()
        raise WorkerLost(f"the process was stopped (SIGSTOP) for {_LOOK_EVERY_S:g} s")
    return now


def _loss(worker: WorkerProcess) -> LongshoreError:
    if isinstance(worker.key, SamplerKey) and worker.exit_code == _UNUSABLE_MODEL:
        said = last_words(tail(worker.paths.output))
        return InvalidInput(f"the sampler cannot use this model: {said}", worker.key.model.uri)
    return WorkerLost(worker.death_report())
