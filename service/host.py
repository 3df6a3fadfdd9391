"""The Temporal poller: `python -P -m longshore.server service.host --role control|gpu|sampler`.

A control host runs workflows and everything that needs no accelerator. A gpu host leases its device: it polls the queue
of its shape, and a private queue for the jobs of the runs it serves. A sampler host does the same with a sampler.
`longshore dev` names all three roles, and one process serves them, which takes half the memory.
"""

import sys

if __name__ == "__main__":
    # A worker's imports take longer than the code below, and run in another process: do both at once.
    from activities.hosts.programs import prepare

    for role, program in {"gpu": "megatron_worker", "sampler": "megatron_worker.sampler"}.items():
        if role in sys.argv[1:] and "control" not in sys.argv[1:]:
            prepare([sys.executable, "-P", "-m", program])

import argparse
import asyncio
import ctypes
import errno
import fcntl
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import ValidationError
from temporalio import activity
from temporalio.client import Client
from temporalio.client import Interceptor as ClientInterceptor
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.converter import ActivitySerializationContext
from temporalio.service import RPCError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Worker,
    WorkerDeploymentConfig,
    WorkflowRunner,
)
from temporalio.worker import Interceptor as WorkerInterceptor
from temporalio.worker.workflow_sandbox import SandboxRestrictions

from activities.heartbeats import stop_if_cancelled
from activities.host_context import HostContext
from activities.hosts import programs
from activities.hosts.health import HostHealth, HostUnfit, health_of
from activities.hosts.lease import Lease, ProcessLease, Stager, WorkflowSignals
from activities.hosts.run_job import QuestionSamplers, RunJob, TrainerSyncs
from activities.hosts.session import ApplyCommands, ServedSessions
from activities.hosts.workers import (
    Sharing,
    WorkerCommand,
    WorkerPool,
    ranks_command,
    room_for_ranks,
    worker_environment,
)
from activities.sampling.questions import Questions
from activities.sampling.samplers import LeaseSampler, SamplerCommand, Samplers
from activities.sandbox import calls as confined
from activities.telemetry import HOST_START
from longshore.fields import Frozen
from service import temporal
from service.host_http.answers import announced, answering, session_routes
from service.host_http.connections import observed, serving
from service.host_http.gangs import Gangs
from service.sealing import SealedRunner, Signer, sync_key
from service.temporal import connect_temporal
from shared.errors import LeaseLost
from shared.jobs.job import SamplerKey, WorkerKey
from shared.log_lines import escape_output
from shared.programs import BUILD_VARIABLE
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.host_states import BEAT_S, HostAddress, told_file
from shared.storage.paths import HostPaths
from shared.storage.store import open_store
from shared.storage.stored_bytes import USE_WORKFLOW, UseRequest
from workflows.policies import MOST_DRAWN, Pool, activity_name, pool_of, pool_queue

if TYPE_CHECKING:
    from activities.tracking.track import Track


# --- A GPU or sampler host polls for leases until it is idle for long enough, or lacks something ---

_LOOK_S = 0.5
_REPLACED_S = 60.0
_log = logging.getLogger("longshore.host")


