"""The same spine with its store on S3: nothing lies on a shared disk."""

import hashlib
import os
import re
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
from shared.storage.paths import RunKeys, counted_records, tenant_folder
from shared.storage.store import ObjectStore, open_store
from shared.storage.uses import SHARED
from tests.conftest import S3Server
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.runs import Groups, train
from tests.end_to_end.stack import Answer, Stack, started, wait_until
from tests.end_to_end.test_processes import Watch
from tests.end_to_end.victims import halt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3_settings(s3_server: S3Server) -> dict[str, str]:
    return {
        "LONGSHORE_STORE_URI": f"{s3_server.uri}/stack",
        "LONGSHORE_S3__ENDPOINT_URL": s3_server.endpoint_url,
        "LONGSHORE_S3__REGION": "us-east-1",
        # Whatever has ended may go, when a test asks for it.
        **{f"LONGSHORE_RETENTION__{kind}_DAYS": "0" for kind in ("CHECKPOINTS", "DATA", "SAMPLES", "LOGS", "SESSIONS")},
    }


@pytest.fixture(scope="module")
def s3_stack(s3_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(tmp_path_factory.mktemp("s3") / "stack", **QUICK, **s3_settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def s3_store(s3_server: S3Server, s3_settings: dict[str, str]) -> ObjectStore:
    return open_store(s3_settings["LONGSHORE_STORE_URI"], s3_server.settings)


def weights_sha256(store: ObjectStore, adapter: str) -> str:
    key = adapter.removeprefix(f"{store.uri}/") + "/adapter_model.safetensors"
    return hashlib.sha256(store.get_bytes(key)).hexdigest()


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
    assert weights_sha256(s3_store, answer["adapter"]) == wanted
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


def _num_checkpoints(store: ObjectStore, run_id: str) -> int:
    return sum(info.key.endswith("/manifest.json") for info in store.list(f"{RunKeys(run_id).checkpoints}/"))


def _stored_bytes(store: ObjectStore, tenant: str) -> int:
    """What lies in the store of a tenant that has it alone. Of models nobody notes the manifests."""
    own = ("runs/", *SHARED, f"{tenant_folder(tenant)}/", *counted_records(tenant))
    return sum(
        i.size for i in store.list("") if i.key.startswith(own) and not re.match("models/.*/manifest.json", i.key)
    )


def test_what_policies_let_go_is_gone_and_whatever_is_needed_goes_on(
    s3_stack: Stack,
    s3_store: ObjectStore,
    sft_options: list[str],
    rl_options: list[str],
    groups: Groups,
    undisturbed: Answer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Everything that has ended may go at once. Runs of each kind go on, are resumed, downloaded, asked, made again."""
    stack, data = s3_stack, (Datum(tokens=tuple(range(3, 15))),)
    wanted = sha256_file(Path(undisturbed.json["adapter"].removeprefix("file://")) / "adapter_model.safetensors")
    done = stack.cli(*sft_options, "--wait").json["run_id"]
    cut = stack.cli(*sft_options).json["run_id"]
    wait_until(lambda: _num_checkpoints(s3_store, cut) > 1, "two checkpoints")
    halt(stack, cut, "cancel")
    rl = stack.cli(*rl_options).json["run_id"]
    train(stack, rl, groups, 1)
    stack.cli("cancel", rl)
    for run_id in (cut, rl):
        stack.cli("watch", run_id, check=False)
    connection = Connection.read(stack.root)
    assert connection is not None
    with Client(connection.api_url, connection.api_key) as client:
        session = client.open(SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=64))
        session.forward_backward(data)
        session.optim_step(0.05)
        saved = session.save_state().result(900)
        before = session.forward(data).result(900).data
        dry = stack.cli("gc", "--dry-run", "--json").json["report"]
        report = stack.cli("gc", "--json").json["report"]
        assert report["num_withdrawn"] == 0 and report["held_back_by"] is None
        assert {row["what"] for row in report["freed"]} == {row["what"] for row in dry["freed"]}
        assert {"checkpoints", "data", "logs"} <= {row["what"] for row in report["freed"]}
        assert list(s3_store.list("tokenized/")) == [] and _num_checkpoints(s3_store, cut) == 1
        session.load_state(f"{session.id}:step-{saved.step}").result(900)
        assert session.forward(data).result(900).data == before
        session.close()
        wait_until(lambda: session.status()["state"] == "succeeded", "the session's end")
    stack.cli("gc", "--json")
    assert stack.cli("usage", "--json").json["stored_bytes"] == _stored_bytes(s3_store, "default")
    assert weights_sha256(s3_store, stack.cli("resume", cut, "--wait", "--json").json["adapter"]) == wanted
    stack.cli("resume", rl)
    assert train(stack, rl, groups, 2)["policy_version"] == 2
    assert stack.cli("rm", rl, check=False).code == 100
    stack.cli("finish", rl)
    again = stack.cli(*sft_options, "--wait").json
    assert weights_sha256(s3_store, again["adapter"]) == wanted
    stack.cli("rm", done)
    assert stack.cli("get", done, check=False).code == 102
    stack.cli("download", f"{done}:v1", "--into", str(tmp_path / "adapter"))
    assert sha256_file(tmp_path / "adapter" / "adapter_model.safetensors") == wanted
    said = stack.cli("chat", done, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
    assert said.code == 0 and said.stdout.strip(), said


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
