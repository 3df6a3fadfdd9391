"""A control host and stand-in GPU hosts on a real Temporal server, for tests of whole runs."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from activities.host_context import HostContext
from activities.hosts.health import health_of
from activities.hosts.session import ServedSessions
from activities.hosts.workers import Sharing, WorkerCommand, WorkerPool
from activities.publishing.publish import Publish
from activities.records import FindCheckpoint, RunRecords
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.views import RunStatus
from service.host import _end_idle_workers, control_workers, gpu_workers, polling
from service.host_http.answers import session_routes
from service.host_http.connections import serving
from service.sealing import seal_keys
from service.temporal import connect_temporal
from shared.runs.start import RunStart, RunTiming, result_sha256
from shared.settings import Settings
from shared.storage.paths import HostPaths, RunKeys
from shared.storage.store import ObjectStore, open_store, open_uri
from tests import forks
from tests.forks import Program
from tests.waiting import eventually
from tests.workflows import stand_in_host
from tests.workflows.rows import recording
from tests.workflows.stand_in import REPOSITORY, StandInCommand
from tests.workflows.stand_in_activities import StandInData
from workflows.leases import GangTurnsWorkflow
from workflows.services import TrackWorkflow
from workflows.sft import SFTWorkflow

forks.IMPORTED.append(stand_in_host.__name__)


@dataclass
class Stack:
    """A control host and as many gpu hosts as a test starts, on queues of its own."""

    client: Client
    settings: Settings
    store: ObjectStore
    data: StandInData
    exits: AsyncExitStack

    workflows: ClassVar[list[type]] = [SFTWorkflow, TrackWorkflow, GangTurnsWorkflow]

    @property
    def activities(self) -> list[Callable[..., Any]]:
        """What a control host does for these workflows."""
        host = HostContext(self.settings)
        record = RunRecords(host)
        publish, find_checkpoint = Publish(host).publish, FindCheckpoint(host).find_checkpoint
        return [*self.data.all, find_checkpoint, publish, record.record_result, record.begin]

    @asynccontextmanager
    async def control_host(self, client: Client | None = None, **how: Any) -> AsyncIterator[None]:
        """Do what needs no accelerator, in this process. `client`: with other keys than the stack's own."""
        asking, queue = client or self.client, self.settings.control_queue
        async with (
            recording(asking, self.settings),
            control_workers(asking, queue, self.activities, self.workflows, **how),
        ):
            yield

    @property
    def workers(self) -> Path:
        return HostPaths(self.settings.root_path).workers

    def worker_ids(self) -> list[str]:
        return [folder.name for folder in self.workers.glob("*")]

    async def add_gpu_host(
        self,
        step_s: float = 0.01,
        command: WorkerCommand | None = None,
        check: Callable[[], tuple[str, ...]] | None = None,
        root: Path | None = None,
    ) -> str:
        """A host in this process; returns its queue. With a `check` it watches its health.

        `root`: of another machine, as in `spawn_gpu_host`.
        """
        given = self.settings
        if root is not None:
            key = SecretStr(_seal_key(given))
            given = given.model_copy(update={"root": root, "store_uri": given.store, "seal_key": key})
        threads = self.exits.enter_context(ThreadPoolExecutor(2 + 2 * given.runs_per_worker))
        pool = WorkerPool(
            HostPaths(given.root_path),
            command or StandInCommand(step_s),
            {"PYTHONPATH": str(REPOSITORY)},
            given.worker_idle_s,
            sharing=Sharing(given.runs_per_worker, given.sharing_window_s),
        )
        self.exits.callback(pool.close)
        self.exits.callback(asyncio.create_task(_end_idle_workers(pool)).cancel)
        queue = f"host-{uuid.uuid4().hex}"
        health = health_of("gpu", given, queue, check) if check is not None else None
        client = self.client if health is None else await connect_temporal(given)  # one polls a queue once
        sessions = ServedSessions()
        at = self.exits.enter_context(serving(given, queue, session_routes(sessions)))
        workers = gpu_workers(client, given, threads, pool, queue, health, sessions, at)
        await self.exits.enter_async_context(polling(*workers))
        return queue

    def spawn_gpu_host(
        self,
        step_s: float = 0.01,
        root: Path | None = None,
        idle_s: float | None = None,
        launch: str = "",
        seal_key: str | None = None,
    ) -> BaseProcess:
        """A host in a process of its own, to be killed, or told to leave by a file `notice` in its root.

        `root`: of another machine, which has the store in common.

        `idle_s`, `launch`: it leaves by itself after such a time without a lease; by which name it was started.
        """
        given = self.settings
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "LONGSHORE_ROOT": str(root := root or given.root_path),
            "LONGSHORE_STORE_URI": given.store,
            "LONGSHORE_TEMPORAL_ADDRESS": given.temporal_address,
            "LONGSHORE_SHAPE": given.shape,
            "LONGSHORE_SEAL_KEY": seal_key or _seal_key(given),
            "LONGSHORE_WORKER_IDLE_S": str(given.worker_idle_s),
            "LONGSHORE_LAUNCH": launch,
            "LONGSHORE_DRAIN_NOTICE": str(root / "notice"),
        }
        root.mkdir(parents=True, exist_ok=True)
        said = root / "host.log"
        arguments = [str(step_s)] if idle_s is None else [str(step_s), str(idle_s)]
        process = forks.start(Program(stand_in_host.main, arguments, environment, REPOSITORY, said, said))
        self.exits.callback(forks.end, process)
        return process

    async def start(
        self,
        run_id: str | None = None,
        resumed: bool = False,
        timing: RunTiming | None = None,
        is_tracked: bool = True,
        shares_with: str | None = None,
        threads_per_rank: int = 1,
        **run,
    ):
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        fields = {"steps": 20, "checkpoint_every": 5, "seed": 7, **run}
        dataset = DatasetSource(uri=fields.pop("dataset", "file:///rows.jsonl"))
        start = RunStart(
            run_id=run_id,
            run=SFTRun(name=run_id, model="tiny", dataset=dataset, batch_size=2, **fields),
            timing=timing or RunTiming(heartbeat_timeout_s=4, host_pickup_timeout_s=4, cancel_grace_s=20),
            shape=self.settings.shape,
            **self.start_of(run_id, resumed),
            is_tracked=is_tracked,
            shares_with=shares_with,
            threads_per_rank=threads_per_rank,
        )
        return await self.client.start_workflow(
            SFTWorkflow.run, start, id=run_id, task_queue=self.settings.control_queue
        )

    async def begun(self, **run) -> WorkflowHandle:
        """A run that has a checkpoint."""
        handle = await self.start(**run)
        await eventually(lambda: has_checkpoint(handle), "a checkpoint")
        return handle

    def start_of(self, run_id: str, resumed: bool) -> dict[str, Any]:
        """What the service makes anew for every start."""
        goes_on_from = result_sha256(self.store, run_id) if resumed else None
        return {"start_id": uuid.uuid4().hex, "resumed": resumed, "goes_on_from": goes_on_from}

    async def num_trackers(self, run_id: str) -> int:
        return (await self.client.count_workflows(f'WorkflowId STARTS_WITH "{run_id}-track-"')).count

    async def result(self, run_id: str) -> RunStatus:
        return RunStatus.model_validate_json(await asyncio.to_thread(self.store.get_bytes, RunKeys(run_id).result))

    def weights(self, status: RunStatus) -> bytes:
        assert status.adapter is not None
        store, key = open_uri(status.adapter, self.settings.s3)
        return store.get_bytes(f"{key}/adapter_model.safetensors")


