"""Runs in the caller's process, without Temporal, a service or a database: `pip install longshore[server]`
(docs/local.md).

A process that imports this has Longshore's packages `shared`, `activities` and `workflows`, and no others of these
names. A run on a dataset has the order of its workflow; only the loop of an RL run is written here once more. All below
is what a service runs: the requests of `workflows`, the activities' functions, job files and workers.
"""

import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from longshore.accounts import QuotaSettings, Room
from longshore.dataset_runs import (
    DatasetRun,
    DistillRun,
    DPORun,
    RewardRun,
    SFTRun,
)
from longshore.events import Evaluated, Event, Step
from longshore.fields import Artifact, Fence, Frozen
from longshore.grading import reward_graders
from longshore.runs import RLRun, RunRecord
from longshore.server import importable
from longshore.views import RunStatus, StepStatus

with importable("shared", "activities", "workflows"):
    from activities.grading.grade import Grade, GradeRequest, GradeSummary
    from activities.host_context import HostContext, locked
    from activities.hosts.lease import LeaseRecord, ProcessLease, Stager
    from activities.hosts.run_job import JobResult, RunJob, RunJobRequest
    from activities.hosts.workers import (
        WorkerCommand,
        WorkerPool,
        WorkerProcess,
        ranks_command,
        room_for_ranks,
        worker_environment,
    )
    from activities.records import (
        FindCheckpoint,
        FindCheckpointRequest,
        RunRecords,
        StepRecordRequest,
        policy_of,
    )
    from activities.sampling.sample import PolicySampleRequest, Sampled, SamplerActivities
    from activities.sampling.samplers import SamplerCommand, Samplers
    from activities.trajectories.group_samples import Drawn, GroupSamples
    from activities.trajectories.pack_trajectories import PackTrajectories
    from shared.errors import InvalidInput, NotFound, WorkerLost
    from shared.jobs.job import JobPlan, LeaseMark, ProcessKey, WorkerKey, check_ranks
    from shared.runs.acceptance import check_startable, precision_of
    from shared.runs.start import AnyStart, RLStart, RunStart, threads_per_rank, workflow_of
    from shared.serving import LeasedSampler
    from shared.settings import SamplingSettings, Settings
    from shared.storage.artifacts import read_record
    from shared.storage.host_states import is_bf16_fast, write_fast_bf16
    from shared.storage.paths import RunKeys, content_key
    from workflows import control, sft
    from workflows.outcomes import RunFailed, with_counts
    from workflows.policies import WORKER_READY_TIMEOUT_S
    from workflows.rl import prepared_state, publish_best, publish_last, recover_request
    from workflows.rollouts import requests as rollout_requests
    from workflows.training import job_plan, train_step

__all__ = ("InvalidInput", "RunFailed", "WorkerLost", "train")

T = TypeVar("T")
_running: ContextVar["_Local"] = ContextVar("running")
OnMetrics = Callable[[int, dict[str, float]], object]


def train(
    run: DatasetRun | RLRun, folder: Path | str, on_metrics: OnMetrics | None = None, threads: int | None = None
) -> RunStatus:
    """Train a run to its end and publish the result below a folder, as the same bytes that a service publishes.

    The same run and folder again: a run that was interrupted, even by SIGKILL, continues from its newest checkpoint
    and ends with the same bits; one that has ended is not trained again. Ranks and samplers are child processes, as
    they are a host's, and end with this process.

    Args:
        folder: holds the store and the caches. It may hold several runs, which share models and tokenized data.
        on_metrics: called with a step's number and metrics: after each optimizer step and evaluation (`eval_…`); of an
            RL run after each train step, and as step 0 with the evaluation before the first one. It is called
            again for steps that are repeated after a kill.
        threads: CPU threads of each rank, which decide the bits. If None, those that a service on this machine would
            use, or those that an interrupted run began with.

    Returns:
        The final status: `adapter` is the URI of the published adapter, or model.

    Raises:
        InvalidInput: names the field and the rule: an invalid request, or something that a local run cannot do.
        RunFailed: the training failed.
        WorkerLost: a child process was lost. The same call continues.
    """
    given = Settings()
    # A service's settings count, except for its store and sampler; the caller may read what its user may read.
    places = given.download.model_copy(update={"file_roots": (Path("/"),)})
    own = {"root": Path(folder).resolve(), "store_uri": None, "sampling": SamplingSettings(), "download": places}
    host = HostContext(given.model_copy(update=own))
    _check(run, host.settings)
    host.settings.root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(host.settings.root))
        except BlockingIOError as error:
            raise InvalidInput("another local run is using it: wait, or take another folder", str(folder)) from error
        record = _accept(run, host, threads)
        with suppress(NotFound):
            return read_record(host.store, RunKeys(record.run_id).result, RunStatus)
        _, start = workflow_of(record, host.settings, QuotaSettings(), Room())
        local = _Local(host, start, on_metrics or (lambda step, metrics: None), stack)
        stack.callback(_running.reset, _running.set(local))
        match start:
            case RunStart():
                _now(sft.DatasetTraining(start, local, local.only_job).train_and_publish())
                skipped = int(local.status.metrics.get("skipped", 0))
                local.show(notices=with_counts(local.status.notices, skipped_steps=skipped))
            case RLStart():
                _LocalRL(local, start).train()
        status = local.show(state="succeeded", phase="done", ended_at=time.time())
        RunRecords(host).record_result(status)
        return status


