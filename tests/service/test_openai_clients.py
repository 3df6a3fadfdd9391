"""OpenAI's own clients, of three major versions, against the web service with stand-in workflows."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from longshore.runs import RunRecord
from service.backend import Backend
from service.database.engine import Database, DocumentRow, open_database
from service.files import UploadRecord
from shared.errors import NotFound
from shared.storage import paths
from shared.storage.paths import RunKeys
from tests.depth import drawn
from tests.service.conftest import KEY, Service, started

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
ALL_VERSIONS = ("openai-1", "openai-2", "openai-3")
VERSIONS = drawn(ALL_VERSIONS, 0, always=ALL_VERSIONS[-1:])


def drive(version: str, url: str, flaky_url: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.service.openai_driver", url, flaky_url, KEY, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CLIENTS / version), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def losing_answers(port: int) -> Iterator[str]:
    """A proxy that hands requests on and, of the first attempt to make a job, swallows the answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            request = whole_message(client)
            head = request.split(b"\r\n\r\n")[0].lower()
            server.sendall(request)
            answer = b"".join(iter(lambda: server.recv(65536), b""))
            is_lost = head.startswith(b"post /v1/fine_tuning/jobs ") and b"x-stainless-retry-count: 0" in head
            if not is_lost:
                client.sendall(answer)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        listener.close()


def whole_message(client: socket.socket) -> bytes:
    """A request with its body, and a header that has the server close the connection behind its answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.split(b"\r\n")
    lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += client.recv(65536)
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*kept, b"connection: close", b"", b""]) + body


@pytest.fixture(scope="module")
def told_by_all(service: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each version told. They ask at the same time, as strangers do."""
    if not all((CLIENTS / version).is_dir() for version in VERSIONS):
        pytest.fail("the clients are not installed: requirements/clients.sh")
    with losing_answers(int(service.url.rsplit(":", 1)[1])) as flaky_url, ThreadPoolExecutor(len(VERSIONS)) as threads:

        def told(version: str) -> dict[str, Any]:
            return drive(version, f"{service.url}/v1", flaky_url, tmp_path_factory.mktemp(version))

        return dict(zip(VERSIONS, threads.map(told, VERSIONS), strict=True))


