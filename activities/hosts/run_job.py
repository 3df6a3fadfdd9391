"""Runs a job on a leased worker: writes the job file, follows the log, reports progress, and uploads the results."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, Self

from temporalio import activity
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError

from activities.heartbeats import HOST_LEAVES, host_is_leaving, is_cancelled, on_thread
from activities.hosts.health import HostHealth
from activities.hosts.lease import JobStaging, Signals, Stager
from activities.hosts.session import carry_results
from activities.hosts.workers import WorkerPool, WorkerProcess, log_tail
from activities.records import damage, find_newest, newest_first, prune_checkpoints, saved_by_job
from activities.telemetry import JobSeen
from longshore import events
from longshore.fields import Fence, Frozen, added
from longshore.losses import Loss, is_policy_loss
from longshore.metrics import combined_by
from longshore.training import Lora, SyncOutcome, WeightSync
from longshore.views import CheckpointRef, Problem, ProfileRequest
from shared.errors import CorruptArtifact, DiskFull, HostLeft, StoreUnavailable, WorkerLost
from shared.jobs.job import AnyPlan, Job, LeaseGrant, LeaseMark, SyncAccess, SyncTarget, secret_of_run
from shared.runs.events import EventCursor, SessionResults, read_run_events
from shared.serving import sampler_of_questions, serving_id
from shared.settings import Settings
from shared.storage.artifacts import upload_artifact
from shared.storage.files import write_atomically, write_privately
from shared.storage.paths import HostPaths, RunKeys
from shared.storage.store import ObjectStore

# --- Progress of a job, reported to its workflow by signals ---
# With growing pauses, as the workflow's history must stay short.
#
# A train step of reinforcement learning is one job of several optimizer steps (epochs times mini-batches), and its
# metrics combine those of all of them. Any other job is the whole training of a run; its metrics are the newest step's.

Metrics = Mapping[str, float]

# A signal costs four events of a history that ends at 51,200: the pause grows with the job, to at most five minutes.
_SHORTEST_S = 2.0
_SHARE = 0.02
_LONGEST_S = 300.0


class JobMetrics:
    """Combines the metrics of a job's optimizer steps, which are given in order.

    Skipped steps are always counted. For a policy loss each metric is combined as longshore/metrics.py says, over the
    steps that have it. For any other loss, each metric is its newest value.
    """

    def __init__(self, loss: Loss, steps: Iterable[Metrics] = ()) -> None:
        self._is_train_step = is_policy_loss(loss)
        self._sums: dict[str, tuple[float, float]] = {}  # numerator and denominator of each value
        for metrics in steps:
            self.take(metrics)

    def take(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            before, weight = self._sums.get(name, (0.0, 0.0))
            match combined_by(name) if self._is_train_step or name == "skipped" else "last":
                case "last":
                    self._sums[name] = value, 1.0
                case "sum":
                    self._sums[name] = before + value, 1.0
                case "max":
                    self._sums[name] = max(before, value), 1.0
                case "mean":
                    self._sums[name] = before + value, weight + 1
                case "mean_of_tokens":
                    tokens = metrics["target_tokens"]
                    self._sums[name] = before + value * tokens, weight + tokens

    def combined(self) -> dict[str, float]:
        found = {name: value / weight for name, (value, weight) in self._sums.items()}
        if self._is_train_step and "tokens_per_s" in found:
            found["tokens_per_s"] = found["tokens"] / found["step_s"]
        return found


class ProgressReport(Frozen):
    """A report on a job, signalled to its workflow, which ignores reports of other fences than its current one.

    `held_s`: seconds that the lease has had of its worker's time so far. `num_steps`: not meaningful for a session.
    `evaluations`: those that the job has made so far, which took `evaluating_s` seconds.
    """

    fence: Fence
    step: int
    num_steps: int
    metrics: dict[str, float]
    checkpoint: CheckpointRef | None
    held_s: float = 0.0
    evaluations: int = 0
    evaluating_s: float = 0.0


class Progress:
    """The newest state of a job, and when its workflow heard of it last. Evaluation metrics are named `eval_...`.

    `steps_before`: metrics of the optimizer steps before this attempt.
    """

    def __init__(
        self,
        plan: AnyPlan,
        fence: Fence,
        steps_before: Iterable[Metrics],
        signals: Signals,
        held_s: Callable[[], float],
    ) -> None:
        self.step = 0
        self._training = JobMetrics(plan.step_loss, steps_before)
        self._evaluation: dict[str, float] = {}
        self._evaluations, self._evaluating_s, self._last_event_at = 0, 0.0, 0.0
        self._fence = fence
        self._num_steps = plan.last_step or 0
        self._signals = signals
        self._held_s = held_s
        self._begun_at = time.monotonic()
        self._told_at: float | None = None
        self._told: ProgressReport | None = None
        self._sending: Future[bool] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return self._training.combined() | self._evaluation

    def take(self, event: events.Event) -> None:
        match event:
            case events.Started(first_step=step):
                self.step = step
            case events.Step(step=step, metrics=metrics):
                self.step = step
                self._training.take(metrics)
            case events.Evaluated(metrics=metrics):
                self._evaluations += 1
                self._evaluating_s += event.time - self._last_event_at
                self._evaluation |= {n if n.startswith("eval_") else f"eval_{n}": value for n, value in metrics.items()}
        if not isinstance(event, events.Evaluating):
            self._last_event_at = event.time

    def tick(self, durable: CheckpointRef | None) -> None:
        """Signal new progress if the last signal is long enough ago; the first step is signalled at once."""
        if (self.step == 0 and not self.metrics) or (self._sending is not None and not self._sending.done()):
            return
        now = time.monotonic()
        pause_s = min(_LONGEST_S, max(_SHORTEST_S, _SHARE * (now - self._begun_at)))
        if self._told_at is not None and now - self._told_at < pause_s:
            return
        report = ProgressReport(
            fence=self._fence,
            step=self.step,
            num_steps=self._num_steps,
            metrics=self.metrics,
            checkpoint=durable,
            evaluations=self._evaluations,
            evaluating_s=self._evaluating_s,
        )
        if report != self._told:
            sent = report.model_copy(update={"held_s": self._held_s()})
            self._sending = self._signals.send("progress", sent)
            self._told, self._told_at = report, now


# --- A host's part in its jobs' weight syncs: it gives workers their sync key and the addresses of samplers ---

_PAUSE_S = 1.0
_PATIENCE = timedelta(seconds=5)

Find = Callable[[AnyPlan], "Future[LeaseGrant | None]"]


class QuestionSamplers:
    """Finds the samplers that answer users' questions, by their serving workflows. Callers do not block."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self._client, self._loop, self._settings = client, loop, settings

    def __call__(self, plan: AnyPlan) -> "Future[LeaseGrant | None]":
        key = sampler_of_questions(self._settings, plan.model, plan.dtype)
        return asyncio.run_coroutine_threadsafe(self._find(serving_id(self._settings, key)), self._loop)

    async def _find(self, workflow_id: str) -> LeaseGrant | None:
        if not self._settings.serving.weight_sync:
            return None
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            up = await handle.query("samplers", result_type=list[LeaseGrant], rpc_timeout=_PATIENCE)
        except (RPCError, WorkflowQueryFailedError):  # nobody has asked this model, or nobody answers now
            return None
        return up[0] if up else None


