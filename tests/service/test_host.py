"""The host process: what it lacks, how it leaves, what is done again after a kill; pools that are full; two builds."""

import asyncio
import errno
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.api.enums.v1.workflow_pb2 import PENDING_ACTIVITY_STATE_STARTED
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.host_context import HostContext
from activities.hosts.workers import processes_of
from activities.records import FindCheckpointRequest, StepRecordRequest
from activities.sampling.samplers import SamplerLeaseRequest
from activities.sources.download import Downloaded, DownloadRequest
from activities.tracking.track import Track, TrackRequest
from activities.trajectories.pack_trajectories import GroupsRequest
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.fields import Artifact, Frozen
from longshore.grading import UNGRADED, GradeOneRequest, OneGrade
from longshore.runs import RLRun
from longshore.server import with_import_path
from longshore.training import Layout, Lora
from longshore.views import PreviewRequest, PreviewStart, RunStatus, StepStatus
from service import temporal
from service.host import _AT_ONCE, UNFIT_STATUS, HostRecord, control_activities, control_workers, serve_host
from service.sealing import SealKey, seal_keys
from service.temporal import connect_temporal
from shared.chat.completions import SamplerReady
from shared.errors import NotFound
from shared.jobs.job import LeaseGrant, ProcessKey, SamplerKey, WorkerKey, WorkerRecord
from shared.runs.start import RunStart
from shared.settings import DownloadSettings, Settings, WebhookSettings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.files import write_atomically
from shared.storage.host_states import read_states
from shared.storage.paths import HostPaths, RunKeys
from shared.storage.store import LocalStore, open_store
from tests.conftest import free_port
from tests.ended import TELLS_WHERE_IT_STANDS, end
from tests.opened import opened
from tests.served import ANY_PORT, Quiet, served
from tests.service.build_workflows import Moving, Run
from tests.service.conftest import serving, sft
from tests.waiting import eventually, wait_until
from tests.workflows.stand_in import artifact
from workflows import policies
from workflows.policies import activity_name, pool_of, queue_of
from workflows.sft import SFTWorkflow


def spawn(role: str, address: str, root: Path, **given: str) -> subprocess.Popen:
    environment = {**os.environ, "LONGSHORE_TEMPORAL_ADDRESS": address, **given}
    command = [sys.executable, "-m", "service.host", "--role", role, "--root", str(root)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@contextmanager
def spawned(role: str, address: str, root: Path, **given: str) -> Iterator[subprocess.Popen]:
    host = spawn(role, address, root, **TELLS_WHERE_IT_STANDS, **given)
    assert host.stderr is not None
    drain = threading.Thread(target=host.stderr.read)
    drain.start()
    try:
        yield host
    finally:
        end(host)
        drain.join()


def test_a_host_that_lacks_something_ends_with_a_status_and_says_why(temporal_address: str, tmp_path: Path) -> None:
    """Here the disk takes no file of more than a megabyte."""
    command = ["prlimit", f"--fsize={1 << 20}", sys.executable, "-m", "service.host", "--role", "gpu", "--root"]
    environment = {**os.environ, "LONGSHORE_TEMPORAL_ADDRESS": temporal_address}
    host = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300)
    assert host.returncode == UNFIT_STATUS
    assert "this gpu host lacks what it needs: the disk of LONGSHORE_ROOT cannot be written" in host.stderr
    [state] = read_states(LocalStore(tmp_path / "store"), Settings(root=tmp_path).shape)
    assert state.lacks == ("the disk of LONGSHORE_ROOT cannot be written: File too large",), "users see it, too"


def test_one_process_serves_all_roles_of_which_each_rests_and_starts_again_alone(
    temporal_address: str, tmp_path: Path
) -> None:
    """At first the disk takes no file of more than a megabyte, and a control host needs none."""
    roles = ("control", "gpu", "sampler")
    command = ["prlimit", f"--fsize={1 << 20}:", sys.executable, "-m", "service.host", "--root", str(tmp_path)]
    command += [word for role in roles for word in ("--role", role)]
    environment = {**os.environ, "LONGSHORE_TEMPORAL_ADDRESS": temporal_address}
    host = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert host.stderr is not None
    lines = iter(host.stderr.readline, "")

    def wait_for(*wanted: str) -> None:
        left = set(wanted)
        while left:
            line = next(lines)
            left = {each for each in left if each not in line}

    wait_for("the gpu role rests", "the sampler role rests", "control host polls")
    resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_for("gpu host polls", "sampler host polls")
    host.send_signal(signal.SIGHUP)
    wait_for("control host leaves")
    wait_for("control host polls")
    host.send_signal(signal.SIGTERM)
    last = list(lines)
    assert [role for role in roles if not any(f"{role} host leaves" in line for line in last)] == []
    assert host.wait(300) == 0
    host.stderr.close()