class LeasePolling:
    """Polls for leases, and checks this host after a worker was lost. Used like a Worker.

    `make`: makes a worker of the lease queue, which is shut down if a worker process was lost; another one is made
    after the host was checked and has rested. `leave`: called when it has stopped polling because it lacks something,
    or because it has had no lease for `idle_s` seconds. `begun`: called when it polls.
    """

    def __init__(
        self,
        health: HostHealth,
        make: Callable[[], Worker],
        leave: Callable[[], object] = lambda: None,
        idle_s: float | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._health = health
        self._make = make
        self._leave = leave
        self._idle_s = idle_s
        self._begun = begun
        self._group = asyncio.TaskGroup()  # an error of its tasks ends the host
        self._tasks: list[asyncio.Task[None]] = []
        self._doubted = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._health.leave = lambda: loop.call_soon_threadsafe(self._doubted.set)
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._beat()), self._group.create_task(self._poll())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
        await asyncio.to_thread(self._health.retire)
        await self._group.__aexit__(*error)  # type: ignore[arg-type]

    async def shutdown(self) -> None:
        """Ask for no more leases, and end the one in hand."""
        self._health.is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.to_thread(self._health.beat)
            await asyncio.sleep(BEAT_S)

    async def _poll(self) -> None:
        leaves = False
        while not leaves:
            try:
                await asyncio.to_thread(self._health.examine)
            except HostUnfit as error:
                _log.error("%s", error)
                if self._idle_s is not None:  # started on demand, perhaps by KEDA, which would replace it at once
                    await asyncio.sleep(_REPLACED_S)
                break
            self._doubted.clear()
            await asyncio.sleep(await asyncio.to_thread(self._health.rest_s))
            leaves = await self._ask()
        self._leave()

    async def _ask(self) -> bool:
        """Poll until a worker was lost, or the host is idle. Returns True if the host is to leave.

        An idle host stops polling first. If Temporal still gives it a lease, it returns the lease at once without
        starting anything, and polls again.
        """
        async with self._make():
            self._begun()
            self._health.asks()
            while not self._doubted.is_set() and not self._is_idle():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._doubted.wait(), _LOOK_S)
            num_offered, leaves = self._health.num_offered, self._is_idle(close=True)
        self._health.is_closing = False
        if leaves := leaves and self._health.num_offered == num_offered:
            _log.info("no lease for %g s: this host leaves", self._idle_s)
        return leaves

    def _is_idle(self, close: bool = False) -> bool:
        return self._idle_s is not None and self._health.is_idle(self._idle_s, close)


@asynccontextmanager
async def polling(*workers: Worker | LeasePolling) -> AsyncIterator[None]:
    """Poll with all workers, and stop all together, so that none takes a new lease of a run that another gives up."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        try:
            yield
        finally:
            await asyncio.gather(*(worker.shutdown() for worker in workers))


# --- Records a host's running activities in its root ---
# If it is killed, the next host there fails them at once.
#
# Temporal notices a dead host only by a missing heartbeat, and runs would wait for that. On the same machine it is
# noticed at once, as the kernel frees the locks of a process that ends. A host that was stopped, whose machine is
# gone, or whose root is on a file system without locks, is still noticed by missing heartbeats.

# An activity's result is sent after its end, and may wait for a server that is away, so its token is kept this long.
# Failing an activity whose result has arrived does no harm: the server does not know it any more.
_ANSWERED_S = 30.0
_TELL_S = 10.0
# Errors of file systems that have no locks, or whose lock server is away.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class _InHand(Frozen):
    """An activity that is executed. `token`: its task token in hexadecimal; its failure is sealed for the rest."""

    token: str
    workflow_id: str | None
    activity_type: str

    def context(self, namespace: str) -> ActivitySerializationContext:
        return ActivitySerializationContext(namespace, None, self.activity_type, None, self.workflow_id, None, False)


class HostRecord(ClientInterceptor, WorkerInterceptor):
    """The record of one host: `hosts/<machine>/<role>-<n>/` of its root, the first one that no running host has locked.

    Several machines may share a root on a network file system, whose locks may only work within a machine.

    As an interceptor of a client, it records the task token of every activity that the client's workers execute.
    `queue` is this host's own task queue, and was that of the host before it: the pool then refuses jobs that wait
    there for workers that are gone, instead of letting them wait for ever.
    """

    def __init__(self, hosts: Path, role: str) -> None:
        machine = socket.gethostname()
        self._lock: int | None = None
        self._in_hand: Path | None = None
        self._left: list[Path] = []
        own_id = uuid.uuid4().hex
        if (claimed := _claim(hosts / machine, role)) is not None:
            folder, self._lock = claimed
            self._in_hand = folder / "in_hand"
            self._in_hand.mkdir(exist_ok=True)
            self._left = list(self._in_hand.iterdir())
            if not (known := folder / "id").exists() or not known.read_text().strip():
                known.write_text(own_id)
            own_id = known.read_text().strip()
        # With this machine's name, since a root may be copied to another machine.
        self.queue = f"host-{machine}-{own_id}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the record of a host that leaves in good order: all of its activities were answered."""
        if self._in_hand is not None:
            for token in self._in_hand.iterdir():
                token.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    async def report_lost(self, client: Client) -> None:
        """Fail the activities of a host that was killed here, so that they are retried at once."""
        await asyncio.gather(*(_fail(client, told) for noted in self._left if (told := noted.read_bytes())))
        for noted in self._left:
            noted.unlink()
        self._left.clear()

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return next if self._in_hand is None else _TaskTokenRecorder(next, self._in_hand)


