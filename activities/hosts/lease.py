"""The lease: one run's right to one worker process, held by a long activity on the queue of a shape of hosts."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from temporalio import activity

from activities.host_context import HOST_LEAVES, beating, host_is_leaving
from activities.hosts.progress import Signals
from activities.hosts.standing import Standing
from activities.hosts.transports import check_backend
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess, last_words, log_tail
from activities.telemetry import LEASES, phase
from longshore.fields import Frozen
from shared.errors import DiskFull, HostLeft, InvalidInput, LeaseLost, LongshoreError, WorkerLost
from shared.fence import Fence
from shared.jobs.leases import LeaseGrant, LeaseMark, ProcessKey, SamplerKey, WorkerKey
from shared.jobs.weight_sync import SyncBackend
from shared.runs.requests import RunId
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_POLL_S = 0.05
_LOOK_EVERY_S = 60.0  # between checks for a stopped (SIGSTOP) process, whose users would wait for ever
_UNUSABLE_MODEL = 2  # a sampler's exit status

JoiningLeases = Callable[[str], AbstractContextManager[None]]


class LeaseRequest(Frozen):
    """A run's request for a worker.

    `join_queue`: runs with the same value may train adapters on one worker; None: the worker is not shared.
    `sync_backend`: how the worker's weights are to come to samplers. `avoid`: queues of hosts that lost the run's
    worker at its start, which leave it to others where there are any.
    """

    run_id: RunId
    epoch: int
    key: WorkerKey
    ready_timeout_s: float
    join_queue: str | None = None
    sync_backend: SyncBackend = "auto"
    avoid: tuple[str, ...] = ()


class LeaseRecord(Frozen):
    """The store's record of a lease. It is never deleted, so that later leases of the run get a higher epoch."""

    run_id: RunId
    fence: Fence
    host: str
    host_queue: str
    workflow_run_id: str


class ProcessLease:
    """What all kinds of leases do: start or adopt a process, signal the run, and watch until the lease ends.

    Args:
        signal: the name of the signal that tells the run's workflow of the process.
        standing: this host's, which is told of losses.
    """

    def __init__(
        self, pool: WorkerPool, signals: Signals, host_queue: str, signal: str, standing: Standing | None = None
    ) -> None:
        self._pool = pool
        self._signals = signals
        self._host_queue = host_queue
        self._signal = signal
        self._standing = standing

    def offered(self, run_id: str, avoid: tuple[str, ...]) -> AbstractContextManager[None]:
        """Hold a lease in a `with` block, unless this host has to leave it to others (`Standing.offered`)."""
        return nullcontext() if self._standing is None else self._standing.offered(run_id, avoid)

    @contextmanager
    def begin(self, key: ProcessKey, mark: LeaseMark, ready_timeout_s: float) -> Iterator[WorkerProcess | None]:
        """Yield a process once it is up, and give it back when the block ends. Yields None if the lease ended first.

        Raises:
            WorkerLost: it ended or did not come up in time, or this host leaves.
            InvalidInput: a sampler cannot use its model.
        """
        with self._counted(mark) as begun, ExitStack() as held:
            with phase("start worker"):
                worker = self._pool.acquire(key, mark)
                begun.append(worker)
                held.enter_context(self._until_released(worker, mark))
                is_up = _is_up(worker, ready_timeout_s)
            yield worker if is_up else None

    @contextmanager
    def _counted(self, mark: LeaseMark) -> Iterator[list[WorkerProcess]]:
        """Have this host's standing count the loss of a worker; yields a list for the worker, once it is started."""
        begun: list[WorkerProcess] = []
        try:
            yield begun
        except (WorkerLost, DiskFull, OSError) as error:
            # Where the disk is full, another host's may have room; on a host that is alone the error says so.
            if self._standing is None:
                raise
            loss = error if isinstance(error, WorkerLost) else WorkerLost(f"no worker can be started: {error}")
            self._standing.lost(mark.run_id, loss, at_start=not any(worker.has_worked for worker in begun))
            if loss is error or not self._standing.others_take_leases():
                raise
            raise loss from error

    @contextmanager
    def join(self, queue: str, mark: LeaseMark, ready_timeout_s: float) -> Iterator[WorkerProcess | None]:
        """Like `begin`, with a process that serves other leases, too. Yields None if no such process takes this one."""
        is_closing = self._standing is not None and self._standing.is_closing
        worker = None if is_closing else self._pool.join(queue, mark)
        if worker is None:
            yield None
            return
        with self._until_released(worker, mark):
            yield worker if _is_up(worker, ready_timeout_s) else None

    @contextmanager
    def _until_released(self, worker: WorkerProcess, mark: LeaseMark) -> Iterator[None]:
        try:
            yield
        finally:
            self._pool.release(worker, mark)

    def hold(self, worker: WorkerProcess) -> None:
        """Keep the process until the lease ends. Raises as `begin` does."""
        look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, False
        role = "sampler" if isinstance(worker.key, SamplerKey) else "gpu"
        with LEASES.labels(role).track_inprogress():
            while _is_held(worker):
                if time.monotonic() > look_at:
                    look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, _is_stopped(worker, was_stopped)
                time.sleep(_POLL_S)

    def tell(
        self,
        worker: WorkerProcess,
        mark: LeaseMark,
        joined: bool = False,
        reached: Mapping[str, str | None] | None = None,
    ) -> bool:
        """Signal the run until the signal arrives. Returns False if the lease ended first. Raises as `begin` does.

        `reached`: of a sampler's lease, the grant's fields that say where it is asked, and where it takes weights.
        """
        worker.count_time_of(mark)
        grant = LeaseGrant(
            fence=mark.fence, host_queue=self._host_queue, worker_id=worker.worker_id, joined=joined
        ).model_copy(update=reached)
        while not self._signals.send(self._signal, grant).result():
            if not _is_held(worker):
                return False
            time.sleep(1.0)
        return True