async def test_what_a_killed_control_host_had_in_hand_is_done_anew_at_once(
    temporal_address: str, tmp_path: Path
) -> None:
    """The next host of its root tells of it: nobody waits for a heartbeat, of which there is none here."""
    queue = f"control-{uuid.uuid4().hex[:6]}"
    given = {"LONGSHORE_CONTROL_QUEUE": queue, "LONGSHORE_DOWNLOAD__ALLOW_PRIVATE_ADDRESSES": "1"}
    asked, is_silent, ended = threading.Event(), True, threading.Event()

    class Rows(Quiet):
        def do_GET(self) -> None:
            asked.set()
            if is_silent:
                ended.wait(60)
                return
            self.answer(200, b"{}\n")

    client: Client = await connect_temporal(Settings(root=tmp_path, temporal_address=temporal_address))
    rows = ThreadingHTTPServer(ANY_PORT, Rows)
    with served(rows), spawned("control", temporal_address, tmp_path, **given) as first:
        source = DatasetSource(uri=f"http://127.0.0.1:{rows.server_port}/rows.jsonl")
        handle = await client.start_activity(
            "download",
            DownloadRequest(run_id="r1", tenant="default", split="train", source=source),
            id=f"download-{queue}",
            task_queue=queue,
            start_to_close_timeout=timedelta(hours=1),
            result_type=Downloaded,
        )
        assert await asyncio.to_thread(asked.wait, 60)
        first.kill()
        is_silent = False
        ended.set()
        with spawned("control", temporal_address, tmp_path, **given):
            assert (await handle.result()).num_files == 1


async def test_hosts_of_one_root_have_records_of_their_own(tmp_path: Path) -> None:
    with HostRecord(tmp_path, "gpu") as first, HostRecord(tmp_path, "gpu") as second:
        assert first.queue != second.queue
    with HostRecord(tmp_path, "gpu") as next_one:
        assert next_one.queue == first.queue


