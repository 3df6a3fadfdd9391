"""The same spine with its store on S3: nothing lies on a shared disk."""

import hashlib
from pathlib import Path

import pytest

from shared.storage.artifacts import sha256_file
from shared.storage.store import open_store
from tests.conftest import S3Server
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.stack import Answer, started

pytestmark = pytest.mark.slow


def test_a_run_whose_store_is_s3(
    s3_server: S3Server, sft_options: list[str], undisturbed: Answer, tmp_path: Path
) -> None:
    prefix = f"{s3_server.uri}/stack"
    settings = {
        **QUICK,
        "LONGSHORE_STORE_URI": prefix,
        "LONGSHORE_S3__ENDPOINT_URL": s3_server.endpoint_url,
        "LONGSHORE_S3__REGION": "us-east-1",
    }
    with started(tmp_path / "stack", **settings) as stack:
        answer = stack.cli(*sft_options, "--wait").json
        stack.cli("download", answer["run_id"], "--into", str(tmp_path / "adapter"))
    assert answer["adapter"].startswith(prefix)
    local = Path(undisturbed.json["adapter"].removeprefix("file://")) / "adapter_model.safetensors"
    store = open_store(prefix, s3_server.settings)
    key = answer["adapter"].removeprefix(prefix + "/") + "/adapter_model.safetensors"
    assert hashlib.sha256(store.get_bytes(key)).hexdigest() == sha256_file(local)
    assert sha256_file(tmp_path / "adapter" / "adapter_model.safetensors") == sha256_file(local)


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
