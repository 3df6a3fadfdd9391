"""The Temporal workers of hosts: the activities of each role, their queues, and how many run at once."""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError
from temporalio import activity
from temporalio.client import Client
from temporalio.client import Interceptor as ClientInterceptor
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

from activities.host_context import HostContext
from activities.hosts.lease import Lease, Stager
from activities.hosts.progress import WorkflowSignals
from activities.hosts.run_job import QuestionSamplers, RunJob, TrainerSyncs
from activities.hosts.session import ApplyCommands, Bells
from activities.hosts.standing import Standing
from activities.hosts.workers import WorkerPool
from activities.sampling.samplers import LeaseSampler, Samplers
from longshore.fields import Frozen
from service.host_http.gangs import Gangs
from service.sealing import SealedRunner, Signer, sync_key
from shared.errors import LeaseLost
from shared.settings import Settings
from shared.storage.host_states import BEAT_S, HostAddress, told_file
from shared.storage.paths import HostPaths
from shared.storage.store import open_store
from workflows.policies import Pool, activity_name, pool_of, pool_queue

if TYPE_CHECKING:
    from activities.tracking.track import Track


# --- A GPU or sampler host polls for leases only while it is healthy (activities/hosts/standing.py) ---

_LOOK_S = 0.5
_EXAMINE_AGAIN_S = 60.0  # a host that lacks something
_log = logging.getLogger("longshore.host")


@dataclass(frozen=True)
class IdleExit:
    """The exit of a host that has had no lease for `after_s` seconds: `leave` is called once it has stopped polling."""

    after_s: float
    leave: Callable[[], object]


class LeasePolling:
    """Checks this host, and polls for leases while its health allows that. Used like a Worker.

    `make`: makes a worker of the lease queue, which is shut down if a worker process was lost. Another one is made
    after the host was checked again. `idle`: ends the host after a time without a lease. `begun`: called when it polls.
    """

    def __init__(
        self,
        standing: Standing,
        make: Callable[[], Worker],
        idle: IdleExit | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._standing = standing
        self._make = make
        self._idle = idle
        self._begun = begun
        self._group = asyncio.TaskGroup()  # an error of its tasks ends the host
        self._tasks: list[asyncio.Task[None]] = []
        self._doubted = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._standing.leave = lambda: loop.call_soon_threadsafe(self._doubted.set)
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._beat()), self._group.create_task(self._poll())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
        await asyncio.to_thread(self._standing.retire)
        await self._group.__aexit__(*error)  # type: ignore[arg-type]

    async def shutdown(self) -> None:
        """Ask for no more leases, and end the one in hand."""
        self._standing.is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.to_thread(self._standing.beat)
            await asyncio.sleep(BEAT_S)

    async def _poll(self) -> None:
        # A host that has passed its check recently takes leases at once, and is checked concurrently.
        is_beside = not self._standing.state.lacks
        while True:
            self._doubted.clear()
            if is_beside:
                self._tasks.append(self._group.create_task(asyncio.to_thread(self._standing.examine)))
            else:
                await asyncio.to_thread(self._standing.examine)
            is_beside = False
            again_at = time.monotonic() + _EXAMINE_AGAIN_S
            while not self._doubted.is_set() and not self._is_due(again_at):
                if self._standing.polls:
                    leaves = await self._ask(again_at)
                else:
                    await asyncio.sleep(_LOOK_S)
                    leaves = self._is_idle()
                if leaves and self._idle is not None:
                    _log.info("no lease for %g s: this host leaves", self._idle.after_s)
                    self._idle.leave()
                    return

    async def _ask(self, again_at: float) -> bool:
        """Poll until a worker was lost, or the host is idle. Returns True if the host is to leave.

        An idle host stops polling first. If Temporal still gives it a lease, it returns the lease at once without
        starting anything, and polls again.
        """
        async with self._make():
            self._begun()
            self._standing.asks()
            await self._until_left(again_at)
            num_offered, leaves = self._standing.num_offered, self._is_idle(close=True)
        self._standing.is_closing = False
        return leaves and self._standing.num_offered == num_offered

    def _is_idle(self, close: bool = False) -> bool:
        return self._idle is not None and self._standing.is_idle(self._idle.after_s, close)

    def _is_due(self, again_at: float) -> bool:
        return bool(self._standing.state.lacks) and time.monotonic() > again_at

    async def _until_left(self, again_at: float) -> None:
        """Wait until a worker was lost, or a host without a lease that lacks something is to be checked again."""
        while not self._is_idle() and not (
            self._standing.state.lacks
            and not self._standing.holds_lease
            and (self._is_due(again_at) or not self._standing.polls)
        ):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubted.wait(), _LOOK_S)
                return


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
_record_log = logging.getLogger(__name__)


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
            own_id = _own_id(folder / "id")
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
        return next if self._in_hand is None else _Noting(next, self._in_hand)


class _Noting(ActivityInboundInterceptor):
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
        _record_log.warning("failed an activity of a host that was killed")
    except (RPCError, TimeoutError) as error:  # usually it had been answered, and is not known any more
        _record_log.info("an activity of a host that was killed: %s", error)


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
            _record_log.warning("no record of what this host has in hand: %s cannot be locked: %s", folder, error)
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