class _TaskTokenRecorder(ActivityInboundInterceptor):
    """Records an activity's task token while it runs, and for _ANSWERED_S seconds longer."""

    def __init__(self, next: ActivityInboundInterceptor, folder: Path) -> None:
        super().__init__(next)
        self._folder = folder

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        noted = self._folder / uuid.uuid4().hex
        with suppress(OSError):  # a full disk: then a missing heartbeat has to do
            info = activity.info()
            lost = _InHand(token=info.task_token.hex(), workflow_id=info.workflow_id, activity_type=info.activity_type)
            noted.write_text(lost.model_dump_json())
        try:
            return await super().execute_activity(input)
        finally:
            asyncio.get_running_loop().call_later(_ANSWERED_S, noted.unlink, True)


async def _fail(client: Client, told: bytes) -> None:
    try:
        lost = _InHand.model_validate_json(told)
    except ValidationError:  # half-written: a missing heartbeat has to do
        return
    try:
        handle = client.get_async_activity_handle(task_token=bytes.fromhex(lost.token))
        async with asyncio.timeout(_TELL_S):
            await handle.with_context(lost.context(client.namespace)).fail(LeaseLost("its host was killed"))
        _log.warning("failed an activity of a host that was killed")
    except (RPCError, TimeoutError) as error:  # usually it had been answered, and is not known any more
        _log.info("an activity of a host that was killed: %s", error)


def _claim(folders: Path, role: str) -> tuple[Path, int] | None:
    """Lock the first folder that no running host has locked. Returns None if nothing can be locked."""
    number = 0
    while True:
        folder = folders / f"{role}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return folder, _locked(folder / "lock")
        except BlockingIOError:
            number += 1
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("no record of what this host has in hand: %s cannot be locked: %s", folder, error)
            return None


