"""A web service on loopback with a real Temporal server behind it, and a worker with stand-in workflows."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, event, select

from activities.grading.grade import Grade
from activities.host_context import HostContext
from activities.models.resolve import Resolve
from activities.records import RunRecords
from activities.sources.download import Download
from activities.tokenizing.tokenize import PreviewDataset
from longshore.accounts import QuotaSettings
from longshore.views import RunView
from service.accounts.tenants import Quotas
from service.app import create_app
from service.cli.main import main
from service.database.engine import Database, RunRow, open_database, upgrade
from service.host import control_workers
from service.host_http.server import config, listen_at, place_of
from service.runs.rows import RunRows, Uses
from service.temporal import connect_temporal
from shared.errors import NotFound
from shared.limits import RateLimitSettings
from shared.runs.status import RunChange, RunStatus
from shared.settings import DownloadSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys, published_version, version_claim
from shared.storage.store import LocalStore, ObjectStore, S3Store, open_store
from tests import forks
from tests.forks import Answer
from tests.service.postgres import new_database, postgres
from tests.service.stand_in import RLStandIn, StandIn
from tests.waiting import wait_until
from workflows.services import (
    GarbageWorkflow,
    GraderWorkflow,
    PreviewWorkflow,
    ScheduledRunWorkflow,
    SweepWorkflow,
    UntrainedModelWorkflow,
    UseWorkflow,
    WebhookWorkflow,
)
from workflows.session import SessionWorkflow

KEY = "ls-test-key"
STORE_REQUESTS = (
    *("put_bytes", "put_if_absent", "put_file", "get_bytes", "get_file", "read_range", "head", "list", "delete"),
)
LONGSHORE = str(Path(sys.executable).parent / "longshore")


_here = threading.local()
_asked_within: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def watched_transactions() -> Iterator[None]:
    """Note every request to a store that is made while its thread has a transaction of a database open."""

    def watched(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(store: ObjectStore, *arguments: Any, **named: Any) -> Any:
            if getattr(_here, "is_open", False):
                _asked_within.append(f"{name}{arguments[:1]}: {''.join(traceback.format_stack(limit=6))}")
            return ask(store, *arguments, **named)

        return asked

    def begins(_: object) -> None:
        _here.is_open = True

    def ends(_: object) -> None:
        _here.is_open = False

    heard = [(Engine, "begin", begins), (Engine, "commit", ends), (Engine, "rollback", ends)]
    with pytest.MonkeyPatch.context() as patched:
        for each in heard:
            event.listen(*each)
        for name in STORE_REQUESTS:
            for kind in (LocalStore, S3Store):
                patched.setattr(kind, name, watched(name, getattr(kind, name)))
        yield
        for each in heard:
            event.remove(*each)


@pytest.fixture(autouse=True)
def no_store_request_within_a_transaction(watched_transactions: None) -> Iterator[None]:
    """Every test of the service is one of this rule too: a store may take seconds, for which all writers would wait."""
    _asked_within.clear()
    yield
    assert not _asked_within, _asked_within[0]


Cli = Callable[..., Answer]


def longshore(*arguments: str, env: dict[str, str], cwd: Path | None = None, timeout_s: float = 300) -> Answer:
    """Run the command as a user does, with nothing on its stdin."""
    done = subprocess.run(
        [LONGSHORE, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Service:
    """A running service."""

    url: str
    settings: Settings

    @property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store, self.settings.s3)

    def rebuild(self) -> None:
        """Let the rows of runs say what results in the store say, which a test has changed."""
        database = open_database(self.settings)
        rows = RunRows(database, Quotas(QuotaSettings(), self.store, database))
        for run in database.write(lambda session: session.scalars(select(RunRow)).all()):
            with suppress(NotFound):
                status = RunStatus.model_validate_json(self.store.get_bytes(RunKeys(run.run_id).result))
                recording = rows.record(RunChange(status=status, at=time.time()))
                with ThreadPoolExecutor(1) as thread:  # a browser's loop may run in this one
                    thread.submit(asyncio.run, recording).result()
        database.close()

    def note_use(self, unit: str, run_id: str) -> None:
        """Let a run use a unit, as one does that begins from a checkpoint there."""
        database = open_database(self.settings)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, Uses(database).note(unit, run_id)).result()
        database.close()

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=300, trust_env=False)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LONGSHORE_API_URL": self.url, "LONGSHORE_API_KEY": KEY}

    def cli(self, *arguments: str, **environment: str) -> Answer:
        env, cwd = self.environment | environment, self.settings.root_path
        return forks.captured(main, ["longshore", *arguments], env, cwd, timeout_s=300)


def put_versions(
    store: ObjectStore,
    tenant: str,
    name: str,
    folder: Path,
    num_claimed: int,
    num_published: int,
    kind: str = "adapters",
) -> None:
    """Versions of an artifact as runs leave them that nobody asks for: claims, and what stands of them."""
    folder.mkdir(exist_ok=True)
    for version in range(1, num_claimed + 1):
        store.put_bytes(version_claim(tenant, kind, name, version), b'{"run_id":"r"}')
    for version in range(1, num_published + 1):
        (folder / "x").write_text(str(version))
        seal(folder)
        upload_artifact(store, published_version(tenant, kind, name, version), folder)


@contextmanager
def serving(settings: Settings, port: int = 0) -> Iterator[Service]:
    """uvicorn in a thread."""
    listener = listen_at(ip_address("127.0.0.1"), port)
    url = f"http://{place_of(listener)}"
    app = create_app(settings.model_copy(update={"api_key": KEY}))
    server = uvicorn.Server(config(app, settings.trusted_proxies, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the service starts")
        yield Service(url, settings)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def polling(settings: Settings) -> Iterator[None]:
    """A Temporal worker with the stand-in, in a thread."""
    stopped, ready = threading.Event(), threading.Event()

    async def work() -> None:
        client = await connect_temporal(settings)
        record = RunRecords(HostContext(settings))
        activities = [
            record.record_result,
            record.begin,
            PreviewDataset(HostContext(settings)).preview,
            Grade(HostContext(settings)).grade_one,
            Download(HostContext(settings)).download,
            Resolve(HostContext(settings)).resolve_model,
        ]
        workflows = [StandIn, RLStandIn, PreviewWorkflow, GraderWorkflow, UntrainedModelWorkflow]
        workflows += [
            ScheduledRunWorkflow,
            SweepWorkflow,
            WebhookWorkflow,
            SessionWorkflow,
            GarbageWorkflow,
            UseWorkflow,
        ]
        async with control_workers(client, settings.control_queue, activities, workflows):
            ready.set()
            await asyncio.to_thread(stopped.wait)

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    try:
        assert ready.wait(300)
        yield
    finally:
        stopped.set()
        thread.join(20)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('database')}/longshore.db"
    return new_database(request.getfixturevalue("postgres_server"), f"test-{time.time_ns()}")


@pytest.fixture(scope="module")
def database(database_url: str) -> Iterator[Database]:
    """Migrated, and all tests' of a file."""
    database = Database(database_url)
    upgrade(database)
    yield database
    database.close()


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return settings_below(tmp_path_factory.mktemp("service"), temporal_address)


