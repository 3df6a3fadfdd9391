"""A sampler host of its own, leased through Temporal, killed hard, and come after."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
from temporalio import workflow
from temporalio.client import WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.worker import Worker

from activities.hosts.workers import processes_of
from activities.sampling.samplers import SamplerLeaseRequest
from service.temporal import connect_temporal
from shared.chat.completions import SamplerReady
from shared.jobs.job import LeaseGrant, SamplerKey, WorkerRecord
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import HostPaths
from shared.storage.store import open_store
from tests.ended import TELLS_WHERE_IT_STANDS, end
from tests.opened import opened
from tests.waiting import wait_until


@workflow.defn(sandboxed=False)
class Leasing:
    """Takes a lease and holds it until it is told to let go. Answers with why the lease ended by itself, if it did."""

    def __init__(self) -> None:
        self._grant: LeaseGrant | None = None
        self._is_over = False

    @workflow.run
    async def run(self, request: SamplerLeaseRequest, queue: str) -> str | None:
        lease = workflow.start_activity(
            "lease_sampler",
            request,
            task_queue=queue,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(hours=1),
            retry_policy=RetryPolicy(maximum_attempts=1),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        await workflow.wait_condition(lambda: self._is_over or lease.done())
        if self._is_over:
            lease.cancel()
        try:
            await lease
        except ActivityError as error:
            return str(error.cause)
        return None

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        self._grant = grant

    @workflow.signal
    def release(self) -> None:
        self._is_over = True

    @workflow.query
    def grant(self) -> LeaseGrant | None:
        return self._grant


@contextmanager
def sampler_host(settings: Settings) -> Iterator[subprocess.Popen]:
    """In a process of its own."""
    environment = {"LONGSHORE_TEMPORAL_ADDRESS": settings.temporal_address, "LONGSHORE_SHAPE": settings.shape}
    command = [sys.executable, "-m", "service.host", "--role", "sampler", "--root", str(settings.root)]
    host = subprocess.Popen(command, env={**os.environ, **TELLS_WHERE_IT_STANDS, **environment})
    try:
        yield host
    finally:
        end(host)


async def granted(handle: WorkflowHandle) -> LeaseGrant:
    for _ in range(1500):
        if grant := await handle.query(Leasing.grant):
            return grant
        await asyncio.sleep(0.1)
    raise TimeoutError("no grant within 150 s")


async def test_a_killed_host_takes_its_sampler_along_and_the_next_one_serves(
    temporal_address: str, tiny_model: Path, tmp_path: Path
) -> None:
    name = f"s-{uuid.uuid4().hex[:6]}"
    settings = Settings(root=tmp_path / "host", temporal_address=temporal_address, shape=name)
    shutil.copytree(tiny_model, tmp_path / "model")
    seal(tmp_path / "model")
    key = SamplerKey(
        model=upload_artifact(open_store(settings.store, settings.s3), "model", tmp_path / "model"), slots=2
    )
    paths = HostPaths(settings.root_path)
    client = await connect_temporal(settings)

    async def lease(epoch: int) -> WorkflowHandle:
        request = SamplerLeaseRequest(run_id="r1", epoch=epoch, key=key, ready_timeout_s=150)
        arguments = [request, settings.sampler_queue]
        return await client.start_workflow(Leasing.run, args=arguments, id=f"{name}-{epoch}", task_queue=name)

    async with Worker(client, task_queue=name, workflows=[Leasing]):
        with sampler_host(settings) as host:
            first = await lease(1)
            grant = await granted(first)
            record = WorkerRecord.model_validate_json(paths.worker(grant.worker_id).record.read_bytes())
            assert record.key == key
            assert psutil.pid_exists(record.pid)
            host.kill()
            await asyncio.to_thread(wait_until, lambda: not processes_of(record.worker_id), "the sampler has left")
        assert paths.worker(grant.worker_id).root.exists()
        with sampler_host(settings) as host:
            assert await first.result() == "LeaseLost: its host was killed", "told by the next host, not by silence"
            second = await lease(2)
            grant = await granted(second)
            assert [folder.name for folder in paths.workers.iterdir()] == [grant.worker_id]
            ready = SamplerReady.model_validate_json(paths.worker(grant.worker_id).ready.read_bytes())
            told = [opened(each, settings).SerializeToString() async for each in second.fetch_history_events()]
            assert not any(ready.api_key.encode() in event or str(ready.socket).encode() in event for event in told)
            await second.signal(Leasing.release)
            await second.result()
            assert psutil.pid_exists(ready.pid)  # warm
            host.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(host.wait, 30) == 0
            assert processes_of(grant.worker_id) == []
            assert list(paths.workers.iterdir()) == []