def _locked(path: Path) -> int:
    """Lock a file until this process ends. Raises OSError: another process has locked it, or files cannot be locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# How many activities of each pool a control host does at once (workflows/policies.py says which those are); None is the
# pool of data, whose work mostly waits for others' servers, or works on all cores. docs/queues.md has the table.
_AT_ONCE: dict[Pool | None, int] = {
    None: 32,
    "records": 16,
    "publishing": 8,
    "exports": 2,  # each computes on a core
    "models": 16,
    "steps": 32,
    "looks": 16,
    "sampling": 64,
    "tracking": 10_000,  # they hold no thread
}
# A step's samples, those sampled ahead, held-out ones and an adapter's proof share one sampler.
SAMPLING_THREADS = 4 + MOST_DRAWN
_POLLS = 2  # requests that wait at Temporal for each queue; a new one is made when an activity has begun
# Workflows kept in memory (0.1 MB each), so that their histories are not replayed when they continue.
_CACHED_WORKFLOWS = 400
# Workflows run in Temporal's sandbox, but share modules: loading separate ones would cost a run 7 ms and 67 KB.
# tests/workflows/test_imports.py checks their imports instead.
_SANDBOX = SealedRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules("workflows"))
_SHUTDOWN_GRACE = timedelta(seconds=10)
# Workflow tasks of a control host that was killed go to another after this long, instead of Temporal's 10 s. A living
# host that is slower only has to read the run's history again.
_STICKY = timedelta(seconds=3)
# Else the SDK holds heartbeats, and so cancellations, back by 80 % of their timeout. Streamed answers beat more often.
_BEAT = timedelta(milliseconds=100)


def note_uses(client: Client, settings: Settings) -> Callable[[UseRequest], None]:
    """Return a function that has the web service note a use. It blocks its thread: as long as the service is away, or
    the unit is being deleted.
    """
    loop = asyncio.get_running_loop()

    def note(request: UseRequest) -> None:
        noting = client.execute_workflow(
            USE_WORKFLOW,
            request,
            id=request.workflow_id,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            task_queue=settings.control_queue,
        )
        future = asyncio.run_coroutine_threadsafe(noting, loop)
        try:
            while True:
                stop_if_cancelled()
                with suppress(TimeoutError):
                    return future.result(_LOOK_S)
        finally:
            future.cancel()

    return note


def control_activities(host: HostContext, track: "Track") -> list[Callable[..., Any]]:
    """Return every activity that needs no accelerator. A gpu host loads none of their modules."""
    from activities.grading.ask_teacher import AskTeacher
    from activities.grading.grade import Grade
    from activities.models.resolve import Resolve
    from activities.publishing.export import Exports
    from activities.publishing.publish import Publish
    from activities.records import CommandRecords, FindCheckpoint, RunRecords
    from activities.sampling.admit import AdmitGroups
    from activities.sampling.agents import CheckEnvironment
    from activities.sources.download import Download
    from activities.tokenizing.render_prompts import RenderPrompts
    from activities.tokenizing.tokenize import MixSources, PreviewDataset, Tokenize
    from activities.tokenizing.units import PackDataset
    from activities.trajectories.group_samples import GroupSamples
    from activities.trajectories.pack_trajectories import PackTrajectories

    records, resolve, grade, prompts = RunRecords(host), Resolve(host), Grade(host), RenderPrompts(host)
    commands, publish = CommandRecords(host), Publish(host, Signer(host.settings).sign)
    return [
        *(records.record_result, records.begin, records.record_step, records.recover_steps),
        *(commands.record_command, commands.find_commands, commands.drop_commands, commands.fill_gap),
        FindCheckpoint(host).find_checkpoint,
        AskTeacher(host).ask_teacher,
        *(publish.publish, publish.publish_best),
        Exports(host).export,
        *(resolve.resolve_model, resolve.resolve_adapter),
        Download(host).download,
        Tokenize(host).tokenize,
        MixSources(host).mix,
        PackDataset(host).pack,
        *(prompts.render_prompts, prompts.mix_prompts),
        *(grade.check_grader, grade.grade, grade.grade_one),
        CheckEnvironment(host).check_environment,
        PackTrajectories(host).pack_trajectories,
        AdmitGroups(host).admit_groups,
        GroupSamples(host).group_samples,
        PreviewDataset(host).preview,
        *sampling_activities(host, Samplers(host.settings)),
        track.track,
    ]


def control_workflows() -> list[type]:
    """Return the workflows of a control host. A gpu host loads none of their modules."""
    from workflows import services
    from workflows.leases import GangTurnsWorkflow, ServingWorkflow
    from workflows.rl import RLWorkflow
    from workflows.services import ScheduledRunWorkflow, WebhookWorkflow
    from workflows.session import SessionWorkflow
    from workflows.sft import SFTWorkflow

    return [
        *(SFTWorkflow, RLWorkflow, SessionWorkflow, GangTurnsWorkflow),
        *(services.PreviewWorkflow, services.GraderWorkflow, services.UntrainedModelWorkflow),
        *(services.ExportWorkflow, services.GarbageWorkflow, services.UseWorkflow, services.TrackWorkflow),
        *(ScheduledRunWorkflow, services.SweepWorkflow, WebhookWorkflow, ServingWorkflow),
    ]


@asynccontextmanager
async def control_workers(
    client: Client,
    queue: str,
    activities: Sequence[Callable[..., Any]],
    workflows: Sequence[type],
    runner: WorkflowRunner = _SANDBOX,
    build: WorkerDeploymentConfig | None = None,
) -> AsyncIterator[None]:
    """Poll a control queue and the queues of its pools. Each pool has its own threads, so that no activity delays
    one of another pool."""
    pools: dict[Pool | None, list[Callable[..., Any]]] = {None: []}
    for each in activities:
        pools.setdefault(pool_of(activity_name(each)), []).append(each)
    async with AsyncExitStack() as stack:
        for pool, members in pools.items():
            num_at_once = _AT_ONCE[pool]
            has_threads = pool != "tracking"  # whose activities are coroutines
            threads = stack.enter_context(ThreadPoolExecutor(num_at_once, pool or "data")) if has_threads else None
            named = pool_queue(pool, queue)
            own = workflows if pool is None else ()
            worker = _worker(client, named, threads, num_at_once, members, own, runner, build)
            await stack.enter_async_context(worker)
        yield


def gpu_workers(
    client: Client,
    settings: Settings,
    threads: ThreadPoolExecutor,
    pool: WorkerPool,
    host_queue: str,
    health: HostHealth | None,
    sessions: ServedSessions,
    at: HostAddress,
    leave: Callable[[], object] = lambda: None,
    idle_s: float | None = None,
) -> tuple[Worker | LeasePolling, Worker]:
    """Make the workers of a gpu host: one lease at a time on the shape's queue, jobs and joining leases on its own."""
    store = open_store(settings.store, settings.s3)
    loop = asyncio.get_running_loop()
    signals = WorkflowSignals(client, loop)

    @contextmanager
    def joining_leases(queue: str) -> Iterator[None]:
        # At most as many as there is room for: further leases wait in Temporal's queue, which is fair to tenants.
        joining = _worker(client, queue, threads, settings.runs_per_worker - 1, [lease.join_lease])
        running = asyncio.run_coroutine_threadsafe(joining.run(), loop)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(joining.shutdown(), loop).result()
            running.result()

    shares = joining_leases if settings.runs_per_worker > 1 else None
    stager = Stager(HostPaths(settings.root_path).cache, settings.s3)
    external, grace_s = settings.external_transport, settings.drain_grace_s
    process = ProcessLease(pool, signals, host_queue, "leased", health)
    lease = Lease(process, store, shares, external, Gangs(settings), stager, grace_s)
    make = partial(_worker, client, settings.lease_queue, threads, 1, [lease.lease])
    leases = _leases(health, make, settings, leave, idle_s)
    syncs = TrainerSyncs(sync_key(settings), settings.root_path, QuestionSamplers(client, loop, settings))
    run_job = RunJob(pool, store, stager, signals, syncs, health, grace_s).run_job
    jobs = run_job, ApplyCommands(pool, store, sessions, at).apply_commands
    return leases, _worker(client, host_queue, threads, 1 + 2 * settings.runs_per_worker, jobs)


