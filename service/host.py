"""The Temporal poller: `python -m service.host --role control|gpu|sampler`.

A control host runs workflows and all that needs no accelerator. A gpu host leases its device: it polls the queue of its
shape, and a queue of its own for the jobs of the runs it serves. A sampler host does the same with a sampler.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from temporalio.client import Client
from temporalio.worker import Worker, WorkerDeploymentConfig, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxRestrictions

from activities.bells import Bells
from activities.confined import calls as confined
from activities.host_context import HostContext
from activities.hosts.fitness import Check
from activities.hosts.lease import Lease
from activities.hosts.progress import WorkflowSignals
from activities.hosts.run_job import RunJob
from activities.hosts.session import ApplyCommands
from activities.hosts.stager import Stager
from activities.hosts.standing import Standing, standing_of
from activities.hosts.trainer_syncs import QuestionSamplers, TrainerSyncs
from activities.hosts.worker_pool import Sharing, WorkerPool, worker_environment
from activities.hosts.worker_process import WorkerCommand, ranks_command, room_for_ranks
from activities.sampling.lease_sampler import LeaseSampler, SamplerCommand
from activities.sampling.questions import Questions
from activities.sampling.samplers import Samplers
from service import builds
from service.host_http.answers import announced, answering
from service.host_http.bells import bell_routes
from service.host_http.metrics import observed
from service.host_http.server import serving
from service.host_record import HostRecord
from service.lease_polling import IdleExit, LeasePolling, polling
from service.sealing.codec import SealedRunner
from service.sealing.keys import sync_key
from service.sealing.signing import Signer
from service.temporal import connect_temporal
from shared.log_lines import escape_output
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.host_states import HostAddress, told_file
from shared.storage.paths import HostPaths
from shared.storage.store import open_store
from workflows.policies import Pool, activity_name, pool_of, pool_queue

if TYPE_CHECKING:
    from activities.tracking.track import Track

Role = Literal["control", "gpu", "sampler"]

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
_SAMPLING_THREADS = 4
_POLLS = 2  # requests that wait at Temporal for each queue; a new one is made when an activity has begun
# Workflows kept in memory (0.1 MB each), so that their histories are not replayed when they go on.
_CACHED_WORKFLOWS = 400
# Workflows run in Temporal's sandbox, but on modules that they share: loading its own anew takes a run 7 ms and 67 KB.
# What they may import is held by tests/workflows/test_imports.py instead.
_SANDBOX = SealedRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules("workflows"))
_M_ARENA_MAX, _MALLOC_ARENAS = -8, 2  # the first is malloc.h's
_SHUTDOWN_GRACE = timedelta(seconds=10)
# Workflow tasks of a control host that was killed go to another after this long, instead of Temporal's 10 s. A living
# host that is slower only has to read the run's history again.
_STICKY = timedelta(seconds=3)
# Else the SDK holds heartbeats, and so cancellations, back by 80 % of their timeout. Streamed answers beat more often.
_BEAT = timedelta(milliseconds=100)
_log = logging.getLogger("longshore.host")


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
    from workflows.leases.serving import ServingWorkflow
    from workflows.rl import RLWorkflow
    from workflows.services import single_activity, sweep
    from workflows.services.scheduled import ScheduledRunWorkflow
    from workflows.services.webhook import WebhookWorkflow
    from workflows.session import SessionWorkflow
    from workflows.sft import SFTWorkflow

    return [
        *(SFTWorkflow, RLWorkflow, SessionWorkflow),
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
    """Poll a control queue and the queues of its pools: each pool has threads of its own, so that no activity keeps one
    of another pool waiting."""
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
    lease = Lease(pool, store, signals, host_queue, shares, settings.experimental_transports, standing)
    leases = _leases(standing, lambda: _worker(client, settings.lease_queue, threads, 1, [lease.lease]), settings, idle)
    syncs = TrainerSyncs(sync_key(settings), settings.root_path, QuestionSamplers(client, loop, settings))
    stager = Stager(HostPaths(settings.root_path).cache, settings.s3)
    run_job = RunJob(pool, store, stager, signals, syncs, standing, settings.drain_grace_s).run_job
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
    return leases, _worker(client, host_queue, threads, _SAMPLING_THREADS, own)


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


async def serve_host(
    role: Role,
    settings: Settings,
    stopped: asyncio.Event,
    command: WorkerCommand = ranks_command,
    check: Check | None = None,
    idle_s: float | None = None,
) -> None:
    """Poll until `stopped`, or a key is needed that is missing here; then end all activities and worker processes.

    Args:
        command: starts a gpu host's workers.
        check: finds what a gpu or sampler host lacks; the machine is tried unless it is given.
        idle_s: seconds without a lease after which a gpu or sampler host leaves by itself.
    """
    host, idle = HostContext(settings), IdleExit(idle_s, stopped.set) if idle_s is not None else None
    told_file(settings.root_path, "polls", role).unlink(missing_ok=True)
    async with AsyncExitStack() as stack:
        record = stack.enter_context(HostRecord(HostPaths(settings.root_path).hosts, role))
        client = await connect_temporal(settings, interceptors=[record], leave=stopped.set)
        await record.report_lost(client)
        match role:
            case "control":
                from activities.tracking.track import Track

                confined.prepare()
                track = Track(host)
                stack.push_async_callback(track.close)
                activities = control_activities(host, track)
                if settings.sampling.url is not None:
                    routes = stack.enter_context(answering(Questions(host, Samplers(settings))))
                    at = stack.enter_context(serving(settings, record.queue, routes))
                    await stack.enter_async_context(announced(host.store, record.queue, at))
                build = builds.deployment(settings)
                control = control_workers(client, settings.control_queue, activities, control_workflows(), build=build)
                await stack.enter_async_context(control)
                await builds.begin_with(client, settings)
                told_file(settings.root_path, "polls", role).touch()
            case "gpu":
                threads = stack.enter_context(ThreadPoolExecutor(2 + 3 * settings.runs_per_worker))
                pool = await _pool(stack, settings, command)
                standing = await asyncio.to_thread(standing_of, role, settings, record.queue, check)
                at = stack.enter_context(serving(settings, record.queue, bell_routes(bells := Bells())))
                jobs = gpu_workers(client, settings, threads, pool, record.queue, standing, bells, at, idle)
                await stack.enter_async_context(polling(*jobs))
            case "sampler":
                threads = stack.enter_context(ThreadPoolExecutor(2 + _SAMPLING_THREADS))
                pool = await _pool(stack, settings, SamplerCommand(host, sync_key(settings)))
                routes = stack.enter_context(answering(Questions(host, Samplers(settings, pool))))
                at = stack.enter_context(serving(settings, record.queue, routes))
                standing = await asyncio.to_thread(standing_of, role, settings, record.queue, check)
                workers = sampler_workers(client, settings, threads, pool, at, record.queue, standing, idle)
                await stack.enter_async_context(polling(*workers))
        _log.info("%s host polls %s at %s", role, settings.temporal_namespace, settings.temporal_address)
        await stopped.wait()
        _log.info("%s host leaves", role)


async def _pool(stack: AsyncExitStack, settings: Settings, command: WorkerCommand) -> WorkerPool:
    """Make the pool of this host's processes, all ended when the host leaves, and idle ones before."""
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