async def test_a_host_of_another_machine_is_not_taken_for_dead_on_a_root_whose_locks_are_each_machines_own(
    temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_begun, may_end, queue = asyncio.Event(), asyncio.Event(), uuid.uuid4().hex

    @activity.defn
    async def train() -> str:
        is_begun.set()
        await may_end.wait()
        return "trained"

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    settings = Settings(root=tmp_path, temporal_address=temporal_address)
    with HostRecord(tmp_path / "hosts", "gpu") as living:
        client = await connect_temporal(settings, interceptors=[living])
        async with Worker(client, task_queue=queue, activities=[train]):
            handle = await client.start_activity(
                train,
                id=queue,
                task_queue=queue,
                start_to_close_timeout=timedelta(minutes=5),
                retry_policy=policies.ONCE,
            )
            await is_begun.wait()
            monkeypatch.setattr("socket.gethostname", lambda: "another")
            with HostRecord(tmp_path / "hosts", "gpu") as other:
                await other.report_lost(client)
            may_end.set()
            assert await handle.result() == "trained"


async def test_a_host_without_the_key_says_so_and_loses_nothing(temporal_address: str, tmp_path: Path) -> None:
    """One with a wrong key does not begin; one that comes to lack a key leaves; one that has them all does the work."""
    old, new, queue = "o" * 32, "n" * 32, f"control-{uuid.uuid4().hex[:6]}"
    given = Settings(root=tmp_path, temporal_address=temporal_address, seal_key=SecretStr(old))
    first = await connect_temporal(given)
    wrong = spawn("control", temporal_address, tmp_path, LONGSHORE_CONTROL_QUEUE=queue, LONGSHORE_SEAL_KEY="w" * 32)
    _, said = await asyncio.to_thread(wrong.communicate, timeout=300)
    own, others = seal_keys(given)[0].id, SealKey(b"w" * 32).id
    assert (wrong.returncode, f"seals with the key {own}, and not with {others}" in said) == (1, True), said

    late = spawn("control", temporal_address, tmp_path, LONGSHORE_CONTROL_QUEUE=queue, LONGSHORE_SEAL_KEY=old)
    assert late.stderr is not None
    assert await asyncio.to_thread(lambda: any("polls default" in line for line in late.stderr or ()))
    both = given.model_copy(update={"seal_key": SecretStr(f"{new} {old}")})
    client = await connect_temporal(both)  # the service has switched before this host was told of the key
    request, key = GradeOneRequest(grader=UNGRADED), SealKey(new.encode()).id
    handle = await client.start_workflow("GraderWorkflow", request, id=queue, task_queue=queue, result_type=OneGrade)
    _, said = await asyncio.to_thread(late.communicate, timeout=300)
    assert f"this process leaves: sealed with the key {key}" in said, said
    assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    events = [event.event_type async for event in handle.fetch_history_events()]
    assert (
        EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED in events
        and EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED not in events
    )
    with pytest.raises(SystemExit, match=f"seals with the key {key}, and not with {own}"):
        await connect_temporal(given)  # neither does it come back, until it has the key

    with spawned(
        *("control", temporal_address, tmp_path), LONGSHORE_CONTROL_QUEUE=queue, LONGSHORE_SEAL_KEY=f"{old} {new}"
    ):
        assert (await handle.result()).error is None
    assert await first.service_client.check_health()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_host_starts_on_a_root_that_cannot_be_locked(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with HostRecord(tmp_path, "gpu") as first, HostRecord(tmp_path, "gpu") as second:
        assert first.queue != second.queue
    assert "cannot be locked" in caplog.text


async def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"no Temporal server at {address}"):
        await connect_temporal(Settings(root=tmp_path, temporal_address=address), patience_s=0.5)


async def test_a_control_host_answers_for_every_activity_that_workflows_ask_for(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    host = HostContext(settings)
    activities = control_activities(host, Track(host))
    names = {activity_name(each) for each in activities}
    assert names >= {"resolve_model", "resolve_adapter", "download", "tokenize", "pack", "preview", "find_checkpoint"}
    assert names >= {"publish", "record_result", "begin", "track"}
    of_the_service = {"deliver", "give_up_delivery"}
    assert names >= policies._POOLS.keys() - of_the_service, "what else has a pool is done there"


async def test_a_host_stays_responsive_while_it_brings_what_a_killed_host_had_leased(
    temporal_address: str, tmp_path: Path
) -> None:
    """A sampler's command brings its model first, which may take hours."""
    settings = Settings(root=tmp_path, temporal_address=temporal_address, shape=uuid.uuid4().hex[:6])
    left = HostPaths(settings.root_path).worker("left")
    key = WorkerKey(
        model=artifact(LocalStore(tmp_path / "store"), tmp_path / "m", "m", x="x"), layout=Layout(), dtype="float32"
    )
    record = WorkerRecord(worker_id="left", pid=0, started_at=0, host_pid=1, host_started_at=0, key=key)
    write_atomically(left.record, record.model_dump_json().encode())
    write_atomically(left.lease("r1"), b"{}")
    asked, arrived, found = threading.Event(), threading.Event(), list[bool]()

    def bring(folder: Path, key: ProcessKey) -> list[str]:
        asked.set()
        found.append(arrived.wait(300))
        raise OSError("no such model any more")

    stopped = asyncio.Event()
    serving_host = asyncio.create_task(serve_host("gpu", settings, stopped, bring))
    assert await asyncio.to_thread(asked.wait, 60)
    arrived.set()
    stopped.set()
    await asyncio.wait_for(serving_host, 300)
    assert found == [True], "the event loop stood still meanwhile"


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


NUM_RUNS = 6


@pytest.fixture
async def installation(temporal_address: str, tmp_path: Path) -> AsyncIterator["Installation"]:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"c-{uuid.uuid4().hex[:8]}")
    async with AsyncExitStack() as hosts:
        yield Installation(settings, await connect_temporal(settings), hosts)


class Installation:
    def __init__(self, settings: Settings, client: Client, hosts: AsyncExitStack) -> None:
        self.settings, self.client, self.hosts = settings, client, hosts

    async def host(self, build_id: str) -> AsyncExitStack:
        """A control host of a build; close what is returned to stop it."""

        @activity.defn
        async def which_build() -> str:
            return build_id

        settings = self.settings.model_copy(update={"build_id": build_id})
        host = await self.hosts.enter_async_context(AsyncExitStack())
        client, build = await connect_temporal(settings), temporal.deployment(settings)
        workers = control_workers(client, settings.control_queue, [which_build], [Run, Moving], build=build)
        await host.enter_async_context(workers)
        await temporal.begin_with(client, settings)
        return host

    async def begin(self, kind: type[Run] = Run) -> WorkflowHandle:
        return await self.client.start_workflow(kind.run, id=uuid.uuid4().hex, task_queue=self.settings.control_queue)

    async def use(self, build_id: str) -> None:
        """Make a build current, once Temporal has heard of its hosts' polls of every queue."""

        async def is_done() -> bool:
            with suppress(NotFound):
                await temporal.make_current(self.client, self.settings, build_id)
                return True
            return False

        await eventually(is_done, f"{build_id} is current")

    async def states(self) -> dict[str, str]:
        return {each.build_id: each.state for each in await temporal.builds(self.client, self.settings)}


async def waits(handle: WorkflowHandle) -> bool:
    """True once its first activity has answered."""
    events = [event async for event in handle.fetch_history_events()]
    return any(event.HasField("activity_task_completed_event_attributes") for event in events)


async def test_runs_end_on_the_build_that_they_began_on_and_services_move(installation: Installation) -> None:
    assert await installation.states() == {}
    old = await installation.host("one")
    assert await installation.states() == {"one": "current"}, "the first build of an installation"
    runs = [await installation.begin() for _ in range(NUM_RUNS)]
    service = await installation.begin(Moving)
    for each in (*runs, service):
        await eventually(lambda each=each: waits(each), "it has begun")
    await installation.host("two")
    assert (await installation.states())["one"] == "current", "a second one waits until it is told"
    await installation.use("two")
    later = await installation.begin()
    await eventually(lambda: waits(later), "it has begun")
    for each in (*runs, service, later):
        await each.signal(Run.go_on)
    assert await asyncio.gather(*(each.result() for each in runs)) == [["one", "one"]] * NUM_RUNS
    assert await later.result() == ["two", "two"]
    assert await service.result() == ["one", "two"]
    assert (await installation.states())["two"] == "current"
    await old.aclose()
    after = await installation.begin()
    await after.signal(Run.go_on)
    assert await after.result() == ["two", "two"]


async def test_back_to_the_build_before(installation: Installation) -> None:
    await installation.host("one")
    await installation.host("two")
    for build_id in ("two", "one"):
        await installation.use(build_id)
        run = await installation.begin()
        await run.signal(Run.go_on)
        assert await run.result() == [build_id] * 2


async def test_a_build_without_hosts_is_not_made_current(installation: Installation) -> None:
    await installation.host("one")
    with pytest.raises(NotFound, match="no host of build three polls"):
        await temporal.make_current(installation.client, installation.settings, "three")
    assert await installation.states() == {"one": "current"}


async def test_a_build_of_a_deployment_that_something_else_looks_after_waits(installation: Installation) -> None:
    """As with Temporal's Worker Controller: its first host is up, and ready, before its build is current."""
    name = f"default/{installation.settings.control_queue}-host"
    installation.settings = installation.settings.model_copy(update={"deployment": name})
    await installation.host("0.1.0-5f6b")

    async def is_known() -> bool:
        return bool(await installation.states())

    await eventually(is_known, "Temporal has heard of its polls")
    assert await installation.states() == {"0.1.0-5f6b": "waiting"}
    await installation.use("0.1.0-5f6b")
    assert await installation.states() == {"0.1.0-5f6b": "current"}
    run = await installation.begin()
    await run.signal(Run.go_on)
    assert await run.result() == ["0.1.0-5f6b"] * 2


@pytest.mark.parametrize("build_id", ["one", ""])
def test_services_move_on_hosts_of_a_build_alone(build_id: str) -> None:
    """A server refuses the tasks of a worker that is of no build, and says how a workflow moves."""
    told = "from workflows.session import SessionWorkflow as S; from workflows.sft import SFTWorkflow as R; "
    told += "print(*(w.__temporal_workflow_definition.versioning_behavior.name for w in (S, R)))"
    environment = with_import_path() | {"LONGSHORE_BUILD_ID": build_id}
    said = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == (["AUTO_UPGRADE", "UNSPECIFIED"] if build_id else ["UNSPECIFIED"] * 2)
