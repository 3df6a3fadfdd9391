"""Artifacts of W&B's, as ART's clients log the data of `train_sft`: by W&B's own package, and what it never sends."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.conftest import KEY, Service, new_key

ROWS = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "21."}]}\n'
LOGGING = """
import sys, wandb
settings = wandb.Settings(api_key=sys.argv[1])
run = wandb.init(id="clerk", entity="default", project="harbour", resume="allow", settings=settings)
artifact = wandb.Artifact(sys.argv[2], type="dataset", metadata={"format": "jsonl"})
artifact.add_file(sys.argv[3], name="train.jsonl")
run.log_artifact(artifact).wait(timeout=120)
run.finish()
"""


def wandb_client(service: Service, key: str) -> httpx.Client:
    basic = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"authorization": f"Basic {basic}"}
    return httpx.Client(base_url=f"{service.url}/wandb", headers=headers, timeout=60, trust_env=False)


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with wandb_client(service, KEY) as client:
        yield client


def asked(client: httpx.Client, operation: str, **variables: Any) -> dict[str, Any]:
    answer = client.post("/graphql", json={"query": f"query {operation} {{ x }}", "variables": variables})
    assert answer.status_code == 200, answer.text
    return answer.json()


def created(client: httpx.Client, name: str) -> str:
    words = {"entityName": "default", "projectName": "harbour", "artifactCollectionName": name}
    return asked(client, "CreateArtifact", input=words)["data"]["createArtifact"]["artifact"]["id"]


def address(client: httpx.Client, artifact_id: str) -> dict[str, Any]:
    files = {"artifactFiles": [{"artifactID": artifact_id, "name": "train.jsonl"}]}
    told = asked(client, "CreateArtifactFiles", input=files)
    return told["data"]["createArtifactFiles"]["files"]["edges"][0]["node"]


def sft_job(service: Service, url: str, model: str, key: str = KEY) -> httpx.Response:
    art = f"{service.url}/v1/preview"
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=art, headers=headers, timeout=60, trust_env=False) as client:
        fields = {"project": "harbour", "name": "artifacts", "base_model": model, "return_existing": True}
        model_id = client.post("/models", json=fields).json()["id"]
        return client.post("/sft-training-jobs", json={"model_id": model_id, "training_data_url": url})


def test_what_the_wandb_package_logs_is_what_a_job_trains_on(
    service: Service, acme: str, tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(ROWS)
    online = {"WANDB_BASE_URL": f"{service.url}/wandb", "WANDB_MODE": "online", "WANDB_SILENT": "true"}
    with service.http() as api:
        key = new_key(api)["key"]  # W&B's package wants 40 characters at least, as ours have
    command = [sys.executable, "-c", LOGGING, key, "rows", str(data)]
    done = subprocess.run(command, env=os.environ | online, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [path.read_text() for path in tmp_path.rglob("debug*.log")]
    assert logs and not any("failed to send" in log for log in logs), "its telemetry is taken, and dropped"
    url = "wandb-artifact:///default/harbour/rows:v0"
    job = sft_job(service, url, tiny_model.as_uri()).json()
    with service.http() as api:
        run = api.get(f"/runs/{job['run_id']}").json()
        listed = [file for file in api.get("/files").json()["files"] if file["purpose"] == "wandb-artifact"]
    assert run["run"]["dataset"]["uri"] == listed[0]["uri"] and listed[0]["size"] == len(ROWS)
    theirs = sft_job(service, url, tiny_model.as_uri(), acme)
    assert theirs.status_code == 400 and "WANDB_BASE_URL" in theirs.json()["error"]["message"]


def test_a_name_is_used_once_and_data_comes_once(client: httpx.Client, service: Service) -> None:
    artifact_id = created(client, "once")
    assert "train.jsonl has not come" in asked(client, "CommitArtifact", artifactID=artifact_id)["errors"][0]["message"]
    assert asked(client, "ArtifactByID", id=artifact_id) == {"data": {"artifact": None}}
    node = address(client, artifact_id)
    path = node["uploadUrl"].removeprefix(f"{service.url}/wandb")
    name, _, value = node["uploadHeaders"][0].partition(":")
    assert client.put(path, content=ROWS, headers={name: value}).status_code == 200
    with service.http() as api:
        stored = api.get("/usage").json()["stored_bytes"]
        assert client.put(path, content=b"other rows").status_code == 200, "as one whose answer was lost: passed over"
        assert api.get("/usage").json()["stored_bytes"] == stored
    assert asked(client, "ArtifactByID", id=artifact_id)["data"]["artifact"]["size"] == str(len(ROWS))
    words = {"entityName": "default", "projectName": "harbour", "artifactCollectionName": "once"}
    assert "used once" in asked(client, "CreateArtifact", input=words)["errors"][0]["message"]


@pytest.mark.parametrize(
    ("operation", "variables"),
    [
        ("ArtifactVersionsDelete", {}),
        ("CreateArtifact", {}),
        ("CreateArtifact", {"input": [1]}),
        ("CreateArtifact", {"input": {"entityName": "a/../b", "projectName": "p", "artifactCollectionName": "n"}}),
        ("CreateArtifact", {"input": {"entityName": "e", "projectName": 7, "artifactCollectionName": "n"}}),
        ("CreateArtifact", {"input": {"entityName": "e", "projectName": "p", "artifactCollectionName": "n" * 129}}),
        ("CreateArtifactFiles", {"input": {"artifactFiles": []}}),
        ("CreateArtifactFiles", {"input": {"artifactFiles": [{}] * 17}}),
        ("CreateArtifactFiles", {"input": {"artifactFiles": [{"name": "../../x", "artifactID": "QQ=="}]}}),
        ("CreateArtifactFiles", {"input": {"artifactFiles": [{"name": "train.jsonl", "artifactID": "QQ=="}]}}),
        ("CommitArtifact", {"artifactID": "\u00e9\u00e9\u00e9\u00e9"}),
        ("CommitArtifact", {"artifactID": {"a": 1}}),
        ("ArtifactByID", {}),
        ("UpsertBucket", {"name": "x" * 200, "project": "p"}),
    ],
)
def test_what_is_not_served_is_refused_as_graphql_refuses(
    client: httpx.Client, operation: str, variables: dict[str, Any]
) -> None:
    told = asked(client, operation, **variables)
    assert list(told) == ["errors"] and told["errors"][0]["message"]


def test_keys_scopes_and_quotas_hold_here(service: Service, client: httpx.Client, acme: str, tiny_model: Path) -> None:
    body = {"query": "query Viewer { x }"}
    for header in ("", "Basic", "Basic !!", "Basic YXBp", f"Basic {base64.b64encode(b'api:nobody').decode()}"):
        with httpx.Client(base_url=f"{service.url}/wandb", trust_env=False) as nobody:
            assert nobody.post("/graphql", json=body, headers={"authorization": header}).status_code == 401, header
    with service.http() as api:
        reader = new_key(api, scopes=["read"])["key"]
    with wandb_client(service, reader) as reading:
        assert reading.post("/graphql", json=body).status_code == 403
    artifact_id = created(client, "foreign")
    path = f"/artifacts/{artifact_id}/train.jsonl"
    assert client.put(path, content=ROWS).status_code == 200
    with wandb_client(service, acme) as theirs:
        assert asked(theirs, "ArtifactByID", id=artifact_id) == {"data": {"artifact": None}}
        assert theirs.post("/files/default/harbour/clerk/file_stream", content=b"{}").status_code == 200
        assert theirs.put("/artifacts/QQ==/train.jsonl", content=ROWS).status_code == 422
    with service.http() as api:
        assert api.put("/tenants/acme/quotas", json={"stored_bytes": 1}).status_code == 200
    with wandb_client(service, acme) as theirs:
        full = theirs.put(path, content=ROWS)
        assert full.status_code == 403 and "bytes" in full.text, full.text