async def _main(role: Role, settings: Settings, idle_s: float | None) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve_host(role, settings, stopped, idle_s=idle_s)


def _share_free_memory() -> None:
    """Limit glibc's arenas, so that memory that one thread has freed is used by others."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _MALLOC_ARENAS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m service.host", description=__doc__)
    parser.add_argument("--role", choices=get_args(Role), required=True)
    parser.add_argument("--root", type=Path, help="local state of this machine")
    parser.add_argument(
        "--exit-when-idle", type=float, metavar="S", help="of a gpu or sampler host: end after S seconds"
    )
    given = parser.parse_args(arguments)
    if given.exit_when_idle is not None and (given.role == "control" or given.exit_when_idle <= 0):
        parser.error("--exit-when-idle takes more than 0 seconds, and a gpu or sampler host")
    settings = Settings(root=given.root) if given.root else Settings()
    private_folder(settings.root_path)
    _share_free_memory()
    with observed(given.role, settings):
        asyncio.run(_main(given.role, settings, given.exit_when_idle))


if __name__ == "__main__":
    escape_output()
    main()
    # Everything has ended in good order. The SDK's own threads may still touch Python, and an interpreter that is being
    # taken down under them aborts (seen with temporalio 1.35: one exit in six): so it is not taken down.
    logging.shutdown()
    os._exit(0)
