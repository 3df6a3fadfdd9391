"""The lease: one run's right to one worker process, held by a long activity on the queue of a shape of hosts."""

import asyncio
import functools
import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from activities.heartbeats import HOST_LEAVES, host_is_leaving, is_cancelled, on_thread
from activities.hosts.health import HostHealth
from activities.hosts.workers import Meeting, WorkerPool, WorkerProcess, last_words, log_tail
from activities.telemetry import LEASES, phase
from longshore.fields import Artifact, Fence, Frozen
from longshore.runs import JobsOf
from longshore.training import SyncBackend
from shared.child_environment import child_environment
from shared.errors import (
    DiskFull,
    HostLeft,
    InvalidInput,
    LeaseLost,
    LongshoreError,
    NotFound,
    StoreUnavailable,
    WorkerLost,
)
from shared.jobs.commands import CommandHead
from shared.jobs.job import GangLeader, Job, LeaseGrant, LeaseMark, ProcessKey, SamplerKey, WorkerKey, artifacts_of
from shared.settings import S3Settings
from shared.storage.artifacts import stage
from shared.storage.files import StageAnswer, StageRequest, write_atomically
from shared.storage.paths import RunKeys, WorkerPaths
from shared.storage.store import ObjectStore

# --- Transports ---
# The weight-sync transports of a host, checked before it starts a worker or sampler for a run that names one.

_TIMEOUT_S = 120.0
_NOT_ALLOWED = "its operator has not allowed it (LONGSHORE_EXTERNAL_TRANSPORT)"
_log = logging.getLogger(__name__)


def check_backend(
    backend: SyncBackend, host: str, external: bool = False, problems: Mapping[str, str] | None = None
) -> None:
    """Refuse a weight sync that this host does not support. `auto`, `store` and `delta` are never refused.

    Args:
        host: what kind of host this is, for the message.
        external: whether its operator allows the transport of an installed package.
        problems: by transport, another reason why it does not work here.

    Raises:
        InvalidInput: it names what is possible here, and why the rest is not.
    """
    if backend in ("auto", "store", "delta"):
        return
    here = reasons_here(external)
    found = {name: why for name, why in here.items() if why is not None} | dict(problems or {})
    if backend == "external" and not external:
        found[backend] = _NOT_ALLOWED
    if backend not in found:
        return
    possible = ", ".join(["auto", "store", "delta", *(name for name in here if name not in found)])
    others = "".join(f"; {name} is not: {why}" for name, why in found.items() if name != backend and name in here)
    message = f"{backend} is not possible on this {host} host: {found[backend]}; possible are {possible}{others}"
    raise InvalidInput(message, "rollouts.weight_sync.backend")


