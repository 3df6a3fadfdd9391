"""A web service on loopback with a real Temporal server behind it, and a worker with stand-in workflows."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Worker

from activities.preview import PreviewDataset
from activities.record_result import RecordResult
from service.app import create_app
from service.auth import keys_path, remember_key
from shared.settings import DownloadSettings, Settings
from shared.store import ObjectStore, open_store
from tests.service.stand_in import RLStandIn, StandIn
from workflows.preview import PreviewWorkflow

KEY = "ls-test-key"
LONGSHORE = str(Path(sys.executable).parent / "longshore")


@dataclass(frozen=True)
class Answer:
    """What one CLI call said."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def longshore(*arguments: str, env: dict[str, str], cwd: Path | None = None, timeout_s: float = 60) -> Answer:
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

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30, trust_env=False)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LONGSHORE_API_URL": self.url, "LONGSHORE_API_KEY": KEY}

    def cli(self, *arguments: str, **environment: str) -> Answer:
        return longshore(*arguments, env=self.environment | environment, cwd=self.settings.root_path)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {timeout_s} s")


@contextmanager
def serving(settings: Settings, port: int = 0) -> Iterator[Service]:
    """uvicorn in a thread."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    remember_key(keys_path(settings.root_path), KEY)
    config = uvicorn.Config(create_app(settings), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
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
        client = await Client.connect(settings.temporal_address, data_converter=pydantic_data_converter)
        record = RecordResult(settings)
        with ThreadPoolExecutor(2) as threads:
            async with Worker(
                client,
                task_queue=settings.control_queue,
                workflows=[StandIn, RLStandIn, PreviewWorkflow],
                activities=[record.record_result, record.reopen, PreviewDataset(settings).preview],
                activity_executor=threads,
            ):
                ready.set()
                await asyncio.to_thread(stopped.wait)

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        stopped.set()
        thread.join(20)


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("service")
    return Settings(
        root=root,
        temporal_address=temporal_address,
        control_queue=f"control-{root.name}",
        download=DownloadSettings(file_roots=(root.parent,)),
    )


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    with serving(settings) as service, polling(settings):
        yield service


@pytest.fixture
def api(service: Service) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client


def sft(**changes: Any) -> dict[str, Any]:
    """The body of a small run."""
    body = {"model": "file:///models/tiny", "dataset": {"uri": "file:///data/train.jsonl"}, "steps": 4, "batch_size": 2}
    return body | changes
