"""Runs a job on a leased worker: writes the job file, follows the log, and uploads the results into the store."""

import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from temporalio import activity

from activities.host_context import HOST_LEAVES, beating, host_is_leaving
from activities.hosts.progress import Metrics, Progress, Signals
from activities.hosts.stager import JobStaging, Stager
from activities.hosts.standing import Standing
from activities.hosts.trainer_syncs import TrainerSyncs
from activities.hosts.uploader import LogLine, LogReader, Uploader
from activities.hosts.worker_pool import WorkerPool
from activities.hosts.worker_process import WorkerProcess
from activities.records.checkpoints import damage, find_newest, saved_by_job
from activities.telemetry import JobSeen
from longshore.fields import Frozen
from shared.errors import HostLeft, WorkerLost
from shared.fence import Fence
from shared.jobs.events import (
    Applied,
    Cancelled,
    Failed,
    Kept,
    Offloaded,
    Probed,
    Saved,
    Step,
    Succeeded,
    Synced,
    Terminal,
)
from shared.jobs.job import AnyPlan, Job
from shared.jobs.leases import LeaseMark
from shared.jobs.losses import is_policy_loss
from shared.jobs.weight_sync import SyncOutcome
from shared.runs.events import EventCursor, read_run_events
from shared.runs.status import CheckpointRef, Problem
from shared.storage.files import write_atomically
from shared.storage.store import ObjectStore

_POLL_S = 0.01
# After so long without an event the worker is checked for SIGSTOP. (A collective that hangs ends by torch's timeouts.)
_SILENCE_S = 120.0


class RunJobRequest(Frozen):
    """One job for a leased worker. It continues from the newest checkpoint in the store."""

    plan: AnyPlan
    fence: Fence
    worker_id: str
    cancel_grace_s: float
    passed_over: tuple[str, ...] = ()  # URIs of checkpoints that a worker found damaged
    tenant: str = ""
    tenant_weight: float = 1.0


class JobResult(Frozen):
    """The end of a job. `checkpoint` is the newest one in the store: this job's, or the one it started from.

    `metrics` combine those of all its optimizer steps (progress.py) and of its newest evaluation; `probe` are the
    log-probabilities of `JobPlan.probe` except its first token, by the weights of the last step. `sync`: the outcome of
    sending these to samplers, if the plan asked for it. `damaged`: what is wrong with the checkpoint that the job
    should continue from, if that made it fail. `held_s`: seconds of its worker's time that the lease has used so far.
    """

    outcome: Literal["succeeded", "failed", "cancelled"]
    step: int
    checkpoint: CheckpointRef | None
    metrics: dict[str, float]
    problem: Problem | None = None
    probe: tuple[float, ...] = ()
    sync: SyncOutcome | None = None
    damaged: str | None = None
    held_s: float = 0.0


class RunJob:
    """Does jobs on the workers of this host."""

    def __init__(
        self,
        pool: WorkerPool,
        store: ObjectStore,
        stager: Stager,
        signals: Signals,
        syncs: TrainerSyncs | None = None,
        standing: Standing | None = None,
        drain_grace_s: float = 0.0,
    ) -> None:
        """`drain_grace_s`: the time that a job has to save a checkpoint once this host leaves."""
        self._pool = pool
        self._store = store
        self._stager = stager
        self._signals = signals
        self._syncs = syncs
        self._standing = standing
        self._drain_grace_s = drain_grace_s

    @activity.defn(name="run_job", no_thread_cancel_exception=True)
    def run_job(self, request: RunJobRequest) -> JobResult:
        """Run a job to its terminal event. A cancelled activity answers too, with the checkpoint that the worker left.

        Raises:
            WorkerLost: the worker ended or was stopped without a terminal event, or this host leaves.
            StoreUnavailable: the results could not be uploaded into the store.
        """
        lease = LeaseMark(run_id=request.plan.run_id, fence=request.fence)
        with self._pool.using(request.worker_id, lease) as worker:
            # Looked up while this lease holds: hosts of older leases no longer delete checkpoints.
            newest = find_newest(self._store, request.plan.run_id, request.passed_over).checkpoint
            start = saved_by_job(request.plan, newest)
            attempt = _Attempt(worker, request, lease, start, self._store, self._stager, self._signals, self._syncs)
            attempt.drain_grace_s = self._drain_grace_s
            try:
                with beating(lambda: attempt.reader.offset), attempt.uploader:
                    result = attempt.run()
            finally:
                attempt.seen.end()
            self._judge(attempt, result)
            if attempt.is_drained and result.outcome == "cancelled" and not _was_cancelled():
                raise HostLeft(HOST_LEAVES)
            return result

    def _judge(self, attempt: "_Attempt", result: JobResult) -> None:
        """Tell this host's standing how the job went.

        Raises WorkerLost: this host's disk is full, and there are other hosts.
        """
        problem, standing = result.problem, self._standing
        if standing is None:
            return
        if attempt.has_worked:
            standing.worked()
        if problem is not None and (
            problem.kind == "disk_full" or (problem.kind == "error" and not attempt.has_worked)
        ):
            attempt.worker.is_suspect = True
            standing.lost(attempt.request.plan.run_id, None, at_start=not attempt.has_worked)
            if problem.kind == "disk_full" and standing.others_take_leases():
                raise WorkerLost(problem.message)