@functools.cache
def reasons_here(external: bool = False) -> dict[str, str | None]:
    """Return every transport with the reason why it does not work here, or None. A child process finds out, once.

    `external`: whether to load that of an installed package. Empty if that process fails: a worker would fail too, with
    a clearer message.
    """
    command = [sys.executable, "-P", "-m", "megatron_worker.weight_sync", *(["external"] if external else [])]
    try:
        done = subprocess.run(
            command, env=child_environment("worker"), capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.warning("what weights can travel by is not known: %s", error)
        return {}


# --- Signals to the workflow of an activity ---

_SIGNAL_TIMEOUT_S = 10.0


class Signals(Protocol):
    """Sends signals to the workflow of the current activity. To be called from the activity's thread."""

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        """Start to send a signal. The future's result is False if it did not arrive; that is not raised as an error."""
        ...


class WorkflowSignals:
    """Signals through the host's Temporal client, which lives in the host's event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        info = activity.info()
        assert info.workflow_id is not None
        handle = self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        return asyncio.run_coroutine_threadsafe(_send(handle, name, message), self._loop)


async def _send(handle: WorkflowHandle[Any, Any], name: str, message: Frozen) -> bool:
    try:
        await asyncio.wait_for(handle.signal(name, message), _SIGNAL_TIMEOUT_S)
    except (RPCError, TimeoutError) as error:
        _log.warning("signal %s did not reach %s: %s", name, handle.id, error)
        return False
    return True


# --- Stager ---
# Stages artifacts for this host's workers, which have no credentials of a store (shared/storage/files.py).


class _JobHasEnded(Exception): ...


class Stager:
    """Stages artifacts in the cache that this host shares with its workers. Safe to use from several threads."""

    def __init__(self, cache: Path, s3: S3Settings) -> None:
        self._cache, self._s3 = cache, s3
        self._locks: WeakValueDictionary[Artifact, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def stage(self, artifact: Artifact, check: Callable[[], None]) -> None:
        """Stage an artifact. Waits for other jobs that are staging the same one, so that it is fetched once.

        Calls `check` now and then. Raises as `stage` of shared/storage/artifacts.py does, and what `check` raises.
        """
        with self._lock:
            lock = self._locks.setdefault(artifact, threading.Lock())
        while not lock.acquire(timeout=0.05):
            check()
        try:
            stage(artifact, self._cache, self._s3, check=check)
        finally:
            lock.release()


class JobStaging:
    """Stages artifacts that a job's worker asks for, in a thread, if the job or a command of its session names them."""

    def __init__(self, stager: Stager, job: Job, store: ObjectStore) -> None:
        self._stager, self._job, self._store = stager, job, store
        self._request, self._answer = StageRequest.path(job.log_path), StageAnswer.path(job.log_path)
        self._answering: Future[StageAnswer] | None = None
        self._is_over = threading.Event()

    def look(self) -> None:
        """Start a new request, or answer it once the artifact is staged. Does not block."""
        if self._answering is not None and self._answering.done():
            write_atomically(self._answer, self._answering.result().model_dump_json().encode(), is_durable=False)
            self._answering = None
        if self._answering is None and self._request.exists():
            data, self._answering = self._request.read_bytes(), Future()
            self._request.unlink()
            threading.Thread(target=self._work, args=(data, self._answering), name="staging", daemon=True).start()

    def end(self) -> None:
        """Stop staging soon, because nobody waits for it any more."""
        self._is_over.set()

    def _work(self, data: bytes, answering: "Future[StageAnswer]") -> None:
        try:
            request = StageRequest.model_validate_json(data)
            for artifact in request.artifacts:
                self._check_is_named(artifact, request.command)
                self._stager.stage(artifact, self._check)
            answering.set_result(StageAnswer())
        except Exception as error:
            if not self._is_over.is_set():
                _log.warning("inputs of job %s of %s: %r", self._job.plan.job_id, self._job.plan.run_id, error)
            answering.set_result(StageAnswer.of(error))

    def _check_is_named(self, artifact: Artifact, command: int | None) -> None:
        """Refuse artifacts that the job does not name: a worker may run untrusted code, and its host can read more."""
        if command is None:
            is_named = artifact in artifacts_of(self._job)
        else:
            data = self._store.get_bytes(RunKeys(self._job.plan.run_id).command(command))
            is_named = CommandHead.model_validate_json(data).checkpoint == artifact
        if not is_named:
            raise InvalidInput("the job does not name this artifact", artifact.uri)

    def _check(self) -> None:
        if self._is_over.is_set():
            raise _JobHasEnded


class NodeStaging:
    """Stages inputs of this machine's ranks for jobs of another machine's host, by the job files in the store.

    A run's jobs on one worker are sequential, so an earlier job's files can be deleted when the next one asks.
    """

    def __init__(self, stager: Stager, paths: WorkerPaths, mark: LeaseMark, store: ObjectStore) -> None:
        self._stager, self._paths, self._mark, self._store = stager, paths, mark, store
        self._jobs = paths.outputs(mark.run_id, "*", mark.fence).parent.parent
        self._current: tuple[Path, JobStaging] | None = None

    def look(self) -> None:
        """Start a new request, or answer it. A request waits until its job is in the store."""
        for wanted in self._jobs.glob(f"*/{self._mark.fence.label}/wanted.json"):
            with suppress(NotFound, StoreUnavailable):
                self._turn_to(wanted.parent.parent)
        if self._current is not None:
            self._current[1].look()

    def _turn_to(self, folder: Path) -> None:
        if self._current is not None and self._current[0] == folder:
            return
        fence = self._mark.fence
        job = Job.model_validate_json(self._store.get_bytes(RunKeys(self._mark.run_id).job(folder.name, fence)))
        job = job.model_copy(update=Job.places(self._paths, job.plan, fence))
        if self._current is not None:
            self.end()
            shutil.rmtree(self._current[0], ignore_errors=True)
        self._current = folder, JobStaging(self._stager, job, self._store)

    def end(self) -> None:
        if self._current is not None:
            self._current[1].end()


_POLL_S = 0.05
_LOOK_EVERY_S = 60.0  # between checks for a stopped (SIGSTOP) process, whose users would wait forever
_UNUSABLE_MODEL = 2  # a sampler's exit status
_SIGNALLED = 128  # a launcher's exit status is above this if a signal ended a rank

JoiningLeases = Callable[[str], AbstractContextManager[None]]
Meet = Callable[[WorkerProcess], AbstractContextManager[None]]


class Meetings(Protocol):
    """How this host meets those of the other machines of a worker (service/host_http/gangs.py)."""

    def leading(self, paths: WorkerPaths, num_nodes: int) -> AbstractContextManager[Meeting]: ...
    def following(self, paths: WorkerPaths, node: int, leader: GangLeader) -> AbstractContextManager[Meeting]: ...


class LeaseRequest(Frozen):
    """A run's request for a worker.

    `join_queue`: runs with the same value may train adapters on one worker; None: the worker is not shared.
    `sync_backend`: the transport of the worker's weights to samplers. `node`: this part's number in a worker of several
    machines. `leader`: where the parts meet, for all except the first.
    """

    run_id: JobsOf
    epoch: int
    key: WorkerKey
    ready_timeout_s: float
    join_queue: str | None = None
    sync_backend: SyncBackend = "auto"
    node: int = 0
    leader: GangLeader | None = None


class LeaseRecord(Frozen):
    """The store's record of a lease. It is never deleted, so that later leases of the run get a higher epoch."""

    run_id: JobsOf
    fence: Fence
    host: str
    host_queue: str
    workflow_run_id: str


@dataclass(frozen=True)
class ProcessLease:
    """The common part of all leases: start or adopt a process, signal the run, and watch until the lease ends.

    `signal`: the name of the signal that announces the process to the run's workflow. `health`: this host's, which
    counts lost workers; without one it takes every lease.
    """

    pool: WorkerPool
    signals: Signals
    host_queue: str
    signal: str
    health: HostHealth | None = None

    def offered(self) -> AbstractContextManager[None]:
        """Hold a lease in a `with` block, unless this host leaves (`HostHealth.offered`)."""
        return nullcontext() if self.health is None else self.health.offered()

    @contextmanager
    def begin(
        self,
        key: ProcessKey,
        mark: LeaseMark,
        ready_timeout_s: float,
        node: int = 0,
        meet: Meet = lambda worker: nullcontext(),
    ) -> Iterator[WorkerProcess | None]:
        """Yield a process once it is up, and give it back when the block ends. Yields None if the lease ended first.

        `meet`: makes a context; within it a process of several machines meets its other parts; this machine is `node`.

        Raises:
            WorkerLost: it ended or did not come up in time, or this host leaves.
            InvalidInput: a sampler cannot use its model.
        """
        with self._counted() as begun, ExitStack() as after, ExitStack() as held:
            with phase("start worker"):
                worker = self.pool.acquire(key, mark, node)
                begun.append(worker)
                held.enter_context(self._until_released(worker, mark))
                after.enter_context(meet(worker))
                is_up = _is_up(worker, ready_timeout_s)
            yield worker if is_up else None

    @contextmanager
    def _counted(self) -> Iterator[list[WorkerProcess]]:
        """Have this host's health count the loss of a worker; yields a list for the worker, once it is started."""
        begun: list[WorkerProcess] = []
        try:
            yield begun
        except (WorkerLost, DiskFull, OSError) as error:
            # If the disk is full, another host's may have room. A host without others raises the error itself.
            if self.health is None:
                raise
            loss = error if isinstance(error, WorkerLost) else WorkerLost(f"no worker can be started: {error}")
            self.health.lost(loss, at_start=not any(worker.has_worked for worker in begun))
            if loss is error or not self.health.has_others():
                raise
            raise loss from error

    @contextmanager
    def join(self, queue: str, mark: LeaseMark, ready_timeout_s: float) -> Iterator[WorkerProcess | None]:
        """Like `begin`, with a process that serves other leases, too. Yields None if no such process takes this one."""
        is_closing = self.health is not None and self.health.is_closing
        worker = None if is_closing else self.pool.join(queue, mark)
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
            self.pool.release(worker, mark)

    def hold(self, worker: WorkerProcess, look: Callable[[], None] = lambda: None) -> None:
        """Keep the process until the lease ends, and call `look` now and then. Raises as `begin` does."""
        look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, False
        role = "sampler" if isinstance(worker.key, SamplerKey) else "gpu"
        with LEASES.labels(role).track_inprogress():
            while _is_held(worker):
                if time.monotonic() > look_at:
                    is_stopped = worker.is_stopped()
                    if is_stopped and was_stopped:
                        worker.end()
                        raise WorkerLost(f"the process was stopped (SIGSTOP) for {_LOOK_EVERY_S:g} s")
                    look_at, was_stopped = time.monotonic() + _LOOK_EVERY_S, is_stopped
                look()
                time.sleep(_POLL_S)

    def tell(
        self,
        worker: WorkerProcess,
        mark: LeaseMark,
        joined: bool = False,
        reached: Mapping[str, str | None] | None = None,
    ) -> bool:
        """Signal the run until the signal arrives. Returns False if the lease ended first. Raises as `begin` does.

        `reached`: for a sampler's lease, the grant's fields with its addresses for requests and for weights.
        """
        worker.count_time_of(mark)
        grant = LeaseGrant(
            fence=mark.fence, host_queue=self.host_queue, worker_id=worker.worker_id, joined=joined
        ).model_copy(update=reached)
        while not self.signals.send(self.signal, grant).result():
            if not _is_held(worker):
                return False
            time.sleep(1.0)
        return True


@dataclass(frozen=True)
class Lease:
    """Starts or adopts a worker, tells the run about it, and holds it until the lease is cancelled.

    Args:
        joining: makes a context; while it is open, this host polls a queue for `join_lease` activities.
        external_transport: whether runs may name the weight sync of an installed package.
        meetings: the rendezvous with hosts of other machines. `stager`: stages inputs for ranks here whose job is on
            another host. Without these, the host takes no part of a worker of several machines.
        drain_grace_s: the time that such a worker has to save a checkpoint once this host leaves.
    """

    process: ProcessLease
    store: ObjectStore
    joining: JoiningLeases | None = None
    external_transport: bool = False
    meetings: Meetings | None = None
    stager: Stager | None = None
    drain_grace_s: float = 0.0

    @on_thread("lease")
    def lease(self, request: LeaseRequest) -> None:
        """Hold a worker until this activity is cancelled, which releases it, and until no other run is on it.

        Returns at once if the run has already joined another run's worker.

        Raises:
            WorkerLost: the worker ended or did not come up, this host leaves, or the epoch was leased before.
            InvalidInput: weights do not travel that way from here.
        """
        mark = mark_of(request.run_id, request.epoch)
        if request.leader is not None:
            mark = mark.model_copy(update={"fence": request.leader.fence})
        with self.process.offered(), ExitStack() as after:
            check_backend(request.sync_backend, "gpu", self.external_transport)
            if not request.node and not self._record(mark):
                if request.join_queue is not None:
                    return
                raise LeaseLost(f"lease {mark.fence.label} of {mark.run_id} was taken before")
            meet = partial(self._meet, request, mark)
            with self.process.begin(request.key, mark, request.ready_timeout_s, request.node, meet) as worker:
                if worker is not None and request.node:
                    self._attend(worker, mark)
                    return
                if worker is None or not self.process.tell(worker, mark):
                    return
                if request.join_queue is not None and self.joining is not None:
                    self.process.pool.share(request.join_queue, worker)
                    after.enter_context(self.joining(request.join_queue))
                    after.callback(_wait_for_others, worker)
                self.process.hold(worker)

    @contextmanager
    def _meet(self, request: LeaseRequest, mark: LeaseMark, worker: WorkerProcess) -> Iterator[None]:
        """Have a worker of several machines meet its other parts: at this host, after it told the run, or at the first.

        Raises WorkerLost: the first machine's host is not reached.
        """
        with ExitStack() as stack:
            nodes = request.key.layout.nodes
            if nodes > 1:
                assert self.meetings is not None
                if request.leader is None:
                    led = worker.meeting = stack.enter_context(self.meetings.leading(worker.paths, nodes))
                    leader = GangLeader(fence=mark.fence, worker_id=worker.worker_id, at=led.at)
                    while not self.process.signals.send("gathers", leader).result() and _is_held(worker):
                        time.sleep(1.0)
                else:
                    try:
                        meeting = self.meetings.following(worker.paths, request.node, request.leader)
                        worker.meeting = stack.enter_context(meeting)
                    except OSError as error:
                        raise WorkerLost(f"the first machine's host is not reached: {error}") from error
            yield

    def _attend(self, worker: WorkerProcess, mark: LeaseMark) -> None:
        """Hold this machine's part of a worker whose jobs the first machine's host has. Raises as `lease` does."""
        assert self.stager is not None and worker.meeting is not None
        staging = NodeStaging(self.stager, worker.paths, mark, self.store)
        try:
            self.process.hold(worker, staging.look)
        except HostLeft:
            worker.meeting.is_leaving, until = True, time.monotonic() + self.drain_grace_s
            while time.monotonic() < until and worker.is_alive() and not worker.meeting.broken:
                staging.look()
                time.sleep(_POLL_S)
            raise
        finally:
            staging.end()

    @on_thread("join_lease")
    def join_lease(self, request: LeaseRequest) -> None:
        """Hold a worker that another lease brought up, until this activity is cancelled.

        Returns at once if no worker here takes the run, or another host has done so. Raises WorkerLost and InvalidInput
        as `lease` does.
        """
        assert request.join_queue is not None
        mark = mark_of(request.run_id, request.epoch)
        with ExitStack() as after:
            check_backend(request.sync_backend, "gpu", self.external_transport)
            worker = after.enter_context(self.process.join(request.join_queue, mark, request.ready_timeout_s))
            if worker is not None and self._record(mark) and self.process.tell(worker, mark, joined=True):
                self.process.hold(worker)

    def _record(self, mark: LeaseMark) -> bool:
        """Record the lease in the store. Returns False if the run has a lease of this epoch: only the first counts."""
        record = LeaseRecord(
            run_id=mark.run_id,
            fence=mark.fence,
            host=socket.gethostname(),
            host_queue=self.process.host_queue,
            workflow_run_id=activity.info().workflow_run_id or "",
        )
        key = RunKeys(mark.run_id).lease(mark.fence.epoch)
        return self.store.put_if_absent(key, record.model_dump_json().encode())


def mark_of(run_id: JobsOf, epoch: int) -> LeaseMark:
    """Return the mark of the lease that the current activity holds."""
    return LeaseMark(run_id=run_id, fence=Fence(epoch=epoch, attempt=activity.info().attempt))


def _wait_for_others(worker: WorkerProcess) -> None:
    """Wait until the worker serves no lease, since the device has no room for another worker."""
    while worker.leases and not host_is_leaving():
        time.sleep(_POLL_S)


def _is_up(worker: WorkerProcess, timeout_s: float) -> bool:
    """Wait for the worker; False when the lease ended first."""
    deadline = time.monotonic() + timeout_s
    while not (worker.is_ready() and (worker.meeting is None or worker.meeting.is_whole)):
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
    if worker.loses_its_host():
        raise HostLeft(HOST_LEAVES)
    if is_cancelled():
        return False
    if not worker.is_alive():
        raise _loss(worker)
    if worker.meeting is not None and worker.meeting.broken:
        worker.end()
        raise LeaseLost(f"another machine of this worker is lost: {worker.meeting.broken}")
    return True


def _loss(worker: WorkerProcess) -> LongshoreError:
    if isinstance(worker.key, SamplerKey) and worker.exit_code == _UNUSABLE_MODEL:
        said = last_words(log_tail(worker.paths.output))
        return InvalidInput(f"the sampler cannot use this model: {said}", worker.key.model.uri)
    if worker.meeting is not None and worker.meeting.has_met and 0 <= (worker.exit_code or 0) <= _SIGNALLED:
        # A rank ends by itself when it can no longer reach another machine's, which is not this host's fault.
        return LeaseLost(worker.death_report())
    return WorkerLost(worker.death_report())
