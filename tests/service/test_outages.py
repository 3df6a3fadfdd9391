"""What stands behind the service is slow or goes away: it says so, loses nothing, and nobody else waits."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    PollWorkflowTaskQueueRequest,
    RespondWorkflowTaskCompletedRequest,
    RespondWorkflowTaskFailedRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord, Source
from service.backend import Backend
from service.database import engine
from service.database.engine import RunRow, open_database
from service.files import uploads_folder
from service.runs.rows import run_row
from service.runs.runs import queued
from shared.errors import StoreUnavailable
from shared.settings import S3Settings, Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, open_store
from tests.conftest import S3Server, free_port
from tests.depth import drawn
from tests.served import ANY_PORT, Quiet, served
from tests.service.conftest import key_of_acme, polling, serving, settings_below, sft
from tests.service.stand_in import MUTE, SUCCEEDS, UNANSWERED_STEP
from tests.waiting import wait_until

TEMPORAL = str(Path(sys.executable).parent / "temporal")


@contextmanager
def temporal(port: int, log: Path) -> Iterator[None]:
    """A Temporal server of the block's own, whose database goes with it."""
    command = [TEMPORAL, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        server.kill()
        server.wait()


def test_a_run_that_is_accepted_without_temporal_starts_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    settings = Settings(root=tmp_path, temporal_address=f"127.0.0.1:{port}")
    with serving(settings) as service, service.http() as api:
        accepted = api.post("/runs/sft", json=sft(seed=SUCCEEDS))
        assert accepted.status_code == 201
        run_id = accepted.json()["run_id"]
        assert (accepted.json()["state"], accepted.json()["phase"]) == ("running", "queued")
        assert api.get(f"/runs/{run_id}").json()["phase"] == "queued"
        assert [run["run_id"] for run in api.get("/runs").json()["runs"]] == [run_id]
        assert api.get("/health").status_code == 503
        assert api.get("/health").json()["temporal"] == "away"
        refused = api.post(f"/runs/{run_id}/cancel")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable")
        assert "Temporal" in refused.json()["error"]["message"]

        with temporal(port, tmp_path / "temporal.log"):
            wait_until(lambda: api.get("/health").status_code == 200, "Temporal is back", timeout_s=300)
            with polling(settings):
                wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run succeeds")
        # Temporal is gone again, with its database: an ended run is still known.
        assert api.get(f"/runs/{run_id}").json()["state"] == "succeeded"


@pytest.mark.deep
def test_a_repeated_key_gives_an_ended_run_that_temporal_has_forgotten(tmp_path: Path) -> None:
    port = free_port()
    settings = Settings(root=tmp_path, temporal_address=f"127.0.0.1:{port}")
    headers = {"idempotency-key": "once and for all"}
    with serving(settings) as service, service.http() as api:

        def submitted() -> dict:
            wait_until(lambda: api.get("/health").status_code == 200, "Temporal answers", timeout_s=300)
            return api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=headers).json()

        with temporal(port, tmp_path / "first.log"):
            run_id = submitted()["run_id"]
            with polling(settings):
                wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run succeeds")
        with temporal(port, tmp_path / "second.log"):
            again = submitted()
            assert (again["run_id"], again["state"]) == (run_id, "succeeded")