def _check(run: DatasetRun | RLRun, settings: Settings) -> None:
    """Refuse what a local run cannot do, and what a service refuses at submission. Raises InvalidInput."""
    if not isinstance(run, SFTRun | DPORun | DistillRun | RewardRun | RLRun):
        raise InvalidInput("a local run is one on a dataset, or an RL run that makes its own rollouts", "kind")
    refused = [("layout.nodes", run.layout.nodes > 1, "a local run is of one machine")]
    if not isinstance(run, RLRun):
        rule = "samplers are leased for a dataset run's held-out prompts, and a local run leases none"
        refused.append(("rollouts", run.rollouts is not None, rule))
    if isinstance(run, DistillRun):
        refused.append(("teacher_key", run.teacher_key is not None, "an installation has keys of teachers"))
    if isinstance(run, RLRun):
        refused.append(("rollouts", run.rollouts is None, "nobody sends groups to a local run: let it make its own"))
    if isinstance(run, RLRun) and (rollouts := run.rollouts) is not None:
        sync, by_store = rollouts.weight_sync, "a local run's sampler loads each version from the store"
        refused += [
            ("rollouts.sampler", rollouts.sampler != "own", "a local run starts Longshore's own sampler"),
            ("rollouts.sampler_url", rollouts.sampler_url is not None, "a local run starts a sampler of its own"),
            ("rollouts.samplers", rollouts.samplers > 1, "a local run has one sampler"),
            ("rollouts.colocate", rollouts.colocate, "a local run's sampler does not sleep"),
            ("rollouts.weight_sync.backend", sync.backend not in ("auto", "store"), f"{by_store}: auto or store"),
            ("rollouts.weight_sync.in_flight", sync.in_flight == "continue", "a local run samples, and then trains"),
            ("rollouts.carry_over", rollouts.carry_over, "a local run samples, and then trains: no prompt is late"),
            ("rollouts.weight_sync.profile_path", sync.profile_path is not None, f"{by_store}: nothing is sent"),
        ]
        rule = "a local run starts no sampler for a reward model"
        refused += [(f"rollouts.{place}", True, rule) for place in reward_graders(rollouts.grader)]
    for field_name, is_refused, rule in refused:
        if is_refused:
            raise InvalidInput(rule, field_name)
    check_startable(run, settings)
    check_ranks(run.layout, room_for_ranks(settings.max_ranks), why="(this machine)")


