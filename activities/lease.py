"""The lease: one run's right to one worker process, held by a long activity on the queue of a shape of hosts."""

import socket
import time

from temporalio import activity

from activities.heartbeat import beating, host_is_leaving
from activities.signals import Signals
from activities.worker_pool import WorkerPool
from activities.worker_process import WorkerProcess
from shared.errors import WorkerLost
from shared.jobs import Fence
from shared.leases import LeaseMark, WorkerKey
from shared.models import Frozen
from shared.paths import RunKeys
from shared.runs import RunId
from shared.store import ObjectStore

_POLL_S = 0.05


class LeaseRequest(Frozen):
    """What a run asks a host for."""

    run_id: RunId
    epoch: int
    key: WorkerKey
    ready_timeout_s: float


class LeaseGrant(Frozen):
    """Signalled to the workflow: the worker is up, and jobs for it go to the host's own queue."""

    fence: Fence
    host_queue: str
    worker_id: str


class LeaseRecord(Frozen):
    """What stands in the store of every lease there ever was, so that later executions of the run fence above it."""

    run_id: RunId
    fence: Fence
    host: str
    host_queue: str
    workflow_run_id: str


class Lease:
    """Starts or adopts a worker, tells the run about it, and holds it until the lease is cancelled."""

    def __init__(self, pool: WorkerPool, store: ObjectStore, signals: Signals, host_queue: str) -> None:
        self._pool = pool
        self._store = store
        self._signals = signals
        self._host_queue = host_queue

    @activity.defn(name="lease", no_thread_cancel_exception=True)
    def lease(self, request: LeaseRequest) -> None:
        """Hold a worker until this activity is cancelled, which is the release.

        Raises:
            WorkerLost: the worker ended or did not come up, this host leaves, or the epoch was leased before.
        """
        fence = Fence(epoch=request.epoch, attempt=activity.info().attempt)
        with beating():
            self._record(request.run_id, fence)
            worker = self._pool.acquire(request.key)
            try:
                worker.serve(LeaseMark(run_id=request.run_id, fence=fence))
                if self._is_up(worker, request.ready_timeout_s) and self._tell(worker, fence):
                    while _is_held(worker):
                        time.sleep(_POLL_S)
            finally:
                self._pool.release(worker)

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

    def _is_up(self, worker: WorkerProcess, timeout_s: float) -> bool:
        """Wait for the worker; False when the lease ended first."""
        deadline = time.monotonic() + timeout_s
        while not worker.is_ready():
            if not _is_held(worker):
                return False
            if time.monotonic() > deadline:
                worker.end()
                raise WorkerLost(f"no worker within {timeout_s:g} s; {worker.obituary()}")
            time.sleep(_POLL_S)
        return True

    def _tell(self, worker: WorkerProcess, fence: Fence) -> bool:
        """Tell the run, as often as it takes; False when the lease ended first."""
        grant = LeaseGrant(fence=fence, host_queue=self._host_queue, worker_id=worker.worker_id)
        while not self._signals.send("leased", grant).result():
            if not _is_held(worker):
                return False
            time.sleep(1.0)
        return True


def _is_held(worker: WorkerProcess) -> bool:
    """Whether the lease goes on. Raises WorkerLost when it cannot."""
    if host_is_leaving():
        raise WorkerLost("the host is shutting down")
    if activity.is_cancelled():
        return False
    if not worker.is_alive():
        raise WorkerLost(worker.obituary())
    return True
