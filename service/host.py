"""The Temporal poller: `python -P -m longshore.server service.host --role control|gpu|sampler`.

A control host runs workflows and everything that needs no accelerator. A gpu host leases its device: it polls the queue
of its shape, and a private queue for the jobs of the runs it serves. A sampler host does the same with a sampler.
"""

import sys

if __name__ == "__main__":
    # A worker's imports take longer than the code below, and run in another process: do both at once.
    from activities.confined.programs import prepare

    for role, program in {"gpu": "megatron_worker", "sampler": "megatron_worker.sampler"}.items():
        if role in sys.argv[1:]:
            prepare([sys.executable, "-P", "-m", program])

import argparse
import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal, get_args

from temporalio.client import Client

from activities.confined import calls as confined
from activities.host_context import HostContext
from activities.hosts.session import Bells
from activities.hosts.standing import Check, standing_of
from activities.hosts.workers import (
    Sharing,
    WorkerCommand,
    WorkerPool,
    ranks_command,
    room_for_ranks,
    worker_environment,
)
from activities.sampling.questions import Questions
from activities.sampling.samplers import SamplerCommand, Samplers
from activities.telemetry import HOST_START
from service import temporal
from service.host_http.answers import announced, answering, bell_routes
from service.host_http.server import observed, serving
from service.host_workers import (
    SAMPLING_THREADS,
    HostRecord,
    IdleExit,
    control_activities,
    control_workers,
    control_workflows,
    gpu_workers,
    polling,
    sampler_workers,
)
from service.sealing import sync_key
from service.temporal import connect_temporal
from shared.log_lines import escape_output
from shared.programs import BUILD_VARIABLE
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.host_states import told_file
from shared.storage.paths import HostPaths

Role = Literal["control", "gpu", "sampler"]

_NOTICE_EVERY_S = 0.5
_M_ARENA_MAX, _MALLOC_ARENAS = -8, 2  # the first is malloc.h's
_log = logging.getLogger("longshore.host")


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
        check: returns what a gpu or sampler host lacks; by default the machine is probed.
        idle_s: a gpu or sampler host leaves by itself after this many seconds without a lease.
    """
    host, idle = HostContext(settings), IdleExit(idle_s, stopped.set) if idle_s is not None else None
    told_file(settings.root_path, "polls", role).unlink(missing_ok=True)
    async with AsyncExitStack() as stack:
        record = stack.enter_context(HostRecord(HostPaths(settings.root_path).hosts, role))
        client = await connect_temporal(settings, interceptors=[record], leave=stopped.set)
        if settings.drain_notice is not None:
            stack.callback(asyncio.create_task(_heed(settings.drain_notice, stopped)).cancel)
        await record.report_lost(client)
        HOST_START.reached("host: connect")
        match role:
            case "control":
                await _poll_as_control(stack, host, client, record)
            case "gpu":
                threads = stack.enter_context(ThreadPoolExecutor(2 + 3 * settings.runs_per_worker))
                pool = await _pool(stack, settings, command)
                standing = await asyncio.to_thread(standing_of, role, settings, record.queue, check)
                at = stack.enter_context(serving(settings, record.queue, bell_routes(bells := Bells())))
                jobs = gpu_workers(client, settings, threads, pool, record.queue, standing, bells, at, idle)
                await stack.enter_async_context(polling(*jobs))
            case "sampler":
                threads = stack.enter_context(ThreadPoolExecutor(2 + SAMPLING_THREADS))
                pool = await _pool(stack, settings, SamplerCommand(host, sync_key(settings)))
                routes = stack.enter_context(answering(Questions(host, Samplers(settings, pool))))
                at = stack.enter_context(serving(settings, record.queue, routes))
                standing = await asyncio.to_thread(standing_of, role, settings, record.queue, check)
                workers = sampler_workers(client, settings, threads, pool, at, record.queue, standing, idle)
                await stack.enter_async_context(polling(*workers))
        _log.info("%s host polls %s at %s", role, settings.temporal_namespace, settings.temporal_address)
        await stopped.wait()
        _log.info("%s host leaves", role)


async def _poll_as_control(stack: AsyncExitStack, host: HostContext, client: Client, record: HostRecord) -> None:
    """Run workflows and activities until the stack ends."""
    from activities.tracking.track import Track

    settings = host.settings
    if settings.build_id is not None:  # wherever it is from: workflows read it as they are imported
        os.environ[BUILD_VARIABLE] = settings.build_id
    confined.prepare()
    track = Track(host)
    stack.push_async_callback(track.close)
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


async def _heed(notice: Path, stopped: asyncio.Event) -> None:
    """Set `stopped` once something is at the path of the settings' `drain_notice`."""
    while not stopped.is_set():
        if await asyncio.to_thread(os.path.exists, notice):  # False where it cannot be looked for
            _log.info("%s is there: this host leaves", notice)
            stopped.set()
        await asyncio.sleep(_NOTICE_EVERY_S)


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
    parser = argparse.ArgumentParser(prog="python -P -m longshore.server service.host", description=__doc__)
    parser.add_argument("--role", choices=get_args(Role), required=True)
    parser.add_argument("--root", type=Path, help="local state of this machine")
    parser.add_argument(
        "--exit-when-idle", type=float, metavar="S", help="for a gpu or sampler host: end after S seconds without work"
    )
    given = parser.parse_args(arguments)
    HOST_START.begin()
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
