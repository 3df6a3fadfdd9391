"""What a worker lacks is staged by its host: if the job or a command of its session names it, and nothing else."""

import shutil
import time
from pathlib import Path

import pytest

from activities.hosts.lease import JobStaging, Stager
from longshore.fields import Artifact, Fence
from shared.jobs.commands import LoadStored
from shared.jobs.job import Job, SessionPlan
from shared.settings import S3Settings
from shared.storage.artifacts import staged, upload_artifact
from shared.storage.files import StageAnswer, StageRequest, write_atomically
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, open_store
from tests.conftest import S3Server
from tests.workflows.stand_in import artifact, job_plan

KEYS = RunKeys("r1")


@pytest.fixture
def store(s3_server: S3Server, tmp_path: Path) -> ObjectStore:
    return open_store(f"{s3_server.uri}/stager-{tmp_path.name}", s3_server.settings)


@pytest.fixture
def model(store: ObjectStore, tmp_path: Path) -> Artifact:
    return artifact(store, tmp_path / "model", "model", x_json="{}")


class Asking:
    """A worker's part: it asks, and waits for the answer."""

    def __init__(self, job: Job, staging: JobStaging) -> None:
        self.job, self.staging = job, staging

    def __call__(self, *artifacts: Artifact, command: int | None = None) -> StageAnswer:
        answer = StageAnswer.path(self.job.log_path)
        answer.unlink(missing_ok=True)
        request = StageRequest(artifacts=artifacts, command=command)
        write_atomically(StageRequest.path(self.job.log_path), request.model_dump_json().encode())
        while not answer.exists():
            self.staging.look()
            time.sleep(0.01)
        return StageAnswer.model_validate_json(answer.read_bytes())


@pytest.fixture
def asking(s3_server: S3Server, store: ObjectStore, model: Artifact, tmp_path: Path) -> Asking:
    fields = job_plan(model).model_dump(include={"run_id", "job_id", "model", "trainable"})
    folder = str(tmp_path / "outputs")
    job = Job(
        plan=SessionPlan.model_validate(fields | {"max_tokens": 16}),
        fence=Fence(epoch=1),
        log_path=f"{folder}/log.jsonl",
        checkpoint_dir=folder,
        scratch_dir=folder,
        commands_dir=folder,
    )
    return Asking(job, JobStaging(Stager(tmp_path / "cache", s3_server.settings), job, store))


def test_what_the_job_names_comes_into_the_cache(asking: Asking, model: Artifact, tmp_path: Path) -> None:
    assert staged(model, tmp_path / "cache") is None
    assert asking(model) == StageAnswer()
    assert staged(model, tmp_path / "cache") is not None


def test_what_nobody_named_is_not_fetched(asking: Asking, store: ObjectStore, tmp_path: Path) -> None:
    """A worker may have been taken over by what it reads, and the host may read all of the store."""
    others = artifact(store, tmp_path / "others", "tenants/other/adapters/a/v000001", x_json="{}")
    refused = asking(others)
    assert (refused.kind, staged(others, tmp_path / "cache")) == ("invalid_input", None)
    assert others.uri in refused.message or "adapters/a/v000001" in refused.message


def test_a_sessions_command_names_a_state(asking: Asking, store: ObjectStore, tmp_path: Path) -> None:
    state = artifact(store, tmp_path / "state", f"{KEYS.checkpoints}/e000001-a01/step-00000002", state_json="{}")
    command = LoadStored(state="r1:step-2", checkpoint=state)
    store.put_bytes(KEYS.command(3), command.model_dump_json().encode())
    store.put_bytes(KEYS.command(4), b'{"kind": "save_state"}')
    assert asking(state).kind == "invalid_input"
    assert asking(state, command=4).kind == "invalid_input"
    assert asking(state, command=5).kind == "error", "no such command was accepted"
    assert staged(state, tmp_path / "cache") is None
    assert asking(state, command=3) == StageAnswer()
    assert staged(state, tmp_path / "cache") is not None


def test_why_it_cannot_be_had_is_answered(asking: Asking, store: ObjectStore, model: Artifact, tmp_path: Path) -> None:
    store.delete("model/x.json")
    missing = asking(model)
    assert (missing.kind, missing.message) == ("corrupt_artifact", f"{model.uri}/x.json: the file is missing")
    shutil.copytree(tmp_path / "model", tmp_path / "again")
    store.delete("model/manifest.json")
    assert asking(model).kind == "corrupt_artifact"
    upload_artifact(store, "model", tmp_path / "again")
    assert asking(model) == StageAnswer(), "one failure is not the last word"


def test_a_store_that_is_away_is_named(asking: Asking, store: ObjectStore, model: Artifact, tmp_path: Path) -> None:
    nowhere = Stager(tmp_path / "cache", S3Settings(endpoint_url="http://127.0.0.1:9", region="us-east-1"))
    away = Asking(asking.job, JobStaging(nowhere, asking.job, store))(model)
    assert away.kind == "error" and model.uri in away.message and "could not connect" in away.message.lower()
    assert asking(model) == StageAnswer()


def test_nothing_is_fetched_for_a_job_that_has_ended(asking: Asking, model: Artifact, tmp_path: Path) -> None:
    asking.staging.end()
    request = StageRequest(artifacts=(model,))
    write_atomically(StageRequest.path(asking.job.log_path), request.model_dump_json().encode())
    asking.staging.look()
    assert asking.staging._answering is not None
    asking.staging._answering.result(60)
    assert staged(model, tmp_path / "cache") is None