class Lease:
    """Starts or adopts a worker, tells the run about it, and holds it until the lease is cancelled.

    Args:
        joining: makes a context in which this host polls a queue for `join_lease` activities.
        allowed: experimental transports of weights that this host takes part in.
        standing: this host's; without one it takes every lease.
    """

    def __init__(
        self,
        pool: WorkerPool,
        store: ObjectStore,
        signals: Signals,
        host_queue: str,
        joining: JoiningLeases | None = None,
        allowed: tuple[str, ...] = (),
        standing: Standing | None = None,
    ) -> None:
        self._lease = ProcessLease(pool, signals, host_queue, "leased", standing)
        self._pool = pool
        self._store = store
        self._host_queue = host_queue
        self._joining = joining
        self._allowed = allowed

    @activity.defn(name="lease", no_thread_cancel_exception=True)
    def lease(self, request: LeaseRequest) -> None:
        """Hold a worker until this activity is cancelled, which releases it, and until no other run is on it.

        Returns at once if the run has already joined another run's worker.

        Raises:
            WorkerLost: the worker ended or did not come up, this host leaves, or the epoch was leased before.
            InvalidInput: weights do not travel that way from here.
            ApplicationError: this host leaves it to others (`Standing.offered`).
        """
        mark = mark_of(request.run_id, request.epoch)
        with beating(), self._lease.offered(mark.run_id, request.avoid), ExitStack() as after:
            check_backend(request.sync_backend, "gpu", self._allowed)
            if not self._record(mark):
                if request.join_queue is not None:
                    return
                raise LeaseLost(f"lease {mark.fence.label} of {mark.run_id} was taken before")
            with self._lease.begin(request.key, mark, request.ready_timeout_s) as worker:
                if worker is None or not self._lease.tell(worker, mark):
                    return
                if request.join_queue is not None and self._joining is not None:
                    self._pool.share(request.join_queue, worker)
                    after.enter_context(self._joining(request.join_queue))
                    after.callback(_wait_for_others, worker)
                self._lease.hold(worker)

    @activity.defn(name="join_lease", no_thread_cancel_exception=True)
    def join_lease(self, request: LeaseRequest) -> None:
        """Hold a worker that another lease brought up, until this activity is cancelled.

        Returns at once if no worker here takes the run, or another host has done so. Raises WorkerLost and InvalidInput
        as `lease` does.
        """
        assert request.join_queue is not None
        mark = mark_of(request.run_id, request.epoch)
        with beating(), ExitStack() as after:
            check_backend(request.sync_backend, "gpu", self._allowed)
            worker = after.enter_context(self._lease.join(request.join_queue, mark, request.ready_timeout_s))
            if worker is not None and self._record(mark) and self._lease.tell(worker, mark, joined=True):
                self._lease.hold(worker)

    def _record(self, mark: LeaseMark) -> bool:
        """Record the lease in the store. Returns False if the run has a lease of this epoch: only the first counts."""
        record = LeaseRecord(
            run_id=mark.run_id,
            fence=mark.fence,
            host=socket.gethostname(),
            host_queue=self._host_queue,
            workflow_run_id=activity.info().workflow_run_id or "",
        )
        key = RunKeys(mark.run_id).lease(mark.fence.epoch)
        return self._store.put_if_absent(key, record.model_dump_json().encode())


def mark_of(run_id: RunId, epoch: int) -> LeaseMark:
    """Return the mark of the lease that the current activity holds."""
    return LeaseMark(run_id=run_id, fence=Fence(epoch=epoch, attempt=activity.info().attempt))


def _wait_for_others(worker: WorkerProcess) -> None:
    """Wait until the worker serves no lease, since the device has no room for another worker."""
    while worker.leases and not host_is_leaving():
        time.sleep(_POLL_S)


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
    """Return False once the lease is cancelled. Raises WorkerLost if the process is lost or the host leaves.

    Raises InvalidInput if the process ended because its model cannot be used.
    """
    if host_is_leaving():
        raise HostLeft(HOST_LEAVES)
    if activity.is_cancelled():
        return False
    if not worker.is_alive():
        raise _loss(worker)
    return True


def _is_stopped(worker: WorkerProcess, before: bool) -> bool:
    """Return True if the process is stopped. If it was so at the last check, too, end it and raise WorkerLost."""
    now = worker.is_stopped()
    if now and before:
        worker.end()
        raise WorkerLost(f"the process was stopped (SIGSTOP) for {_LOOK_EVERY_S:g} s")
    return now


def _loss(worker: WorkerProcess) -> LongshoreError:
    if isinstance(worker.key, SamplerKey) and worker.exit_code == _UNUSABLE_MODEL:
        said = last_words(log_tail(worker.paths.output))
        return InvalidInput(f"the sampler cannot use this model: {said}", worker.key.model.uri)
    return WorkerLost(worker.death_report())