def test_a_record_that_cannot_be_read_strands_no_other_run(temporal_address: str, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{time.time_ns()}")
    store = open_store(settings.store, settings.s3)
    lost = RunRecord(run_id="sft-1-lost", run=SFTRun.model_validate(sft(seed=SUCCEEDS)), created_at=1.0)
    spoilt = run_row(lost.model_copy(update={"run_id": "sft-2-spoilt"}), queued(lost))
    spoilt.record = "{}"
    _accept(settings, spoilt, run_row(lost, queued(lost)))
    with serving(settings) as service, polling(settings), service.http() as api:
        wait_until(lambda: store.head(RunKeys(lost.run_id).result), "the sweep starts the other run")
        # Its row is written behind its result.
        wait_until(lambda: api.get(f"/runs/{lost.run_id}").json()["state"] == "succeeded", "it succeeds")


def _accept(settings: Settings, *rows: RunRow) -> None:
    """As a service did that died behind it."""
    database = open_database(settings)
    engine.upgrade(database)
    database.write(lambda session: session.add_all(rows))
    database.close()


def test_a_run_that_cannot_be_queried_holds_up_no_other(temporal_address: str, tmp_path: Path) -> None:
    """As after an upgrade whose workflows do not fit the histories that are there. Terminated, it has failed."""
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{time.time_ns()}")
    store = open_store(settings.store, settings.s3)
    with polling(settings):
        with serving(settings) as service, service.http() as api:
            mute = api.post("/runs/sft", json=sft(seed=MUTE)).json()["run_id"]
        lost = RunRecord(run_id="sft-zzz-lost", run=SFTRun.model_validate(sft(seed=SUCCEEDS)), created_at=1.0)
        _accept(settings, run_row(lost, queued(lost)))
        with serving(settings) as service, service.http() as api:
            wait_until(lambda: store.head(RunKeys(lost.run_id).result), "the sweep starts the other run")
            assert api.get(f"/runs/{mute}").json()["state"] == "running"
            command = [TEMPORAL, "workflow", "terminate", "--address", temporal_address, "--workflow-id", mute]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            wait_until(lambda: api.get(f"/runs/{mute}").json()["state"] == "failed", "its end is seen")
            problem = api.get(f"/runs/{mute}").json()["problem"]
            assert problem["kind"] == "ended_outside" and "terminated" in problem["message"]
            assert api.post(f"/runs/{mute}/resume").status_code == 202
            wait_until(lambda: api.get(f"/runs/{mute}").json()["state"] == "succeeded", "the resumed run succeeds")


async def _overhear(settings: Settings, num_updates: int) -> None:
    """A worker that answers workflow tasks and does not see the updates in them, so many times.

    What comes of it is the server's: it fails those updates in words of its own, as those that it had sent out when it
    was killed.
    """
    client = await Client.connect(settings.temporal_address)
    queue = TaskQueue(name=settings.control_queue)
    while num_updates:
        request = PollWorkflowTaskQueueRequest(namespace=client.namespace, task_queue=queue, identity="deaf")
        task = await client.workflow_service.poll_workflow_task_queue(request, timeout=timedelta(seconds=70))
        if task.task_token and not task.HasField("query"):
            answer = RespondWorkflowTaskCompletedRequest(
                namespace=client.namespace, task_token=task.task_token, identity="deaf"
            )
            await client.workflow_service.respond_workflow_task_completed(answer)
            num_updates -= bool(task.messages)


@pytest.mark.parametrize(("num_lost", "status"), drawn([(1, 202), (4, 503)], 1))
def test_a_step_that_temporal_lost_is_sent_again(
    temporal_address: str, tmp_path: Path, num_lost: int, status: int
) -> None:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{time.time_ns()}")
    with serving(settings) as service, service.http() as api, ThreadPoolExecutor(1) as threads:
        run_id = api.post("/runs/rl", json={"model": "org/tiny"}).json()["run_id"]
        step = {"key": "once", "groups": "file:///groups/1.jsonl"}
        sent = threads.submit(api.post, f"/runs/{run_id}/steps", json=step, timeout=300)
        asyncio.run(asyncio.wait_for(_overhear(settings, num_lost), 120))
        with polling(settings):
            answer = sent.result(300)
            assert answer.status_code == status, answer.text
            again = api.post(f"/runs/{run_id}/steps", json=step)
            assert (again.status_code, again.json()["step"]) == (202, 1)
            api.post(f"/runs/{run_id}/finish")
            wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run ends")


async def _fail_tasks(settings: Settings, seconds: float) -> None:
    """A worker that fails every workflow task, as one does whose process is killed over and over."""
    client = await Client.connect(settings.temporal_address)
    queue, end = TaskQueue(name=settings.control_queue), time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        request = PollWorkflowTaskQueueRequest(namespace=client.namespace, task_queue=queue, identity="failing")
        with suppress(RPCError):  # no task in the time that is left
            task = await client.workflow_service.poll_workflow_task_queue(request, timeout=timedelta(seconds=left_s))
            failed = RespondWorkflowTaskFailedRequest(
                namespace=client.namespace, task_token=task.task_token, identity="failing"
            )
            if task.task_token:
                await client.workflow_service.respond_workflow_task_failed(failed)


@pytest.mark.parametrize("fails", drawn(["its code", "its workflow task"], 1))
def test_a_run_that_does_not_answer_for_a_step_is_503(temporal_address: str, tmp_path: Path, fails: str) -> None:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{time.time_ns()}")
    with serving(settings) as service, service.http() as api:
        run_id = api.post("/runs/rl", json={"model": "org/tiny"}).json()["run_id"]
        if fails == "its code":
            with polling(settings):
                answer = api.get(f"/runs/{run_id}/steps/{UNANSWERED_STEP}")
        else:
            with ThreadPoolExecutor(1) as threads:
                failing = threads.submit(asyncio.run, _fail_tasks(settings, 10))
                answers = []
                while not failing.done():
                    answers.append(api.get(f"/runs/{run_id}/steps/1", timeout=300))
                    time.sleep(0.1)  # a key may ask 100 times a second
                failing.result()
            assert {each.status_code for each in answers} == {503}
            answer = answers[-1]
        assert answer.status_code == 503, answer.text
        assert run_id in answer.json()["error"]["message"]
        with polling(settings):
            api.post(f"/runs/{run_id}/finish")
            wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run ends")


def test_what_a_killed_service_was_receiving_is_removed(temporal_address: str, tmp_path: Path) -> None:
    uploads_folder(tmp_path).mkdir(parents=True)
    (uploads_folder(tmp_path) / "half").write_bytes(b"half")
    with serving(Settings(root=tmp_path, temporal_address=temporal_address)):
        assert not uploads_folder(tmp_path).exists()


def test_a_store_that_is_away_is_503(temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-value")
    s3 = S3Settings(endpoint_url=f"http://127.0.0.1:{free_port()}", region="us-east-1")
    settings = Settings(root=tmp_path, temporal_address=temporal_address, store_uri="s3://bucket/prefix", s3=s3)
    with serving(settings) as service, service.http() as api:
        answer = api.post("/runs/sft", json=sft())
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "unavailable"
        assert "a-secret-value" not in answer.text and "Traceback" not in answer.text
        assert api.get("/health").json()["store"] == "away"


class LosesAnswers(LocalStore):
    """Writes nothing, or writes and does not say so, of what a run's record is."""

    def __init__(self, root: Path, writes: bool) -> None:
        super().__init__(root)
        self.writes = writes

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if not key.endswith("/run.json"):
            return super().put_if_absent(key, data)
        if self.writes:
            super().put_if_absent(key, data)
        raise StoreUnavailable("the answer was lost")


async def test_a_run_is_accepted_whatever_the_store_answered(tmp_path: Path) -> None:
    """Its row is there: its record is put before it starts."""
    run = SFTRun.model_validate(sft(seed=SUCCEEDS, dtype="float32"))
    for writes in (True, False):
        root = tmp_path / str(writes)
        settings = Settings(root=root)
        backend = Backend(settings, LosesAnswers(root / "store", writes), open_database(settings))
        engine.upgrade(backend.database)
        record, is_new = await backend.runs.accept("sft-1", run, "default", None, Source())
        assert record.run == run and is_new
        assert (await backend.runs.accept("sft-1", run, "default", None, Source())) == (record, False)
        listed = await backend.runs.page("default", limit=10)
        assert [one.run_id for one in listed.runs] == ["sft-1"]
        backend.database.close()


def test_who_still_waits_when_the_service_leaves_is_told_so(temporal_address: str, tmp_path: Path) -> None:
    """Questions that nobody answers, by a client of each API; the service does not wait for them longer than its grace.

    An event stream, whose answer has begun, ends.
    """
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"control-{time.time_ns()}")
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
    waits = {
        "/api/v1/preview": {"source": {"uri": "file:///rows.jsonl"}, "model_uri": "org/tiny"},
        "/v1/fine_tuning/alpha/graders/run": {"grader": grader, "model_sample": "a", "item": {}},
    }
    with ThreadPoolExecutor(len(waits)) as threads:
        with serving(settings) as service, service.http() as api:

            def ask(path: str) -> httpx.Response:
                with service.http() as mine:
                    return mine.post(f"{service.url}{path}", json=waits[path], timeout=300)

            asked = [threads.submit(ask, path) for path in waits]
            wait_until(lambda: _num_waiting(settings) == len(waits), "both are asked")
            assert api.get("/health").status_code == 200
        answers = [answer.result() for answer in asked]
    for path, answer in zip(waits, answers, strict=True):
        assert answer.status_code == 503, (path, answer.text)
        assert answer.headers["retry-after"] == "2" and answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert error["type"] == ("unavailable" if path.startswith("/api/") else "server_error")
        assert "the service is leaving" in error["message"]


def _num_waiting(settings: Settings) -> int:
    async def count() -> int:
        client = await Client.connect(settings.temporal_address)
        return (await client.count_workflows(f'TaskQueue = "{settings.control_queue}"')).count

    return asyncio.run(count())


CONTENT = b'{"text": "a"}\n' * 100
HELD = "default"  # of which tenant requests are held
_PATIENCE_S = 300


class SlowStore(ThreadingHTTPServer):
    """What is in front of an S3 server and hands requests on, those about one tenant's files when they are let go."""

    def __init__(self, server: S3Server) -> None:
        super().__init__(ANY_PORT, _Passing)
        self.behind = server.endpoint_url
        self.held: SimpleQueue[threading.Event] | None = None

    @property
    def settings(self) -> S3Settings:
        return S3Settings(endpoint_url=f"http://127.0.0.1:{self.server_port}", region="us-east-1")


class _Passing(Quiet):
    server: SlowStore
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.body()
        if self.server.held is not None and f"/{HELD}/" in self.path:
            goes_on = threading.Event()
            self.server.held.put(goes_on)
            assert goes_on.wait(_PATIENCE_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        url = f"{self.server.behind}{self.path}"
        answer = httpx.request(self.command, url, content=body, headers=headers, trust_env=False)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = answer.headers.get("content-length", "0") if self.command == "HEAD" else str(len(answer.content))
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass


@pytest.fixture
def slow_store(s3_server: S3Server) -> Iterator[SlowStore]:
    with served(SlowStore(s3_server)) as store:
        yield store


@pytest.mark.parametrize("seconds", drawn([1, 4, 18], 1))
def test_a_store_request_that_lasts_keeps_no_other_tenant_waiting(
    temporal_address: str, s3_server: S3Server, slow_store: SlowStore, tmp_path: Path, seconds: int
) -> None:
    """Longer than a writer waits for the database, too: each request is let go when the other tenant has its answers.

    Of what is uploaded and deleted meanwhile by either, the store, the quotas and the audit log say the same.
    """
    store = f"{s3_server.uri}/slow-{time.time_ns()}"
    settings = Settings(root=tmp_path, temporal_address=temporal_address, store_uri=store, s3=slow_store.settings)
    with serving(settings) as service, service.http() as ours, service.http(key_of_acme(service)) as theirs:
        before, others = stored(ours), list[tuple[str, str]]()

        def ask() -> None:
            number = len(others)
            made = theirs.post("/files", params={"name": f"{number}.jsonl"}, content=CONTENT)
            assert made.status_code in (200, 201), made.text
            gone = theirs.delete(f"/files/{made.json()['file_id']}")
            assert gone.is_success, gone.text
            others.extend((answer.headers["x-request-id"], answer.request.method) for answer in (made, gone))
            assert audited(theirs) == others, "of another tenant, while the store keeps one waiting"

        with held(slow_store, ask, seconds):
            made = ours.post("/files", params={"name": "a.jsonl"}, content=CONTENT)
        assert made.status_code in (200, 201), made.text
        file_id = made.json()["file_id"]
        assert ours.get(f"/files/{file_id}/content").content == CONTENT
        assert stored(ours) > before and others
        with held(slow_store, ask, seconds):
            gone = ours.delete(f"/files/{file_id}")
        assert gone.is_success, gone.text
        assert ours.get(f"/files/{file_id}").status_code == 404
        assert stored(ours) == before
        mine = [(answer.headers["x-request-id"], answer.request.method) for answer in (made, gone)]
        assert [each for each in audited(ours) if each in mine] == mine


@contextmanager
def held(store: SlowStore, meanwhile: Callable[[], None], seconds: float) -> Iterator[None]:
    """Hold each request of the block to the store until `meanwhile` is done, and the first one so many seconds."""
    store.held = waiting = SimpleQueue[threading.Event | None]()  # type: ignore[assignment]

    def let_go() -> None:
        until = None
        while (request := waiting.get(timeout=_PATIENCE_S)) is not None:
            until = until or time.monotonic() + seconds
            try:
                meanwhile()
                time.sleep(max(0.0, until - time.monotonic()))
            except BaseException:
                store.held = None  # the test has failed: nothing waits any more
                raise
            finally:
                request.set()

    with ThreadPoolExecutor(1) as thread:
        letting = thread.submit(let_go)
        try:
            yield
        finally:
            store.held = None
            waiting.put(None)
            letting.result()


def stored(api: httpx.Client) -> int:
    return int(api.get("/usage").json()["stored_bytes"])


def audited(api: httpx.Client) -> list[tuple[str, str]]:
    """The requests about files in the tenant's audit log, oldest first."""
    entries = api.get("/audit").json()["entries"]
    return [(each["request_id"], each["method"]) for each in entries[::-1] if each["path"].startswith("/api/v1/files")]


async def test_commands_that_arrive_at_once_are_told_together(
    temporal_address: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Temporal has at most ten updates of a workflow in progress, and refuses others."""
    settings, many = settings_below(tmp_path, temporal_address), 60
    with serving(settings) as service, service.http() as api, ThreadPoolExecutor(many) as senders:
        run_id = api.post("/sessions", json={"model": str(tiny_model)}).json()["run_id"]

        def send(number: int) -> int:
            return api.put(f"/sessions/{run_id}/commands/{number}", json={"kind": "save_state"}).status_code

        sent = [senders.submit(send, number) for number in range(1, many + 1)]
        store, keys = open_store(settings.store, settings.s3), RunKeys(run_id)
        wait_until(lambda: all(store.head(keys.command(n)) for n in range(1, many + 1)), "all are stored")
        with polling(settings):  # until now no host took the first update
            assert {each.result() for each in sent} == {202}
        history = await (await Client.connect(temporal_address)).get_workflow_handle(run_id).fetch_history()
    accepted = [e for e in history.events if e.HasField("workflow_execution_update_accepted_event_attributes")]
    assert 2 <= len(accepted) <= 6
