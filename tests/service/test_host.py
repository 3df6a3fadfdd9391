"""The host process: it starts, says what it lacks, and leaves when told to."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from temporalio.client import Client

from service.host import connect, control_worker, serve
from shared.settings import Settings
from tests.conftest import free_port


def spawn(role: str, address: str, root: Path) -> subprocess.Popen:
    environment = {**os.environ, "LONGSHORE_TEMPORAL_ADDRESS": address}
    command = [sys.executable, "-m", "service.host", "--role", role, "--root", str(root)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("role", ["control", "gpu", "sampler"])
def test_a_host_leaves_when_it_is_told_to(role: str, temporal_address: str, tmp_path: Path) -> None:
    host = spawn(role, temporal_address, tmp_path)
    assert host.stderr is not None
    lines = iter(host.stderr.readline, "")
    assert any("polls default" in line for line in lines)
    host.send_signal(signal.SIGTERM)
    assert host.wait(15) == 0
    host.stderr.close()


async def test_a_server_that_does_not_answer_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"no Temporal server at {address}"):
        await connect(Settings(temporal_address=address), patience_s=0.5)


async def test_a_control_host_answers_for_every_activity_that_workflows_ask_for(
    temporal_address: str, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"c-{uuid.uuid4().hex[:6]}")
    client: Client = await connect(settings)
    with ThreadPoolExecutor(32) as threads:
        worker = control_worker(client, settings, threads)
        names = {activity.__temporal_activity_definition.name for activity in worker.config()["activities"]}
    assert names >= {"resolve_model", "resolve_adapter", "download", "tokenize", "pack", "preview", "find_checkpoint"}
    assert names >= {"publish", "record_result", "reopen", "track"}


async def test_a_host_polls_until_it_is_stopped(temporal_address: str, tmp_path: Path) -> None:
    stopped = asyncio.Event()
    settings = Settings(root=tmp_path, temporal_address=temporal_address, shape=uuid.uuid4().hex[:6])
    serving = asyncio.create_task(serve("gpu", settings, stopped))
    await asyncio.sleep(0.5)
    assert not serving.done()
    stopped.set()
    await asyncio.wait_for(serving, 15)