@pytest.fixture(params=VERSIONS)
def told(request: pytest.FixtureRequest, told_by_all: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return told_by_all[request.param]


@pytest.fixture
def files(told: dict[str, Any]) -> dict[str, Any]:
    return told["files"]


@pytest.fixture
def uploads(told: dict[str, Any]) -> dict[str, Any]:
    return told["uploads"]


@pytest.fixture
def jobs(told: dict[str, Any]) -> dict[str, Any]:
    return told["jobs"]


@pytest.fixture
def graders(told: dict[str, Any]) -> dict[str, Any]:
    return told["graders"]


def test_each_is_of_another_version(told_by_all: dict[str, dict[str, Any]]) -> None:
    assert [told_by_all[version]["version"].split(".")[0] for version in VERSIONS] == [name[-1] for name in VERSIONS]


def test_files_are_made_listed_read_and_deleted(files: dict[str, Any]) -> None:
    made = [item["id"] for item in files["made"]]
    assert files["made"][1] == files["retrieved"]
    assert files["retrieved"]["filename"] == "train_1.jsonl"
    assert files["retrieved"]["bytes"] == len(files["content"])
    assert files["retrieved"]["purpose"] == "fine-tune"
    assert files["again"] not in made, "the same bytes, sent again, can be deleted on their own"
    assert files["held"]["purpose"] == "evals"
    assert set(made) <= set(files["listed"])
    assert {*made, files["held"]["id"]} <= set(files["also_held"])
    assert [item for item in files["oldest"] if item in made] == made
    assert files["gone"]["status"] == 404


def test_files_that_are_refused(files: dict[str, Any]) -> None:
    assert files["purpose"]["class"] == "BadRequestError"
    assert files["purpose"]["param"] == "purpose"
    assert "fine-tune" in files["purpose"]["message"]
    assert files["empty"]["status"] == 400
    assert files["after"]["class"] == "NotFoundError"


def test_a_file_in_parts(uploads: dict[str, Any]) -> None:
    assert uploads["created"]["status"] == "pending"
    assert uploads["created"]["expires_at"] == pytest.approx(uploads["created"]["created_at"] + 3600, abs=1)
    assert uploads["done"]["status"] == "completed"
    assert uploads["done"]["file"]["bytes"] == uploads["created"]["bytes"]
    assert uploads["again"] == uploads["done"]["file"]["id"]
    assert uploads["is_content"] and uploads["is_chunked"]


def test_parts_that_do_not_fit_are_refused(uploads: dict[str, Any]) -> None:
    assert uploads["md5"]["param"] == "md5"
    assert uploads["short"]["param"] == "part_ids"
    assert uploads["unknown"]["param"] == "part_ids.1"
    assert uploads["cancelled"] == "cancelled"
    assert uploads["late"]["class"] == "ConflictError"
    assert uploads["purpose"]["param"] == "purpose"


def test_a_job_is_shown_as_it_was_asked_for(told: dict[str, Any], jobs: dict[str, Any], service: Service) -> None:
    first, version = jobs["first"], told["version"]
    assert first["object"] == "fine_tuning.job"
    assert first["model"] == "file:///models/tiny"
    assert first["training_file"] == first["validation_file"]
    assert first["metadata"] == {"team": "quay", "client": version}
    [integration] = first["integrations"]
    assert (integration["wandb"]["project"], integration["wandb"]["tags"]) == ("harbour", ["a"])
    chosen = {"n_epochs": 2, "batch_size": 2, "learning_rate_multiplier": 0.5}  # of 120 examples
    assert first["hyperparameters"] == chosen
    assert first["method"]["type"] == "supervised"
    assert first["method"]["supervised"]["hyperparameters"] == chosen
    assert jobs["dpo"]["method"]["dpo"]["hyperparameters"]["beta"] == 0.2
    record = RunRecord.model_validate_json(service.store.get_bytes(RunKeys(first["id"]).record))
    run = record.run
    assert run.kind == "sft"
    assert (run.epochs, run.batch_size, run.learning_rate) == (2, 2, pytest.approx(0.5e-4))
    assert (run.trainable.rank, run.max_tokens) == (4, 256)
    assert run.eval_every == 12, "a tenth of 120 steps"
    assert run.name == f"harbour-bot-{version}"
    assert record.source.wandb is not None and record.source.wandb.project == "harbour"


def test_a_job_ends_in_every_way(jobs: dict[str, Any]) -> None:
    done = jobs["done"]
    assert done["status"] == "succeeded"
    assert len(done["result_files"]) == 2
    assert jobs["failed"]["status"] == "failed"
    assert jobs["failed"]["error"]["message"] == "train.jsonl:3: no assistant turn"
    assert jobs["paused"]["status"] == "paused" and jobs["paused"]["finished_at"] is None
    assert jobs["paused"]["trained_tokens"] is None
    assert jobs["waits"] == "running"
    assert jobs["cancelled"]["status"] == "cancelled"
    assert jobs["resumed"] == "succeeded"


def test_jobs_are_found_by_metadata_in_pages(jobs: dict[str, Any]) -> None:
    assert jobs["found"] == [*reversed(jobs["others"]), jobs["first"]["id"]]
    assert jobs["one"] == [jobs["others"][1]]
    assert jobs["odd"] == [jobs["labelled"]], "names may hold whatever has a meaning in JSON paths"


def test_events_come_newest_first_in_pages(jobs: dict[str, Any]) -> None:
    messages = [event["message"] for event in jobs["events"]]
    assert messages[0] == "The job has successfully completed"
    assert messages[-1] == f"Created fine-tuning job: {jobs['first']['id']}"
    assert len({event["id"] for event in jobs["events"]}) == len(messages) >= 3
    assert jobs["checkpoints"] == []


@pytest.mark.parametrize(
    ("case", "status", "param"),
    [
        ("file", 400, "training_file"),
        ("purpose", 400, "training_file"),
        ("ours", 400, "longshore.group_size"),
        ("reference", 400, "longshore.reference"),
        ("event", 400, "after"),
        ("hosted", 400, "model"),
        ("job", 404, None),
        ("key", 401, None),
    ],
)
def test_what_is_refused_names_the_parameter(jobs: dict[str, Any], case: str, status: int, param: str | None) -> None:
    found = jobs["refusals"][case]
    assert (found["status"], found["param"]) == (status, param), found
    assert found["type"] == ("authentication_error" if status == 401 else "invalid_request_error")
    assert found["code"] and found["message"]
    assert found["request_id"].startswith("req-")


def test_a_refusal_for_good_is_not_retried(jobs: dict[str, Any]) -> None:
    assert jobs["succeeded_twice"]["class"] == "ConflictError"


def test_graders_are_run_and_validated(graders: dict[str, Any]) -> None:
    assert graders["same"]["reward"] == 1
    assert graders["same"]["metadata"]["scores"] == {"same": 1}
    assert (graders["multi"]["reward"], graders["multi"]["sub_rewards"]) == (4, {"a": 0, "b": 4})
    assert graders["broken"]["metadata"]["errors"]["python_grader_runtime_error"] is True
    assert "division by zero" in graders["broken"]["metadata"]["errors"]["python_grader_runtime_error_details"]
    assert graders["missing"]["metadata"]["errors"]["invalid_variable_error"] is True
    assert graders["valid"]["grader"]["name"] == "length"
    assert graders["operation"]["status"] == 400 and graders["operation"]["param"].endswith("operation")


def test_a_retry_makes_no_second_job(told: dict[str, Any]) -> None:
    retried = told["retried"]
    first, second = retried["jobs"]
    assert first != second, "the same request, sent again on purpose, is another job"
    assert sorted(retried["listed"]) == sorted(retried["jobs"]), "each answer was lost once, and no job was made twice"
    assert len(set(retried["keyed"])) == 1


def test_a_result_is_its_tenant_s_file(service: Service, acme: str, told_by_all: dict[str, dict[str, Any]]) -> None:
    """Jobs, files and uploads of another tenant's are nobody's at every route: tests/security/test_tenants_apart.py."""
    result = told_by_all[VERSIONS[0]]["jobs"]["done"]["result_files"][0]
    with service.http(acme) as theirs, service.http() as ours:
        theirs.base_url = ours.base_url = service.url
        assert theirs.get(f"/v1/files/{result}").status_code == 404
        assert ours.get(f"/v1/files/{result}/content").text.startswith("step")


def test_a_run_of_another_api_is_no_job(service: Service) -> None:
    with service.http() as api:
        run_id = started(api)
        api.base_url = service.url
        assert api.get(f"/v1/fine_tuning/jobs/{run_id}").status_code == 404
        refused = api.post(f"/v1/fine_tuning/jobs/{run_id}/cancel")
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "invalid_request_error")
        conflict = api.post("/v1/uploads/nothing/cancel")
        assert conflict.status_code == 404


