"""No activity keeps another waiting that it has nothing to do with: a control host whose pools are all full."""

import asyncio
import itertools
import socket
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.enums.v1.workflow_pb2 import PENDING_ACTIVITY_STATE_STARTED
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.records import FindCheckpointRequest, StepRecordRequest
from activities.sources.download import DownloadRequest
from activities.tracking.track import TrackRequest
from activities.trajectories.pack_trajectories import GroupsRequest
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.fields import Artifact, Frozen
from longshore.runs import RLRun
from longshore.training import Lora
from longshore.views import PreviewRequest, PreviewStart, RunStatus, StepStatus
from service.host import _AT_ONCE, serve_host
from service.temporal import connect_temporal
from shared.runs.start import RunStart
from shared.settings import DownloadSettings, Settings, WebhookSettings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, open_store
from tests.service.conftest import serving, sft
from tests.waiting import wait_until
from workflows.policies import pool_of, queue_of
from workflows.sft import SFTWorkflow

NOWHERE = Artifact(uri="file:///nowhere", sha256="0" * 64)
SFT = SFTRun(model="tiny", dataset=DatasetSource(uri="file:///rows.jsonl"), steps=1, batch_size=1)
_MORE = 2  # than a pool does at once
MOST_TRACKED = 100  # there is no bound; this is three times what there were threads


@dataclass
class SilentServer:
    """Takes every connection, and never answers."""

    url: str
    connections: list[socket.socket] = field(default_factory=list)


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        server = SilentServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            with suppress(OSError):
                while True:
                    server.connections.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in server.connections:
            connection.close()