@dataclass(frozen=True)
class TrainerSyncs:
    """This host's settings for its jobs' weight syncs.

    `key`: authenticates the installation's trainers to samplers. `root`: this host's folder. `find`: looks for the
    sampler that answers questions to the model that a plan trains.
    """

    key: bytes
    root: Path
    find: Find


class JobSyncs:
    """Writes a worker's access to samplers beside its job's log."""

    def __init__(self, host: TrainerSyncs, plan: AnyPlan, path: Path) -> None:
        self._host, self._plan, self._path = host, plan, path
        self._looking: Future[LeaseGrant | None] | None = None
        self._looked_at = 0.0
        self._is_told = self._is_over = False

    def begin(self) -> None:
        """Write the worker's access to samplers if the plan names any."""
        if (target := self._plan.sync_target) is not None:
            self._write(target, target.profile_path)
        self.look()

    def end(self) -> None:
        """Write no more: the job's folder is about to go."""
        self._is_over = True

    def look(self) -> None:
        """Look, without blocking, for the sampler that answers questions to the model of a session.

        The session's client usually samples from it. The worker sends it the next weights that it saves; if that
        fails, the sampler loads them from the store.
        """
        now = time.monotonic()
        is_looking = self._looking is not None and not self._looking.done()
        is_wanted = self._plan.client_samples and isinstance(self._plan.trainable, Lora)
        if is_wanted and not is_looking and now > self._looked_at + _PAUSE_S:
            self._looked_at, self._looking = now, self._host.find(self._plan)
            self._looking.add_done_callback(self._found)

    def _found(self, looking: "Future[LeaseGrant | None]") -> None:
        grant = None if looking.cancelled() else looking.result()
        target = None if grant is None else _target(grant)
        if (target is not None or self._is_told) and not self._is_over:
            self._is_told = True
            self._write(target)

    def _write(self, target: SyncTarget | None, profile_path: str | None = None) -> None:
        run_id, profile = self._plan.run_id, None
        if profile_path is not None:
            profile = HostPaths(self._host.root).profiles / run_id / profile_path
            with suppress(OSError):  # the sync says that its profile cannot be written
                profile.parent.mkdir(parents=True, exist_ok=True)
        has_address = target is not None and any(place.address is not None for place in target.places)
        access = SyncAccess(
            secret=secret_of_run(self._host.key, run_id).hex() if has_address else None,
            profile=str(profile) if profile is not None else None,
            target=target,
        )
        write_privately(self._path, access.model_dump_json().encode())