def sampler_workers(
    client: Client,
    settings: Settings,
    threads: ThreadPoolExecutor,
    pool: WorkerPool,
    at: HostAddress,
    host_queue: str,
    health: HostHealth | None = None,
    leave: Callable[[], object] = lambda: None,
    idle_s: float | None = None,
) -> tuple[Worker | LeasePolling, Worker]:
    """Make the workers of a sampler host: one lease at a time on the shape's queue, rollouts on its own."""
    host = HostContext(settings, note_use=note_uses(client, settings))
    signals = WorkflowSignals(client, asyncio.get_running_loop())
    process = ProcessLease(pool, signals, host_queue, "sampler_leased", health)
    lease = LeaseSampler(process, host, at).lease_sampler
    make = partial(_worker, client, settings.sampler_queue, threads, 1, [lease])
    leases = _leases(health, make, settings, leave, idle_s)
    own = sampling_activities(host, Samplers(settings, pool))
    return leases, _worker(client, host_queue, threads, SAMPLING_THREADS, own)


def sampling_activities(host: HostContext, samplers: Samplers) -> list[Callable[..., Any]]:
    """Return the activities that ask samplers: a sampler host asks its own, a control host servers behind a URL."""
    from activities.sampling.sample import SamplerActivities, ScoreSamples

    ask, score = SamplerActivities(host, samplers), ScoreSamples(host, samplers).score_samples
    return [ask.sample, ask.draw_share, ask.prove_adapter, ask.sleep_sampler, ask.wake_sampler, score]