@workflow.defn(name="OneActivity")
class OneActivity:
    """Asks a control host for one activity."""

    @workflow.run
    async def run(self, name: str, request: dict[str, Any], control_queue: str) -> None:
        await workflow.execute_activity(
            name,
            request,
            task_queue=queue_of(name, control_queue),
            start_to_close_timeout=timedelta(hours=1),
            heartbeat_timeout=timedelta(minutes=2),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


@dataclass
class Host:
    """A control host in this process, and what it is asked to do."""

    settings: Settings
    client: Client

    async def ask(self, name: str, request: Frozen) -> WorkflowHandle[OneActivity, None]:
        arguments = [name, request.model_dump(mode="json"), self.settings.control_queue]
        identity = f"{name}-{uuid.uuid4().hex}"
        return await self.client.start_workflow(OneActivity.run, args=arguments, id=identity, task_queue=self._tests)

    @property
    def _tests(self) -> str:
        return f"{self.settings.control_queue}-test"

    async def counts(self) -> tuple[Counter[str], Counter[str]]:
        """How many activities of each name have not ended, and how many of these a thread has begun, or a coroutine."""
        asked, begun = Counter[str](), Counter[str]()
        async for each in self.client.list_workflows(f'TaskQueue = "{self._tests}" AND ExecutionStatus = "Running"'):
            described = await self.client.get_workflow_handle(each.id).describe()
            for pending in described.raw_description.pending_activities:
                asked[pending.activity_type.name] += 1
                begun[pending.activity_type.name] += pending.state == PENDING_ACTIVITY_STATE_STARTED
        return asked, begun

    async def fill(self, kinds: Mapping[str, Callable[[int], Frozen]], sizes: Mapping[str, int]) -> None:
        """Ask for these until so many of each are in hand; one that has ended after all is asked for anew."""
        numbers = itertools.count()
        while True:
            asked, begun = await self.counts()
            if all(begun[name] >= size for name, size in sizes.items()):
                return
            for name, make in kinds.items():
                missing = max(0, sizes[name] + _MORE - asked[name])
                await asyncio.gather(*(self.ask(name, make(next(numbers))) for _ in range(missing)))
            await asyncio.sleep(1.0)


@pytest.fixture
async def host(temporal_address: str, tmp_path: Path, tiny_model: Path) -> AsyncIterator[Host]:
    settings = Settings(
        root=tmp_path / "root",
        temporal_address=temporal_address,
        control_queue=f"control-{uuid.uuid4().hex[:8]}",
        download=DownloadSettings(allow_private_addresses=True, timeout_s=600, file_roots=(tiny_model,)),
        webhooks=WebhookSettings(allow_private_addresses=True, timeout_s=600),
    )
    client, stopped = await connect_temporal(settings), asyncio.Event()
    serving = asyncio.create_task(serve_host("control", settings, stopped))
    asks = Worker(
        client,
        task_queue=f"{settings.control_queue}-test",
        workflows=[OneActivity],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with asks:
        yield Host(settings, client)
        assert not serving.done(), serving
    stopped.set()
    await serving


def longest(url: str, model: str) -> dict[str, Callable[[int], Frozen]]:
    """For each pool that a tenant can stretch, an activity that lasts as long as somebody's server likes."""
    groups = {"key": "k", "state": "running"}
    run = RLRun(model="tiny", trainable=Lora(rank=4))

    def rows(n: int) -> DatasetSource:
        return DatasetSource(uri=f"{url}/{n}.jsonl")

    def step(n: int) -> StepStatus:
        return StepStatus.model_validate({**groups, "step": 1, "groups": f"{url}/{n}.jsonl"})

    return {
        "download": lambda n: DownloadRequest(run_id=f"sft-{n:015x}", tenant="default", split="train", source=rows(n)),
        "preview": lambda n: PreviewStart(tenant="default", request=PreviewRequest(source=rows(n), model_uri=model)),
        "pack_trajectories": lambda n: GroupsRequest(
            run_id=f"rl-{n:015x}", tenant="default", run=run, step=step(n), policy_version=0, vocab_size=512
        ),
        "track": lambda n: TrackRequest(run_id=f"sft-{n:015x}", run=SFT),
    }


async def test_a_run_ends_and_is_on_record_while_every_pool_is_full(
    host: Host, silent: SilentServer, tiny_model: Path
) -> None:
    """More of the longest activities than each pool does at once, all waiting for a server that never answers."""
    store = open_store(host.settings.store, host.settings.s3)
    kinds = longest(silent.url, str(tiny_model))
    sizes = {name: min(_AT_ONCE[pool_of(name)], MOST_TRACKED) for name in kinds}
    async with asyncio.timeout(300):
        await host.fill(kinds, sizes)

    # What runs need in order to end waits for none of this.
    checked = StepRecordRequest(run_id="rl-1", step=StepStatus(step=1, key="k", groups="file:///g", state="done"))
    async with asyncio.timeout(120):
        await (await host.ask("record_step", checked)).result()
        await (await host.ask("find_checkpoint", FindCheckpointRequest(run_id="rl-1"))).result()
        # Its data waits behind the others'; whoever cancels it is not kept waiting.
        mine = SFT.model_copy(update={"model": str(tiny_model)})
        start = RunStart(run_id="sft-ends", run=mine, shape="none")
        run = await host.client.start_workflow(
            SFTWorkflow.run, start, id="sft-ends", task_queue=host.settings.control_queue
        )
        await run.cancel()
        # No service is here to record its end, for which its workflow waits.
        await asyncio.to_thread(wait_until, lambda: store.head(RunKeys("sft-ends").result), "its result")
    result = await asyncio.to_thread(store.get_bytes, RunKeys("sft-ends").result)
    assert RunStatus.model_validate_json(result).state == "cancelled"
    _, begun = await host.counts()
    assert all(begun[name] >= size - _MORE for name, size in sizes.items()), "all the while, every pool was full"


def test_files_on_their_way_into_the_store_keep_nobody_else_waiting(
    temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads whose last step lasts, as to a distant bucket: more of them than the service has threads for that."""
    settings = Settings(
        root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{uuid.uuid4().hex[:8]}"
    )
    goes_on, put_file, num_waiting = threading.Event(), LocalStore.put_file, Counter[str]()

    def put_slowly(store: LocalStore, key: str, path: Path) -> None:
        num_waiting["files"] += 1
        assert goes_on.wait(120)
        put_file(store, key, path)

    monkeypatch.setattr(LocalStore, "put_file", put_slowly)
    num_uploads = 80  # as many as would fill all threads of the service
    with serving(settings) as service, ThreadPoolExecutor(num_uploads) as threads:

        def upload(n: int) -> int:
            with service.http() as api:
                return api.post("/files", params={"name": f"{n}.jsonl"}, content=b"{}\n" * n, timeout=120).status_code

        sent = [threads.submit(upload, n) for n in range(1, num_uploads + 1)]
        try:
            wait_until(lambda: num_waiting["files"] == 8, "the threads for files are full")
            with service.http() as api:
                assert api.get("/health", timeout=300).status_code == 200
                assert api.post("/runs/sft", json=sft(), timeout=300).status_code == 201
        finally:
            goes_on.set()
        assert {answer.result() for answer in sent} <= {200, 201}