def _accept(run: DatasetRun | RLRun, host: HostContext, threads: int | None) -> RunRecord:
    """Return the record of a run, whose id is a hash of the request; the first call writes it.

    Raises InvalidInput: `threads` are not those that the run began with, or none.
    """
    run_id, settings = f"{run.kind}-{content_key(run)[:12]}", host.settings
    if threads is not None and threads < 1:
        raise InvalidInput("a rank has one at least", "threads")
    with suppress(NotFound):
        record = read_record(host.store, RunKeys(run_id).record, RunRecord)
        if threads not in (None, record.threads_per_rank):
            raise InvalidInput(f"the run began with {record.threads_per_rank}, which decide its bits", "threads")
        return record
    write_fast_bf16(host.store, settings.shape, is_bf16_fast())
    precision = precision_of(run.dtype, settings, host.store)
    record = RunRecord(
        run_id=run_id,
        run=run.model_copy(update={"dtype": precision.dtype}),
        created_at=time.time(),
        threads_per_rank=threads or threads_per_rank(run, settings),
        precision=precision,
    )
    host.store.put_bytes(RunKeys(run_id).record, record.model_dump_json(indent=1).encode())
    return record


def _outside(activity: Callable[..., Any], request: Any) -> Any:
    """Do an activity of a control host, a method of a class of a host's activities, for the run of this thread."""
    owner, _, name = activity.__qualname__.partition(".")
    activities = getattr(sys.modules[activity.__module__], owner)
    return getattr(activities(_running.get().host), name)(request)


control.outside = _outside