def _leases(
    health: HostHealth | None,
    make: Callable[[], Worker],
    settings: Settings,
    leave: Callable[[], object],
    idle_s: float | None,
) -> Worker | LeasePolling:
    if health is None:
        return make()
    begun = told_file(settings.root_path, "polls", health.state.role).touch
    return LeasePolling(health, make, leave, idle_s, begun)


def _worker(
    client: Client,
    queue: str,
    threads: ThreadPoolExecutor | None,
    num_at_once: int,
    activities: Sequence[Callable[..., Any]],
    workflows: Sequence[type] = (),
    runner: WorkflowRunner = _SANDBOX,
    build: WorkerDeploymentConfig | None = None,
) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        workflows=workflows,
        activities=activities,
        activity_executor=threads,
        workflow_runner=runner,
        max_cached_workflows=_CACHED_WORKFLOWS,
        sticky_queue_schedule_to_start_timeout=_STICKY,
        max_concurrent_activities=num_at_once,
        max_concurrent_activity_task_polls=_POLLS,
        max_heartbeat_throttle_interval=_BEAT,
        graceful_shutdown_timeout=_SHUTDOWN_GRACE,
        deployment_config=build,
    )


# --- A host's roles, and the program ---

Role = Literal["control", "gpu", "sampler"]

UNFIT_STATUS = 78
"""The exit status of a host that lacks something: what started it starts it again after a while."""
_UNFIT_S = 10.0  # until a role that lacks something is served again, beside others
_NOTICE_EVERY_S = 0.5
_M_ARENA_MAX, _MALLOC_ARENAS = -8, 2  # the first is malloc.h's