class _Attempt:
    """One job on one worker."""

    def __init__(
        self,
        worker: WorkerProcess,
        request: RunJobRequest,
        lease: LeaseMark,
        start: CheckpointRef | None,
        store: ObjectStore,
        stager: Stager,
        signals: Signals,
        syncs: TrainerSyncs | None,
    ) -> None:
        self.worker = worker
        self.request = request
        self.held_s = partial(worker.held_s, lease)
        self.store = store
        self.start = start
        self.outputs = worker.paths.outputs(request.plan.run_id, request.plan.job_id, request.fence)
        self.job = Job(
            plan=request.plan,
            fence=request.fence,
            **Job.places(worker.paths, request.plan, request.fence),
            start=start.artifact if start else None,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
        )
        self.reader = LogReader(Path(self.job.log_path))
        self.uploader = Uploader(store, self.job, start)
        self.staging = JobStaging(stager, self.job, store)
        self.progress = Progress(
            request.plan, request.fence, _steps_before(store, request.plan, start), signals, self.held_s
        )
        self.has_worked = False
        self.probe: tuple[float, ...] = ()
        self.sync: SyncOutcome | None = None
        self.syncs = syncs.of_job(request.plan, self.job.log_path) if syncs is not None else None
        self.cancel = worker.paths.cancel(request.plan.run_id, request.plan.job_id, request.fence)
        self.kill_at: float | None = None
        self.drain_grace_s, self.is_drained = 0.0, False
        self.heard_at = time.monotonic()
        self.seen = JobSeen(request.plan, request.fence, time.time())

    def run(self) -> JobResult:
        try:
            self.uploader.job()
            if self.syncs is not None:
                self.syncs.begin()
            path = self.worker.paths.job(self.request.plan.run_id, self.request.plan.job_id, self.request.fence)
            write_atomically(path, self.job.model_dump_json(indent=1).encode())
            terminal = self._follow()
        except BaseException:
            self._leave_worker()
            self._settle(self.worker.paths.output)
            raise
        self._settle(None if isinstance(terminal, Succeeded) else self.worker.paths.output)
        return self._result(terminal)

    def _leave_worker(self) -> None:
        """End the worker; if it serves other runs, too, cancel only the job, and end the worker if it does not obey."""
        if len(self.worker.leases) > 1 and not host_is_leaving():
            give_up_at = time.monotonic() + self.request.cancel_grace_s
            with suppress(OSError, ValueError):
                write_atomically(self.cancel, b"")
                while self.worker.is_alive() and time.monotonic() < give_up_at:
                    if any(isinstance(line.event, Terminal) for line in self.reader.read()):
                        return
                    time.sleep(_POLL_S)
        self.worker.end()

    def _follow(self) -> Terminal | None:
        """Read events until the terminal one; None when a cancelled worker overran its grace and was ended."""
        while True:
            was_alive = self.worker.is_alive()  # before the log is read, not to miss a dead worker's last events
            for line in self.reader.read():
                self._take(line)
                if isinstance(line.event, Terminal):
                    self.worker.holds_device = line.event.device == "held"
                    return line.event
            self.staging.look()
            self.uploader.tick()
            self.progress.tick(self.uploader.durable)
            if not was_alive:
                if self.kill_at is None:
                    raise WorkerLost(self.worker.death_report())
                return None
            self._obey()
            self._refuse_a_stopped_worker()
            time.sleep(_POLL_S)

    def _take(self, line: LogLine) -> None:
        event = line.event
        self.heard_at = time.monotonic()
        if isinstance(event, Saved):
            self.uploader.checkpoint(event)
        if isinstance(event, Kept):
            self.uploader.keep(event)
        if isinstance(event, Probed):
            self.probe = event.logprobs
        if isinstance(event, Offloaded):
            self.worker.offloaded_bytes = event.host_bytes
        if isinstance(event, Synced):
            self.sync = event.outcome
        if isinstance(event, Step | Applied):
            self.has_worked = self.worker.has_worked = True
        if isinstance(event, Step) and self.syncs is not None:
            self.syncs.look()
        # After a terminal event the whole log is uploaded at once.
        self.uploader.line(line, at_once=not isinstance(event, Step | Applied | Kept | Terminal))
        self.progress.take(event)
        self.seen.take(event)

    def _obey(self) -> None:
        """Pass on to the worker that the job is cancelled, or that the host leaves: either way it saves a checkpoint
        after the step in hand, and is ended if it does not do so in time.
        """
        leaves = self.worker.loses_its_host()
        if leaves and not self.drain_grace_s:
            raise HostLeft(HOST_LEAVES)
        if not leaves and not activity.is_cancelled():
            return
        if self.kill_at is None:
            self.is_drained = leaves
            self.kill_at = time.monotonic() + (self.drain_grace_s if leaves else self.request.cancel_grace_s)
            write_atomically(self.cancel, b"")
        elif time.monotonic() > self.kill_at:
            self.worker.end()

    def _refuse_a_stopped_worker(self) -> None:
        if time.monotonic() - self.heard_at < _SILENCE_S:
            return
        self.heard_at = time.monotonic()
        if self.worker.is_stopped():
            raise WorkerLost(f"the worker was stopped (SIGSTOP), and silent for {_SILENCE_S:g} s")

    def _settle(self, output: Path | None) -> None:
        """Upload everything that is left into the store, then delete the local files."""
        self.staging.end()
        if self.syncs is not None:
            self.syncs.end()
        self.uploader.finish(output)
        shutil.rmtree(self.outputs, ignore_errors=True)
        self.cancel.unlink(missing_ok=True)

    def _result(self, terminal: Terminal | None) -> JobResult:
        problem, damaged = None, None
        match terminal:
            case Succeeded(step=step):
                outcome: Literal["succeeded", "failed", "cancelled"] = "succeeded"
            case Failed(step=step, kind=kind, message=message):
                outcome, problem = "failed", Problem(kind=kind, message=message)
                if kind == "corrupt_artifact" and self.start is not None:
                    damaged = damage(self.store, self.request.plan.run_id, self.start)
            case Cancelled(step=step):
                outcome = "cancelled"
            case None:
                outcome, step = "cancelled", self.progress.step
        return JobResult(
            outcome=outcome,
            step=step,
            checkpoint=self.uploader.durable,
            metrics=self.progress.metrics,
            problem=problem,
            probe=self.probe,
            sync=self.sync,
            damaged=damaged,
            held_s=self.held_s(),
        )


def _was_cancelled() -> bool:
    """True if the run's workflow has asked for the job's end."""
    details = activity.cancellation_details()
    return details is not None and details.cancel_requested


def _steps_before(store: ObjectStore, plan: AnyPlan, start: CheckpointRef | None) -> list[Metrics]:
    """Return the metrics of a train step's optimizer steps up to the checkpoint that it continues from.

    They are read from the logs of earlier attempts, which are uploaded before their checkpoints. Other jobs get none,
    since their metrics are those of the newest step.
    """
    if start is None or not is_policy_loss(plan.step_loss):
        return []
    found, _ = read_run_events(store, plan.run_id, EventCursor(job_id=plan.job_id))
    ours = (item.event for item in found if item.job_id == plan.job_id)
    steps = {event.step: event.metrics for event in ours if isinstance(event, Step) and event.step <= start.step}
    return [steps[step] for step in sorted(steps)]