def _target(grant: LeaseGrant) -> SyncTarget | None:
    """Return where to send weights; None for a sampler that takes none, or that this machine cannot reach."""
    socket, address = grant.weights_socket, grant.weights_address
    if socket is None or (address is None and not os.access(socket, os.W_OK)):
        return None
    return SyncTarget(
        sockets=(socket,), addresses=(address,), version=0, backend="auto", bucket_bytes=WeightSync().bucket_bytes
    )


# --- Uploads of a job's results from the worker's disk into the store ---
# Its log, read line by line, and checkpoints.

_PATIENCE_S = 300.0
_UPLOAD_PAUSE_S = 2.0
_PROFILE_LOOK_S = 5.0
_PART_SHARE = 0.02


@dataclass(frozen=True)
class LogLine:
    """One event, and the bytes of its line (newline included)."""

    data: bytes
    event: events.Event


class LogReader:
    """Follows one job's log. `offset` counts the bytes read so far; a line without its newline waits for the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.seq = 0

    def read(self) -> list[LogLine]:
        """The whole lines that were appended since the last call.

        Raises ValueError: a line is not an event, or `seq` has a gap.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        return [self._line(line) for line in whole.splitlines(keepends=True)]

    def _line(self, data: bytes) -> LogLine:
        event = events.parse_event(data)
        if event.seq != self.seq + 1:
            raise ValueError(f"{self.path}: event {event.seq} follows event {self.seq}")
        self.seq = event.seq
        self.offset += len(data)
        return LogLine(data, event)