async def serve_host(
    role: Role,
    settings: Settings,
    stopped: asyncio.Event,
    command: WorkerCommand = ranks_command,
    check: Callable[[], tuple[str, ...]] | None = None,
    idle_s: float | None = None,
    run_begins: Callable[[], object] = lambda: None,
) -> None:
    """Poll until `stopped`, or a key is needed that is missing here; then end all activities and worker processes.

    Args:
        command: starts a gpu host's workers.
        check: returns what a gpu or sampler host lacks; by default the machine is probed.
        idle_s: a gpu or sampler host leaves by itself after this many seconds without a lease.
        run_begins: called by a control host when a run begins.

    Raises HostUnfit: the host has left because it lacks something.
    """
    health = None
    told_file(settings.root_path, "polls", role).unlink(missing_ok=True)
    async with AsyncExitStack() as stack:
        record = stack.enter_context(HostRecord(HostPaths(settings.root_path).hosts, role))
        client = await connect_temporal(settings, interceptors=[record], leave=stopped.set)
        if settings.drain_notice is not None:
            stack.callback(asyncio.create_task(_watch_drain_notice(settings.drain_notice, stopped)).cancel)
        await record.report_lost(client)
        host = HostContext(settings, run_begins, note_uses(client, settings))
        HOST_START.reached("host: connect")
        match role:
            case "control":
                await _poll_as_control(stack, host, client, record)
            case "gpu":
                threads = stack.enter_context(ThreadPoolExecutor(2 + 3 * settings.runs_per_worker))
                pool = await _pool(stack, settings, command, WorkerKey)
                health = await asyncio.to_thread(health_of, role, settings, record.queue, check)
                at = stack.enter_context(serving(settings, record.queue, session_routes(sessions := ServedSessions())))
                workers = gpu_workers(
                    client, settings, threads, pool, record.queue, health, sessions, at, stopped.set, idle_s
                )
                await stack.enter_async_context(polling(*workers))
            case "sampler":
                threads = stack.enter_context(ThreadPoolExecutor(2 + SAMPLING_THREADS))
                pool = await _pool(stack, settings, SamplerCommand(host, sync_key(settings)), SamplerKey)
                routes = stack.enter_context(answering(Questions(host, Samplers(settings, pool))))
                at = stack.enter_context(serving(settings, record.queue, routes))
                health = await asyncio.to_thread(health_of, role, settings, record.queue, check)
                workers = sampler_workers(
                    client, settings, threads, pool, at, record.queue, health, stopped.set, idle_s
                )
                await stack.enter_async_context(polling(*workers))
        _log.info("%s host polls %s at %s", role, settings.temporal_namespace, settings.temporal_address)
        await stopped.wait()
        _log.info("%s host leaves", role)
    if health is not None and health.state.lacks:
        raise HostUnfit("; ".join(health.state.lacks))


async def _poll_as_control(stack: AsyncExitStack, host: HostContext, client: Client, record: HostRecord) -> None:
    """Run workflows and activities until the stack ends."""
    from activities.tracking.track import Track

    settings = host.settings
    if settings.build_id is not None:  # wherever it is from: workflows read it as they are imported
        os.environ[BUILD_VARIABLE] = settings.build_id
    confined.prepare()
    track = Track(host)
    stack.callback(track.close)
    activities = control_activities(host, track)
    if settings.sampling.url is not None:
        routes = stack.enter_context(answering(Questions(host, Samplers(settings))))
        at = stack.enter_context(serving(settings, record.queue, routes))
        await stack.enter_async_context(announced(host.store, record.queue, at))
    build = temporal.deployment(settings)
    control = control_workers(client, settings.control_queue, activities, control_workflows(), build=build)
    await stack.enter_async_context(control)
    await temporal.begin_with(client, settings)
    told_file(settings.root_path, "polls", "control").touch()


async def _watch_drain_notice(notice: Path, stopped: asyncio.Event) -> None:
    """Set `stopped` once something is at the path of the settings' `drain_notice`."""
    while not stopped.is_set():
        if await asyncio.to_thread(os.path.exists, notice):  # False where it cannot be looked for
            _log.info("%s is there: this host leaves", notice)
            stopped.set()
        await asyncio.sleep(_NOTICE_EVERY_S)


async def _pool(
    stack: AsyncExitStack, settings: Settings, command: WorkerCommand, kind: type[WorkerKey | SamplerKey]
) -> WorkerPool:
    """Make the pool of this role's processes, all ended when the role ends, and idle ones before."""
    ranks, sharing = room_for_ranks(settings.max_ranks), Sharing(settings.runs_per_worker, settings.sharing_window_s)
    # In a thread, as it may start a sampler in place of one that a killed host left, and fetch its model.
    pool = await asyncio.to_thread(
        WorkerPool,
        HostPaths(settings.root_path),
        command,
        worker_environment(settings),
        settings.worker_idle_s,
        ranks,
        sharing,
        settings.warm_bytes,
        kind,
    )
    stack.callback(pool.close)
    # A task group, so that an error of the task ends the host: without it, idle workers would keep their device.
    tasks = await stack.enter_async_context(asyncio.TaskGroup())
    stack.callback(tasks.create_task(_end_idle_workers(pool)).cancel)
    return pool