def _own_id(path: Path) -> str:
    """Read the id at a path, or write a new one."""
    if path.exists() and (known := path.read_text().strip()):
        return known
    new = uuid.uuid4().hex
    path.write_text(new)
    return new


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
    "sampling": 32,
    "webhooks": 8,
    "tracking": 10_000,  # they hold no thread
}
# A step's samples, those sampled ahead, held-out ones and an adapter's proof share one sampler.
SAMPLING_THREADS = 4
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


def control_activities(host: HostContext, track: "Track") -> list[Callable[..., Any]]:
    """Return every activity that needs no accelerator. A gpu host loads none of their modules."""
    from activities.grading.ask_teacher import AskTeacher
    from activities.grading.grade import Grade
    from activities.models.resolve import Resolve
    from activities.packing import PackDataset
    from activities.publishing.export import Exports
    from activities.publishing.publish import Publish
    from activities.records.deliver import Deliver
    from activities.records.run_records import CommandRecords, FindCheckpoint, RunRecords
    from activities.retention import CollectGarbage
    from activities.sources.download import Download
    from activities.tokenizing.render_prompts import RenderPrompts
    from activities.tokenizing.tokenize import PreviewDataset, Tokenize
    from activities.trajectories.group_samples import GroupSamples
    from activities.trajectories.pack_trajectories import PackTrajectories

    records, resolve, grade, deliver = RunRecords(host), Resolve(host), Grade(host), Deliver(host)
    commands, publish = CommandRecords(host), Publish(host, Signer(host.settings).sign)
    return [
        *(records.record_result, records.begin, records.record_step, records.recover_steps),
        *(commands.record_command, commands.find_commands, commands.drop_commands, commands.fill_gap),
        *(FindCheckpoint(host).find_checkpoint, CollectGarbage(host).collect),
        AskTeacher(host).ask_teacher,
        *(publish.publish, publish.publish_best),
        Exports(host).export,
        *(resolve.resolve_model, resolve.resolve_adapter),
        Download(host).download,
        Tokenize(host).tokenize,
        PackDataset(host).pack,
        RenderPrompts(host).render_prompts,
        *(grade.check_grader, grade.grade, grade.grade_one),
        PackTrajectories(host).pack_trajectories,
        GroupSamples(host).group_samples,
        PreviewDataset(host).preview,
        *sampling_activities(host, Samplers(host.settings)),
        *(deliver.deliver, deliver.give_up),
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
        *(services.ExportWorkflow, services.GarbageWorkflow, services.TrackWorkflow),
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
    standing: Standing | None,
    bells: Bells,
    at: HostAddress,
    idle: IdleExit | None = None,
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
    allowed, grace_s = settings.experimental_transports, settings.drain_grace_s
    lease = Lease(pool, store, signals, host_queue, shares, allowed, standing, Gangs(settings), stager, grace_s)
    leases = _leases(standing, lambda: _worker(client, settings.lease_queue, threads, 1, [lease.lease]), settings, idle)
    syncs = TrainerSyncs(sync_key(settings), settings.root_path, QuestionSamplers(client, loop, settings))
    run_job = RunJob(pool, store, stager, signals, syncs, standing, grace_s).run_job
    jobs = run_job, ApplyCommands(pool, store, bells, at).apply_commands
    return leases, _worker(client, host_queue, threads, 1 + 2 * settings.runs_per_worker, jobs)


def sampler_workers(
    client: Client,
    settings: Settings,
    threads: ThreadPoolExecutor,
    pool: WorkerPool,
    at: HostAddress,
    host_queue: str,
    standing: Standing | None = None,
    idle: IdleExit | None = None,
) -> tuple[Worker | LeasePolling, Worker]:
    """Make the workers of a sampler host: one lease at a time on the shape's queue, rollouts on its own."""
    host = HostContext(settings)
    signals = WorkflowSignals(client, asyncio.get_running_loop())
    lease = LeaseSampler(pool, host, signals, host_queue, at, standing).lease_sampler
    leases = _leases(standing, lambda: _worker(client, settings.sampler_queue, threads, 1, [lease]), settings, idle)
    own = sampling_activities(host, Samplers(settings, pool))
    return leases, _worker(client, host_queue, threads, SAMPLING_THREADS, own)


def sampling_activities(host: HostContext, samplers: Samplers) -> list[Callable[..., Any]]:
    """Return the activities that ask samplers: a sampler host asks its own, a control host servers behind a URL."""
    from activities.sampling.sample import SamplerActivities
    from activities.sampling.score import ScoreSamples

    ask, score = SamplerActivities(host, samplers), ScoreSamples(host, samplers).score_samples
    return [ask.sample, ask.draw_share, ask.prove_adapter, ask.sleep_sampler, ask.wake_sampler, score]


def _leases(
    standing: Standing | None, make: Callable[[], Worker], settings: Settings, idle: IdleExit | None
) -> Worker | LeasePolling:
    if standing is None:
        return make()
    return LeasePolling(standing, make, idle, told_file(settings.root_path, "polls", standing.state.role).touch)


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