class Uploader:
    """Uploads a job's results in order, on its own thread, so that a slow store delays neither log nor cancellation.

    While the store is away for some minutes, the worker trains on. Leaving the `with` block waits for the call in
    progress, and drops uploads that `finish` did not wait for. `durable` is the newest checkpoint in the store.
    """

    def __init__(self, store: ObjectStore, job: Job, durable: CheckpointRef | None) -> None:
        self.durable = durable
        self._store = store
        self._job = job
        self._keys = RunKeys(job.plan.run_id)
        self._keep = job.plan.checkpointing.keep
        self._keep_states = job.plan.num_kept_states
        self._kept: set[int] = set()
        self._begun_at = time.monotonic()
        self._uploaded_at = 0.0
        self._lines: list[LogLine] = []
        self._parts: list[str] = []
        self._num_saved = 0
        self._away_since: float | None = None
        self._looked_at = 0.0
        self._asked: ProfileRequest | None = None
        self._pending: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def job(self) -> None:
        """Upload the job file, so that the job can be run again later, however it ends."""
        key = self._keys.job(self._job.plan.job_id, self._job.fence)
        self._begin(lambda: self._store.put_bytes(key, self._job.model_dump_json(indent=1).encode()))

    def checkpoint(self, saved: events.Saved) -> None:
        """Upload a checkpoint, after the log of the steps before it: a job that resumes from it needs their metrics."""
        self._part()
        self._num_saved += 1
        number = self._num_saved
        self._begin(lambda: self._checkpoint(saved, number))

    def keep(self, kept: events.Kept) -> None:
        """Mark the state of a step: its checkpoint is kept besides the newest."""
        self._kept.add(kept.step)
        self._begin(lambda: self._store.put_bytes(f"{self._keys.kept_states}{kept.step:08d}", b""))

    def line(self, line: LogLine, at_once: bool) -> None:
        """Take a line of the log, to be uploaded at once or with the next piece."""
        self._lines.append(line)
        if at_once:
            self._part()

    def tick(self) -> None:
        """Upload a piece of the log if it is time, every second at first and every 30 s in a long job.

        Raises StoreUnavailable: something could not be uploaded, and waiting did not help.
        """
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        if time.monotonic() - self._looked_at > _PROFILE_LOOK_S:
            self._looked_at = time.monotonic()
            self._begin(self._profile)
        age_s = time.monotonic() - self._begun_at
        if time.monotonic() - self._uploaded_at > min(30.0, max(1.0, _PART_SHARE * age_s)):
            self._part()

    def finish(self, output: Path | None) -> None:
        """Upload the whole log, which replaces its pieces, and the end of `output`, if given; wait for all uploads."""
        if self._asked is not None:
            self._begin(self._profile)
        self._begin(lambda: self._whole_log(output))
        for future in self._pending:
            future.result()
        self._pending.clear()

    def _begin(self, step: Callable[[], bool | None]) -> None:
        self._pending.append(self._thread.submit(self._with_retries, step))

    def _part(self) -> None:
        self._uploaded_at = time.monotonic()
        if not self._lines:
            return
        key = self._keys.log_part(self._job.plan.job_id, self._job.fence, self._lines[0].event.seq)
        data = b"".join(line.data for line in self._lines)
        self._lines.clear()
        self._parts.append(key)
        self._begin(lambda: self._store.put_bytes(key, data))

    def _checkpoint(self, saved: events.Saved, number: int) -> bool:
        """Upload a checkpoint, its manifest last; then delete the local copy, and prune older ones in the store.

        If `keep` newer ones are waiting already, delete it without uploading, unless a client asked for it: a slow
        store must not fill the disk.
        """
        folder = Path(saved.path)
        if self._num_saved - number >= self._keep and saved.step not in self._kept:
            shutil.rmtree(folder, ignore_errors=True)
            return False
        if self._job.commands_dir is not None:
            results = SessionResults(self._store, self._job.plan.run_id)
            carry_results(results, Path(self._job.commands_dir), saved.step)
        artifact = upload_artifact(self._store, self._keys.checkpoint(self._job.fence, saved.step), folder)
        if artifact.sha256 != saved.manifest_sha256:
            raise CorruptArtifact("the checkpoint's manifest is not the one that the worker announced", artifact.uri)
        self.durable = CheckpointRef(step=saved.step, fence=self._job.fence, artifact=artifact)
        shutil.rmtree(folder, ignore_errors=True)
        prune_checkpoints(self._store, self._job.plan.run_id, self._keep, self._job.fence, self._keep_states)
        return True

    def _profile(self) -> bool:
        """Pass a request for a trace of steps to the worker, and its trace to the store. False: nothing was written.

        A job that ends before the worker has begun leaves the request to the run's next job.
        """
        log = self._job.log_path
        if self._asked is None:
            if self._store.head(self._keys.profile_request) is not None:
                self._asked = ProfileRequest.model_validate_json(self._store.get_bytes(self._keys.profile_request))
                write_atomically(ProfileRequest.path(log), self._asked.model_dump_json().encode())
        elif (trace := self._asked.trace(log)).exists():
            key = self._keys.profile(self._job.plan.job_id, self._job.fence, self._asked.profile_id)
            self._store.put_file(key, trace)
            self._store.delete(self._keys.profile_request)
            trace.unlink()
            self._asked = None
            return True
        return False

    def _whole_log(self, output: Path | None) -> None:
        job_id, fence = self._job.plan.job_id, self._job.fence
        log = Path(self._job.log_path)
        if log.exists():
            data = log.read_bytes()
            self._store.put_bytes(self._keys.log(job_id, fence), data[: data.rfind(b"\n") + 1])
            for key in self._parts:
                self._store.delete(key)
        if output is not None:
            self._store.put_bytes(self._keys.output(job_id, fence), log_tail(output).encode())

    def _with_retries(self, step: Callable[[], bool | None]) -> None:
        """Repeat a step until it is done, or the store has been away for `_PATIENCE_S`, counted over all steps.

        A step that returns False has put nothing there, so it does not count as a sign that the store is back.
        """
        while True:
            try:
                if step() is not False:
                    self._away_since = None
                return
            except DiskFull:
                raise
            except StoreUnavailable:
                self._away_since = self._away_since or time.monotonic()
                if time.monotonic() - self._away_since > _PATIENCE_S:
                    raise
            time.sleep(_UPLOAD_PAUSE_S)


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
    """The end of a job. `checkpoint` is the newest one in the store: this job's, or the one it started from; if the job
    keeps the best, that of its `best` evaluation.

    `metrics` combine those of all its optimizer steps (`JobMetrics`) and of its newest evaluation; `probe` are the
    log-probabilities of `JobPlan.probe` except its first token, by the weights of the last step. `sync`: the outcome of
    sending these to samplers, if the plan asked for it. `damaged`: what is wrong with the checkpoint that the job
    should continue from, if that made it fail. `held_s`: seconds of its worker's time that the lease has used so far.
    `awaits_grades`: as `Succeeded` says.
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
    best: events.Best | None = None
    awaits_grades: bool = added(False)


@dataclass(frozen=True)
class RunJob:
    """Does jobs on the workers of this host.

    `drain_grace_s`: the time that a job has to save a checkpoint once this host leaves. `told`: called with each event
    of a job, in order.
    """

    pool: WorkerPool
    store: ObjectStore
    stager: Stager
    signals: Signals
    syncs: TrainerSyncs | None = None
    health: HostHealth | None = None
    drain_grace_s: float = 0.0
    told: Callable[[events.Event], object] = lambda _: None

    @on_thread("run_job")
    def run_job(self, request: RunJobRequest) -> JobResult:
        """Run a job to its terminal event. A cancelled activity answers too, with the checkpoint that the worker left.

        Raises:
            WorkerLost: the worker ended or was stopped without a terminal event, or this host leaves.
            StoreUnavailable: the results could not be uploaded into the store.
        """
        lease = LeaseMark(run_id=request.plan.run_id, fence=request.fence)
        with self.pool.using(request.worker_id, lease) as worker:
            # Looked up while this lease holds: hosts of older leases no longer delete checkpoints.
            newest = find_newest(self.store, request.plan.run_id, request.passed_over).checkpoint
            attempt = _Attempt(self, worker, request, lease, saved_by_job(request.plan, newest))
            try:
                with attempt.uploader:
                    result = attempt.run()
            finally:
                attempt.seen.end()
            self._judge(attempt, result)
            if attempt.is_drained and result.outcome == "cancelled":
                details = activity.cancellation_details()
                if details is None or not details.cancel_requested:  # the run's workflow has not asked for its end
                    raise HostLeft(HOST_LEAVES)
            return result

    def _judge(self, attempt: "_Attempt", result: JobResult) -> None:
        """Tell this host's health how the job went.

        Raises WorkerLost: this host's disk is full, and there are other hosts.
        """
        problem, health = result.problem, self.health
        if health is None:
            return
        if attempt.has_worked:
            health.worked()
        if problem is not None and (
            problem.kind == "disk_full" or (problem.kind == "error" and not attempt.has_worked)
        ):
            attempt.worker.is_suspect = True
            health.lost(None, at_start=not attempt.has_worked)
            if problem.kind == "disk_full" and health.has_others():
                raise WorkerLost(problem.message)


class _Attempt:
    """One job on one worker."""

    def __init__(
        self, host: RunJob, worker: WorkerProcess, request: RunJobRequest, lease: LeaseMark, start: CheckpointRef | None
    ) -> None:
        plan, paths = request.plan, worker.paths
        self.host, self.worker, self.request, self.start = host, worker, request, start
        self.held_s = partial(worker.held_s, lease)
        self.job = Job(
            plan=plan,
            fence=request.fence,
            **Job.places(paths, plan, request.fence),
            start=start.artifact if start else None,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
        )
        self.reader = LogReader(Path(self.job.log_path))
        self.uploader = Uploader(host.store, self.job, start)
        self.staging = JobStaging(host.stager, self.job, host.store)
        steps_before = _steps_before(host.store, plan, start)
        self.progress = Progress(plan, request.fence, steps_before, host.signals, self.held_s)
        self.has_worked = self.is_drained = False
        self.probe: tuple[float, ...] = ()
        self.sync: SyncOutcome | None = None
        path = SyncAccess.path(self.job.log_path)
        self.syncs = JobSyncs(host.syncs, plan, path) if host.syncs is not None else None
        self.cancel = paths.cancel(plan.run_id, plan.job_id, request.fence)
        self.kill_at: float | None = None
        self.heard_at = time.monotonic()
        self.seen = JobSeen(plan, request.fence, time.time())

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
        self._settle(None if isinstance(terminal, events.Succeeded) else self.worker.paths.output)
        return self._result(terminal)

    def _leave_worker(self) -> None:
        """End the worker; if it serves other runs, too, cancel only the job, and end the worker if it does not obey."""
        if len(self.worker.leases) > 1 and not host_is_leaving():
            give_up_at = time.monotonic() + self.request.cancel_grace_s
            with suppress(OSError, ValueError):
                write_atomically(self.cancel, b"")
                while self.worker.is_alive() and time.monotonic() < give_up_at:
                    if any(isinstance(line.event, events.Terminal) for line in self.reader.read()):
                        return
                    time.sleep(_POLL_S)
        self.worker.end()

    def _follow(self) -> events.Terminal | None:
        """Read events until the terminal one; None when a cancelled worker overran its grace and was ended."""
        while True:
            was_alive = self.worker.is_alive()  # before the log is read, not to miss a dead worker's last events
            for line in self.reader.read():
                self._take(line)
                if isinstance(line.event, events.Terminal):
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
            if time.monotonic() - self.heard_at >= _SILENCE_S:
                self.heard_at = time.monotonic()
                if self.worker.is_stopped():
                    raise WorkerLost(f"the worker was stopped (SIGSTOP), and silent for {_SILENCE_S:g} s")
            time.sleep(_POLL_S)

    def _take(self, line: LogLine) -> None:
        event = line.event
        self.heard_at = time.monotonic()
        if isinstance(event, events.Saved):
            self.uploader.checkpoint(event)
        if isinstance(event, events.Kept):
            self.uploader.keep(event)
        if isinstance(event, events.Probed):
            self.probe = event.logprobs
        if isinstance(event, events.Offloaded):
            self.worker.offloaded_bytes = event.host_bytes
        if isinstance(event, events.Synced):
            self.sync = event.outcome
        if isinstance(event, events.Step | events.Applied):
            self.has_worked = self.worker.has_worked = True
        if isinstance(event, events.Step) and self.syncs is not None:
            self.syncs.look()
        # After a terminal event the whole log is uploaded at once.
        waits = isinstance(event, events.Step | events.Applied | events.Kept | events.Terminal)
        self.uploader.line(line, at_once=not waits)
        self.progress.take(event)
        self.seen.take(event)
        self.host.told(event)

    def _obey(self) -> None:
        """Pass on to the worker that the job is cancelled, or that the host leaves: either way it saves a checkpoint
        after the step in hand, and is ended if it does not do so in time.
        """
        leaves, drain_grace_s = self.worker.loses_its_host(), self.host.drain_grace_s
        if leaves and not drain_grace_s:
            raise HostLeft(HOST_LEAVES)
        if not leaves and not is_cancelled():
            return
        if self.kill_at is None:
            self.is_drained = leaves
            self.kill_at = time.monotonic() + (drain_grace_s if leaves else self.request.cancel_grace_s)
            write_atomically(self.cancel, b"")
        elif time.monotonic() > self.kill_at:
            self.worker.end()

    def _settle(self, output: Path | None) -> None:
        """Upload everything that is left into the store, then delete the local files."""
        self.staging.end()
        if self.syncs is not None:
            self.syncs.end()
        self.uploader.finish(output)
        plan, fence = self.request.plan, self.request.fence
        shutil.rmtree(self.worker.paths.outputs(plan.run_id, plan.job_id, fence), ignore_errors=True)
        self.cancel.unlink(missing_ok=True)

    def _result(self, terminal: events.Terminal | None) -> JobResult:
        problem, damaged, checkpoint, metrics = None, None, self.uploader.durable, self.progress.metrics
        best = terminal.best if isinstance(terminal, events.Succeeded) else None
        if best is not None:  # the newest lease's checkpoint of it
            run_id = self.request.plan.run_id
            checkpoint = next((each for each in newest_first(self.host.store, run_id) if each.step == best.step), None)
            if checkpoint is None:
                raise CorruptArtifact(f"the checkpoint of the best evaluation, of step {best.step}, is gone", run_id)
            metrics |= {"best_step": float(best.step), f"best_{best.metric}": best.value}
        match terminal:
            case events.Succeeded(step=step):
                outcome: Literal["succeeded", "failed", "cancelled"] = "succeeded"
            case events.Failed(step=step, kind=kind, message=message):
                outcome, problem = "failed", Problem(kind=kind, message=message)
                if kind == "corrupt_artifact" and self.start is not None:
                    damaged = damage(self.host.store, self.request.plan.run_id, self.start)
            case events.Cancelled(step=step):
                outcome = "cancelled"
            case None:
                outcome, step = "cancelled", self.progress.step
        return JobResult(
            outcome=outcome,
            step=step,
            checkpoint=checkpoint,
            metrics=metrics,
            problem=problem,
            probe=self.probe,
            sync=self.sync,
            damaged=damaged,
            held_s=self.held_s(),
            best=best,
            awaits_grades=isinstance(terminal, events.Succeeded) and terminal.awaits_grades,
        )


def _steps_before(store: ObjectStore, plan: AnyPlan, start: CheckpointRef | None) -> list[Metrics]:
    """Return the metrics of a train step's optimizer steps up to the checkpoint that it continues from.

    They are read from the logs of earlier attempts, which are uploaded before their checkpoints. Other jobs get none,
    since their metrics are those of the newest step.
    """
    if start is None or not is_policy_loss(plan.step_loss):
        return []
    found, _ = read_run_events(store, plan.run_id, EventCursor(job_id=plan.job_id))
    ours = (item.event for item in found if item.job_id == plan.job_id)
    steps = {event.step: event.metrics for event in ours if isinstance(event, events.Step) and event.step <= start.step}
    return [steps[step] for step in sorted(steps)]