def settings_below(root: Path, temporal_address: str) -> Settings:
    return Settings(
        root=root,
        temporal_address=temporal_address,
        control_queue=f"control-{root.name}",
        download=DownloadSettings(file_roots=(root.parent,)),
        rate_limit=RateLimitSettings(sign_in_burst=1000),  # every test of the page signs in
    )


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    with serving(settings) as service, polling(settings):
        yield service


@pytest.fixture
def cli(service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command, in this process: tests/service/test_cli.py starts it as users do, for seconds each time."""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["longshore", *arguments])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capfd.readouterr()
        return Answer(code, said.out, said.err)

    return call


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The arguments that submit a run with a local model folder and a local dataset."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train set.jsonl").write_text('{"text": "a"}\n')
    return [
        *("submit", "sft", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "train set.jsonl")),
        *("--steps", "4", "--batch-size", "2"),
    ]


@pytest.fixture
def api(service: Service) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client


def sft(**changes: Any) -> dict[str, Any]:
    """The body of a small run."""
    body = {"model": "file:///models/tiny", "dataset": {"uri": "file:///data/train.jsonl"}, "steps": 4, "batch_size": 2}
    return body | changes


@pytest.fixture(scope="module")
def acme(service: Service) -> str:
    """The key of another tenant's admin."""
    return key_of_acme(service)


def key_of_acme(service: Service) -> str:
    with service.http() as api:
        made = api.post("/tenants", json={"tenant": "acme", "title": "Acme"})
        assert made.status_code == 201, made.text
        return made.json()["key"]["key"]


@pytest.fixture
def theirs(service: Service, acme: str) -> Iterator[httpx.Client]:
    with service.http(acme) as client:
        yield client


def new_key(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = api.post("/keys", json=fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


def started(api: httpx.Client, **changes: Any) -> str:
    return submitted(api, **changes).run_id


def reaches(api: httpx.Client, run_id: str, state: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        view = api.get(f"/runs/{run_id}").json()
        return view if view["state"] == state else None

    return wait_until(look, f"{run_id} is {state}", timeout_s=300)


def submitted(api: httpx.Client, **changes) -> RunView:
    answer = api.post("/runs/sft", json=sft(**changes))
    assert answer.status_code == 201, answer.text
    return RunView.model_validate_json(answer.content)


def ended(api: httpx.Client, run_id: str) -> RunView:
    def look() -> RunView | None:
        view = RunView.model_validate_json(api.get(f"/runs/{run_id}").content)
        return view if view.state != "running" else None

    return wait_until(look, f"the end of {run_id}")