async def _end_idle_workers(pool: WorkerPool) -> None:
    while True:
        await asyncio.to_thread(pool.end_idle)
        await asyncio.sleep(0.5)


async def serve_roles(roles: Sequence[Role], read: Callable[[], Settings], idle_s: float | None = None) -> None:
    """Serve all roles until SIGTERM, or until one of them leaves by itself. On SIGHUP, settings are read again, and the
    control role is served anew with them; leases and their runs continue.

    Among several roles, one that lacks something rests, and is then served again. Raises HostUnfit: the only one does.
    """
    is_shared = len(roles) > 1
    import_worker = partial(programs.prepare, [sys.executable, "-P", "-m", "megatron_worker"])
    stops = {role: asyncio.Event() for role in roles}
    leaving, is_renewed = asyncio.Event(), asyncio.Event()

    def leave() -> None:
        for each in (leaving, *stops.values()):
            each.set()

    def renew() -> None:
        is_renewed.set()
        stops["control"].set()

    async def serve(role: Role) -> None:
        while not leaving.is_set():
            try:
                begins = import_worker if is_shared else bool
                await serve_host(role, read(), stops[role], idle_s=idle_s, run_begins=begins)
            except HostUnfit as error:
                if not is_shared:
                    raise
                _log.error("the %s role rests: %s", role, error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), _UNFIT_S)
            else:
                if role != "control" or not is_renewed.is_set():
                    leave()  # whoever started this process starts it again: it needs a key, perhaps
                is_renewed.clear()
            if not leaving.is_set():
                stops[role].clear()

    loop = asyncio.get_running_loop()
    # As many threads for `to_thread` as processes of one role each have together: roles do not wait for each other's.
    loop.set_default_executor(ThreadPoolExecutor(len(roles) * min(32, (os.cpu_count() or 1) + 4)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    if "control" in roles:
        loop.add_signal_handler(signal.SIGHUP, renew)
    tasks = [serve(role) for role in roles]
    if not is_shared:
        await tasks[0]
        return
    import_worker()
    ending = asyncio.create_task(_end_unused_programs())
    try:
        await asyncio.gather(*tasks)
    finally:
        ending.cancel()


async def _end_unused_programs() -> None:
    while True:
        await asyncio.sleep(1)
        await asyncio.to_thread(programs.end_if_unused)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -P -m longshore.server service.host", description=__doc__)
    parser.add_argument("--role", choices=get_args(Role), required=True, action="append", help="may be repeated")
    parser.add_argument("--root", type=Path, help="local state of this machine")
    parser.add_argument(
        "--exit-when-idle", type=float, metavar="S", help="for a gpu or sampler host: end after S seconds without work"
    )
    given = parser.parse_args(arguments)
    HOST_START.begin()
    roles: list[Role] = list(dict.fromkeys(given.role))
    if given.exit_when_idle is not None and (roles not in (["gpu"], ["sampler"]) or given.exit_when_idle <= 0):
        parser.error("--exit-when-idle takes more than 0 seconds, and a gpu or sampler host")

    def read() -> Settings:
        return Settings(root=given.root) if given.root else Settings()

    settings = read()
    private_folder(settings.root_path)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # so that memory that one thread has freed is used by others
        libc.mallopt(_M_ARENA_MAX, _MALLOC_ARENAS)
    with observed(roles[0] if len(roles) == 1 else "host", settings):
        try:
            asyncio.run(serve_roles(roles, read, given.exit_when_idle))
        except HostUnfit as error:
            _log.error("this %s host lacks what it needs: %s", roles[0], error)
            return UNFIT_STATUS
    return 0


if __name__ == "__main__":
    escape_output()
    status = main()
    # Everything has ended in good order. The SDK's own threads may still touch Python, and an interpreter that is being
    # taken down under them aborts (seen with temporalio 1.35: one exit in six): so it is not taken down.
    logging.shutdown()
    os._exit(status)
