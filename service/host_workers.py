"""The Temporal workers of hosts: the activities of each role, their queues, and how many run at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.client import Client
from temporalio.worker import Worker, WorkerDeploymentConfig, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxRestrictions

from activities.bells import Bells
from activities.host_context import HostContext
from activities.hosts.lease import Lease
from activities.hosts.progress import WorkflowSignals
from activities.hosts.run_job import RunJob
from activities.hosts.session import ApplyCommands
from activities.hosts.stager import Stager
from activities.hosts.standing import Standing
from activities.hosts.trainer_syncs import QuestionSamplers, TrainerSyncs
from activities.hosts.worker_pool import WorkerPool
from activities.sampling.lease_sampler import LeaseSampler
from activities.sampling.samplers import Samplers
from service.host_http.gangs import Gangs
from service.lease_polling import IdleExit, LeasePolling
from service.sealing.codec import SealedRunner
from service.sealing.keys import sync_key
from service.sealing.signing import Signer
from shared.settings import Settings
from shared.storage.host_states import HostAddress, told_file
from shared.storage.paths import HostPaths
from shared.storage.store import open_store
from workflows.policies import Pool, activity_name, pool_of, pool_queue

if TYPE_CHECKING:
    from activities.tracking.track import Track

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
    from activities.packing.pack import PackDataset
    from activities.publishing.export import Exports
    from activities.publishing.publish import Publish
    from activities.records.checkpoints import FindCheckpoint
    from activities.records.commands import CommandRecords
    from activities.records.deliver import Deliver
    from activities.records.run_records import RunRecords
    from activities.retention.collect import CollectGarbage
    from activities.sources.download import Download
    from activities.tokenizing.preview import PreviewDataset
    from activities.tokenizing.render_prompts import RenderPrompts
    from activities.tokenizing.tokenize import Tokenize
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
    from workflows.leases.gang_turns import GangTurnsWorkflow
    from workflows.leases.serving import ServingWorkflow
    from workflows.rl import RLWorkflow
    from workflows.services import single_activity, sweep
    from workflows.services.scheduled import ScheduledRunWorkflow
    from workflows.services.webhook import WebhookWorkflow
    from workflows.session import SessionWorkflow
    from workflows.sft import SFTWorkflow

    return [
        *(SFTWorkflow, RLWorkflow, SessionWorkflow, GangTurnsWorkflow),
        *(single_activity.PreviewWorkflow, single_activity.GraderWorkflow, single_activity.UntrainedModelWorkflow),
        *(single_activity.ExportWorkflow, single_activity.GarbageWorkflow, single_activity.TrackWorkflow),
        *(ScheduledRunWorkflow, sweep.SweepWorkflow, WebhookWorkflow, ServingWorkflow),
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