def _now(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a workflow to its end. It never waits, as its activities are done here."""
    try:
        steps.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("no activity of a local run waits")


class _NoWorkflow:
    """Takes the signals of activities, which no workflow waits for."""

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        sent: Future[bool] = Future()
        sent.set_result(True)
        return sent


@dataclass
class _Local:
    """What runs of both kinds need: the status, and child processes, which end with `stack`."""

    host: HostContext
    start: AnyStart
    on_metrics: OnMetrics
    stack: ExitStack
    room: Room = field(default_factory=Room)
    fence: Fence = field(init=False)
    status: RunStatus = field(init=False)
    _worker: tuple[RunJob, WorkerProcess] | None = None

    def __post_init__(self) -> None:
        start = self.start
        self.status = RunStatus(run_id=start.run_id, kind=start.run.kind, name=start.run.name or start.run_id)
        self.show(started_at=time.time(), policy_version=0 if start.run.kind == "rl" else None)

    def show(self, **changes: object) -> RunStatus:
        self.status = self.status.model_copy(update=changes)
        return self.status

    def add_notices(self, notices: tuple[str, ...]) -> None:
        self.show(notices=tuple(dict.fromkeys((*self.status.notices, *notices))))

    def begin(self) -> None:
        """Begin a lease: its fence keeps a process that an earlier call left behind from writing checkpoints."""
        run_id, store = self.start.run_id, self.host.store
        point = FindCheckpoint(self.host).find_checkpoint(FindCheckpointRequest(run_id=run_id))
        self.add_notices(tuple(f"{why}; the run goes on from an older one" for why in point.damaged))
        self.fence = Fence(epoch=point.last_epoch + 1)
        mark = {"run_id": run_id, "fence": self.fence}
        lease = LeaseRecord(**mark, host=socket.gethostname(), host_queue="", workflow_run_id="")
        store.put_bytes(RunKeys(run_id).lease(self.fence.epoch), lease.model_dump_json().encode())
        self.show(epoch=self.fence.epoch)

    def process(self, command: WorkerCommand, key: ProcessKey) -> tuple[WorkerPool, WorkerProcess]:
        """Start a worker or a sampler, and wait until it is up.

        Raises:
            WorkerLost: it ended, or did not come up in time. InvalidInput: a sampler cannot use the model.
        """
        mark = LeaseMark(run_id=self.start.run_id, fence=self.fence)
        pool = WorkerPool(self.host.paths, command, worker_environment(self.host.settings), idle_limit_s=0)
        self.stack.callback(pool.close)
        lease = ProcessLease(pool, _NoWorkflow(), host_queue="", signal="")
        process = self.stack.enter_context(lease.begin(key, mark, WORKER_READY_TIMEOUT_S))
        assert process is not None  # it is None if the lease's activity was cancelled
        return pool, process

    def do(self, plan: JobPlan) -> JobResult:
        """Do a job on the run's worker, which starts with the first one. Raises RunFailed, WorkerLost."""
        host, start = self.host, self.start
        if self._worker is None:
            pool, worker = self.process(ranks_command, WorkerKey.of(plan))
            stager = Stager(host.paths.cache, host.settings.s3)
            self._worker = RunJob(pool, host.store, stager, _NoWorkflow(), told=self._tell), worker
        run_job, worker = self._worker
        where = {"fence": self.fence, "worker_id": worker.worker_id, "cancel_grace_s": start.timing.cancel_grace_s}
        result = run_job.run_job(RunJobRequest(plan=plan, tenant=start.tenant, **where))
        if result.outcome != "succeeded":
            assert result.problem is not None  # nobody cancels a local run's job
            raise RunFailed(result.problem)
        return result

    async def only_job(self, plan: JobPlan) -> JobResult:
        """Do the one job of a run on a dataset."""
        self.begin()
        result = self.do(plan)
        self.show(step=result.step, metrics=result.metrics, checkpoint=result.checkpoint)
        return result

    def _tell(self, event: Event) -> None:
        if self.start.run.kind == "rl":
            return  # which tells whole train steps
        match event:
            case Step(step=step, metrics=metrics):
                self.on_metrics(step, metrics)
            case Evaluated(step=step, metrics=metrics):
                self.on_metrics(step, {n if n.startswith("eval_") else f"eval_{n}": v for n, v in metrics.items()})


# --- An RL run that makes its own rollouts: the order of workflows/rl.py, one thing after the other ---


class _LocalRL:
    """The steps of an RL run. Each is on record before the next begins, so that an interrupted run continues there."""

    def __init__(self, local: _Local, start: RLStart) -> None:
        self._local, self._start, self._host = local, start, local.host
        request = recover_request(start)
        self._num_policies = request.num_policies
        self._recovered = RunRecords(self._host).recover_steps(request)
        self._state = _now(prepared_state(local, start, self._recovered))
        assert self._state.rollouts is not None
        self._data, self._policies = self._state.rollouts, list(self._state.policies)
        local.begin()
        mark = {"run_id": start.run_id, "fence": local.fence}
        key = rollout_requests.sampler_key(start, self._state.model)
        pool, sampler = local.process(SamplerCommand(self._host), key)
        self._place = LeasedSampler(**mark, worker_id=sampler.worker_id)
        self._seconds: dict[str, float] = {}
        self._sampling = SamplerActivities(self._host, Samplers(self._host.settings, pool))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a `with` block to those of the step's phase."""
        began = time.monotonic()
        yield
        self._seconds[f"{phase}_seconds"] = self._seconds.get(f"{phase}_seconds", 0.0) + time.monotonic() - began

    def train(self) -> None:
        run, data, store = self._start.run, self._data, self._host.store
        number, is_over = self._recovered.last_step, False
        for recorded in range(1, number + 1):  # of an interrupted call, which may have come to the run's end
            step = read_record(store, RunKeys(self._start.run_id).step(recorded), StepStatus)
            self._local.show(**train_step.shown_after(self._local.status, run, step))
            is_over = rollout_requests.ends_with(run, step, self._state.evaluated)
        if number == 0 and data.evaluations:
            begun = StepStatus(step=0, key="rollouts-0", groups="", state="done", **self._evaluate())
            is_over = self._end(train_step.unchanged(self._state, begun))
        while number < data.num_steps and not is_over:
            number += 1
            is_over = self._end(self._train(number))
        if (done := _now(publish_last(self._local, self._start, self._state))) is not None:
            self._state = train_step.state_after(self._state, done)
        _now(publish_best(self._local, self._start, self._state, number))
        counts = self._local.status.model_dump(include={"skipped_steps", "equal_reward_steps", "zero_gradient_steps"})
        self._local.show(notices=with_counts(self._local.status.notices, **counts))

    def _end(self, step: StepStatus) -> bool:
        """Record a step, and tell its metrics. Returns True if the run ends with it."""
        run, state = self._start.run, self._state
        RunRecords(self._host).record_step(StepRecordRequest(run_id=self._start.run_id, step=step))
        if step.step > 0:
            state = state.model_copy(update={"evaluated": state.evaluated.after(step, run.held_out)})
            self._state = train_step.state_after(state, step) if step.state == "done" else state
            self._local.show(**train_step.shown_after(self._local.status, run, step))
        self._local.on_metrics(step.step, step.metrics)
        return rollout_requests.ends_with(run, step, self._state.evaluated)

    def _train(self, number: int) -> StepStatus:
        """Sample, grade, train and publish a step; then evaluate held-out prompts, if that is due."""
        run, data = self._start.run, self._data
        self._seconds = {}
        step = self._trained(self._grouped(number))
        step = step.model_copy(update={"metrics": step.metrics | self._seconds})
        before = self._policies[-1]
        made = policy_of(step) if step.state == "done" else before.model_copy(update={"after_step": number})
        self._policies = [*self._policies, made][-self._num_policies :]
        if not rollout_requests.is_evaluated(run, number, is_last=number == data.num_steps):
            return step
        began = time.monotonic()
        told = self._evaluate()
        return train_step.with_evaluation(step, told, evaluating_seconds=time.monotonic() - began)

    def _grouped(self, number: int) -> StepStatus:
        """Sample and grade a step's groups. Those of equal grades are sampled again, as often as the run allows."""
        start, run, state, drawn = self._start, self._start.run, self._state, list[Drawn]()
        again: tuple[int, ...] | None = None
        num_redrawn, played = 0, dict[str, float]()
        while again is None or again:
            about = start, state.model, self._data, self._policies, number, self._place
            samples = rollout_requests.step_samples(*about, job_plan.replayed_routes(run, state.shape), drawn, again)
            sampled, grades, _ = self._graded(samples)
            drawn.append(Drawn(completions=sampled.completions, grades=grades))
            played |= sampled.metrics
            wanted = rollout_requests.groups_request(run, drawn, number)
            grouped = GroupSamples(self._host).group_samples(wanted)
            again = grouped.equal_groups
            num_redrawn += len(again)
        redrawn = {"redrawn_groups": float(num_redrawn)} if rollout_requests.rollouts_of(run).redraws else {}
        metrics = grouped.metrics | played | redrawn
        told = {"metrics": metrics, "samples": {"train": sampled.samples.uri}}
        return StepStatus(step=number, key=f"rollouts-{number}", groups=grouped.groups_uri, **told)

    def _graded(self, samples: PolicySampleRequest) -> tuple[Sampled, Artifact, GradeSummary]:
        grader = rollout_requests.rollouts_of(self._start.run).grader
        with self._timed("sampling"):
            sampled = self._sampling.sample(samples)
        with self._timed("grading"):
            graded = Grade(self._host).grade(GradeRequest(samples=sampled.samples, grader=grader))
        return sampled, graded.grades, graded.summary

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate the newest policy on held-out prompts. Returns fields of a step's status."""
        policies, found = self._policies, {}
        sources = self._start.run.held_out.evaluations if self._start.run.held_out else {}
        for name, prompts in self._data.evaluations.items():
            about = self._start, self._state.model, prompts, policies, policies[-1], self._place, sources[name]
            sampled, _, summary = self._graded(rollout_requests.held_out_samples(*about))
            found[name] = sampled, summary
        return rollout_requests.held_out_fields(found)

    def _trained(self, step: StepStatus) -> StepStatus:
        """Train a step on its groups, publish it if that is due, and have the sampler prove that it has the policy."""
        start, state, host = self._start, self._state, self._host
        request = train_step.groups_request(start, state, step, self._local.status, Room())
        packed = PackTrajectories(host).pack_trajectories(request)
        metrics = step.metrics | packed.metrics
        if packed.data is None or packed.report_uri is None:
            return train_step.unchanged(state, step.model_copy(update={"state": "skipped", "metrics": metrics}))
        self._local.show(dataset_report=packed.report_uri)
        with self._timed("training"):
            result = self._local.do(job_plan.rl_job(start, state, step, packed.data, packed.num_steps))
        done = train_step.trained_step(state, step, result, metrics)
        with self._timed("publishing"):
            if train_step.is_due(start, state, done):
                about = start, state, done, packed.report_uri, packed.metrics | result.metrics
                done = _now(train_step.publish_policy(*about))
            asked = start, self._data, self._policies, policy_of(done), result.probe, self._place
            proved = self._sampling.prove_adapter(rollout_requests.proof(*asked))
        proof = {"probe_difference_max": proved.max_difference}
        return done.model_copy(update={"metrics": done.metrics | proof | result.metrics})