def test_old_parts_are_dropped(service: Service) -> None:
    with service.http() as api:
        api.base_url = service.url
        request = {"filename": "a.jsonl", "bytes": 3, "mime_type": "text/jsonl", "purpose": "fine-tune"}
        upload = api.post("/v1/uploads", json=request).json()["id"]
        api.post(f"/v1/uploads/{upload}/parts", files={"data": ("part", b"{}\n")})
        database = open_database(service.settings)
        _expire(database, upload, time.time() - 1)
        late = api.post(f"/v1/uploads/{upload}/parts", files={"data": ("part", b"{}\n")})
        assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
    backend = Backend(service.settings, service.store, database)
    assert list(service.store.list(paths.upload_part("default", upload)))
    asyncio.run(backend.uploads.prune())
    assert not list(service.store.list(paths.upload_part("default", upload)))
    assert asyncio.run(backend.uploads.show("default", upload)).state == "expired"
    _expire(database, upload, time.time() - 90_000)
    asyncio.run(backend.uploads.prune())
    with pytest.raises(NotFound):
        asyncio.run(backend.uploads.show("default", upload))
    database.close()


def _expire(database: Database, upload: str, at: float) -> None:
    def change(session: Session) -> None:
        row = session.get(DocumentRow, ("default", "upload", upload))
        row.body = UploadRecord.model_validate_json(row.body).model_copy(update={"expires_at": at}).model_dump_json()

    database.write(change)