def _seal_key(settings: Settings) -> str:
    return " ".join(key.secret.decode() for key in seal_keys(settings))


@asynccontextmanager
async def started(
    temporal_address: str, root: Path, has_control: bool = True, kind: type[Stack] = Stack, **changes
) -> AsyncIterator[Any]:
    """A `kind` of stack, on queues of its own."""
    name = uuid.uuid4().hex[:8]
    settings = Settings(
        root=root, temporal_address=temporal_address, shape=name, control_queue=f"control-{name}", **changes
    )
    client = await connect_temporal(settings)
    store = open_store(settings.store, settings.s3)
    data = StandInData(store, root / "scratch-data")
    async with AsyncExitStack() as exits:
        stack = kind(client, settings, store, data, exits)
        if has_control:
            await exits.enter_async_context(stack.control_host())
        yield stack


async def has_checkpoint(handle: WorkflowHandle) -> bool:
    return (await handle.query(SFTWorkflow.status)).checkpoint is not None


async def failure_of(handle: WorkflowHandle) -> BaseException | None:
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    return caught.value.cause


async def num_events(handle: WorkflowHandle) -> int:
    return len([event async for event in handle.fetch_history_events()])


async def num_failed_activities(handle: WorkflowHandle) -> int:
    kinds = [event.event_type async for event in handle.fetch_history_events()]
    return kinds.count(EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED)
