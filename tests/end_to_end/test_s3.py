"""The same spine with its store on S3: nothing lies on a shared disk."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.client import Client, Pending
from longshore.commands import Datum
from longshore.layout import Layout
from longshore.training import Lora, SessionRun
from service.dev.connection import Connection
from shared.fence import Fence
from shared.jobs.job import Job
from shared.storage.artifacts import sha256_file
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, open_store
from tests.conftest import S3Server
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.stack import Answer, Stack, started
from tests.end_to_end.test_processes import Watch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3_settings(s3_server: S3Server) -> dict[str, str]:
    return {
        "LONGSHORE_STORE_URI": f"{s3_server.uri}/stack",
        "LONGSHORE_S3__ENDPOINT_URL": s3_server.endpoint_url,
        "LONGSHORE_S3__REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def s3_stack(s3_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(tmp_path_factory.mktemp("s3") / "stack", **QUICK, **s3_settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def s3_store(s3_server: S3Server, s3_settings: dict[str, str]) -> ObjectStore:
    return open_store(s3_settings["LONGSHORE_STORE_URI"], s3_server.settings)


def told_of_s3(watch: Watch) -> set[str]:
    return {kind for kind, seen in watch.seen.items() if "S3" in seen.secrets}


def test_a_run_whose_store_is_s3(
    s3_stack: Stack,
    s3_store: ObjectStore,
    s3_settings: dict[str, str],
    sft_options: list[str],
    undisturbed: Answer,
    tmp_path: Path,
) -> None:
    """Neither who trains nor who reads the data is told how to open the store; by hand the operator's own way does."""
    with Watch(s3_stack) as watch:
        answer = s3_stack.cli(*sft_options, "--wait").json
    assert {"worker", "data step"} <= watch.seen.keys()
    assert told_of_s3(watch) == {"web service", "control host", "GPU host", "sampler host"}
    s3_stack.cli("download", answer["run_id"], "--into", str(tmp_path / "adapter"))
    assert answer["adapter"].startswith(s3_store.uri)
    wanted = sha256_file(Path(undisturbed.json["adapter"].removeprefix("file://")) / "adapter_model.safetensors")
    key = answer["adapter"].removeprefix(s3_store.uri + "/") + "/adapter_model.safetensors"
    assert hashlib.sha256(s3_store.get_bytes(key)).hexdigest() == wanted
    assert sha256_file(tmp_path / "adapter" / "adapter_model.safetensors") == wanted
    job = tmp_path / "job.json"
    job.write_bytes(s3_store.get_bytes(RunKeys(answer["run_id"]).job("000001", Fence(epoch=1))))
    assert Job.model_validate_json(job.read_bytes()).plan.model.uri.startswith("s3://")
    command = [sys.executable, "-m", "megatron_worker", "--once", str(job), "--into", str(tmp_path / "by-hand")]
    environment = {**os.environ, **s3_settings, "LONGSHORE_ROOT": str(tmp_path / "root")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert sha256_file(sorted((tmp_path / "by-hand").rglob("adapter_model.safetensors"))[-1]) == wanted


def test_a_session_goes_back_to_a_state_that_s3_holds(s3_stack: Stack, tiny_model: Path) -> None:
    """On two ranks, none of which is told how to open the store."""
    data = (Datum(tokens=tuple(range(3, 15))),)
    connection = Connection.read(s3_stack.root)
    assert connection is not None
    with Client(connection.api_url, connection.api_key) as client, Watch(s3_stack) as watch:
        request = SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=64, layout=Layout(tp=2))
        session = client.open(request)

        def train() -> Pending:
            session.forward_backward(data)
            session.optim_step(0.05)
            return session.forward(data)

        train().result(900)
        saved = session.save_state().result(900)
        before, after = session.forward(data).result(900).data, train().result(900).data
        session.load_state(f"{session.id}:step-{saved.step}").result(900)
        assert session.forward(data).result(900).data == before != after
        assert train().result(900).data == after
        session.close()
    assert told_of_s3(watch) & {"worker", "data step", "any other"} == set() and "worker" in watch.seen


def test_a_store_that_is_not_there_is_named(s3_server: S3Server, sft_options: list[str], tmp_path: Path) -> None:
    settings = {
        **QUICK,
        "LONGSHORE_STORE_URI": "s3://longshore/x",
        "LONGSHORE_S3__ENDPOINT_URL": "http://127.0.0.1:9",
        "LONGSHORE_S3__REGION": "us-east-1",
    }
    with started(tmp_path / "stack", **settings) as stack:
        answer = stack.cli(*sft_options, "--wait", check=False)
        assert stack.processes("service")
    assert stack.processes() == [], "stopped, it leaves no process"
    assert answer.code not in (0, 2)
    assert "s3://longshore/x" in answer.stderr
    assert "could not connect" in answer.stderr.lower()
    assert "Traceback" not in answer.stderr
    assert "test-secret" not in answer.stderr + answer.stdout
