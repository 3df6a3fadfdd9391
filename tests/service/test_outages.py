"""What stands behind the service goes away: it says so, loses nothing, and goes on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.files import uploads_folder
from service.run_views import RunView
from shared.paths import RunKeys, run_index
from shared.runs import RunRecord, SFTRun
from shared.settings import S3Settings, Settings
from shared.store import open_store
from tests.conftest import free_port
from tests.service.conftest import polling, serving, sft, wait_until
from tests.service.stand_in import SUCCEEDS, WAITS

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
            wait_until(lambda: api.get("/health").status_code == 200, "Temporal is back")
            with polling(settings):
                wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run succeeds")
        # Temporal is gone again, with its database: an ended run is still known.
        assert api.get(f"/runs/{run_id}").json()["state"] == "succeeded"


def test_a_run_that_an_operator_terminates_is_shown_as_failed(service, settings: Settings, api) -> None:
    run_id = api.post("/runs/sft", json=sft(seed=WAITS)).json()["run_id"]
    command = [TEMPORAL, "workflow", "terminate", "--address", settings.temporal_address, "--workflow-id", run_id]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    view = RunView.model_validate_json(api.get(f"/runs/{run_id}").content)
    assert view.state == "failed"
    assert view.problem is not None and "terminated" in view.problem.message
    assert api.post(f"/runs/{run_id}/resume").status_code == 202
    wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the resumed run succeeds")


def test_a_repeated_key_gives_an_ended_run_that_temporal_has_forgotten(tmp_path: Path) -> None:
    port = free_port()
    settings = Settings(root=tmp_path, temporal_address=f"127.0.0.1:{port}")
    headers = {"idempotency-key": "once and for all"}
    with serving(settings) as service, service.http() as api:

        def submitted() -> dict:
            wait_until(lambda: api.get("/health").status_code == 200, "Temporal answers")
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
    for run_id, record in (("sft-2-spoilt", b"{}"), (lost.run_id, lost.model_dump_json().encode())):
        store.put_bytes(run_index(run_id), b"")
        store.put_bytes(RunKeys(run_id).record, record)
    with serving(settings) as service, polling(settings), service.http() as api:
        wait_until(lambda: store.head(RunKeys(lost.run_id).result), "the sweep starts the other run")
        assert api.get(f"/runs/{lost.run_id}").json()["state"] == "succeeded"


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


def test_a_store_in_s3(temporal_address: str, tmp_path: Path, s3_server) -> None:
    settings = Settings(
        root=tmp_path,
        temporal_address=temporal_address,
        control_queue=f"control-{time.time_ns()}",
        store_uri=f"{s3_server.uri}/service",
        s3=s3_server.settings,
    )
    with serving(settings) as service, polling(settings), service.http() as api:
        uri = api.post("/files", params={"name": "train.jsonl"}, content=b'{"text": "a"}\n').json()["uri"]
        assert uri.startswith(f"{s3_server.uri}/service/uploads/")
        run_id = api.post("/runs/sft", json=sft(dataset={"uri": uri})).json()["run_id"]
        wait_until(lambda: api.get(f"/runs/{run_id}").json()["state"] == "succeeded", "the run succeeds")
        assert [run["run_id"] for run in api.get("/runs").json()["runs"]] == [run_id]
        assert service.store.head(RunKeys(run_id).result) is not None
