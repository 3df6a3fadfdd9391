"""Item 9: a manifest counts where we write it and nowhere else: a tenant's file of that name says nothing."""

import json
import re
from pathlib import Path

from shared.storage.artifacts import manifest_of
from tests.end_to_end.stack import Stack
from tests.security.attacks.tenants import Tenant
from tests.security.attacks.test_places import ROWS, refused


def forged(tenant: Tenant, root: Path) -> str:
    """The folder of an upload whose manifest says that its files lie at `root`."""
    manifest = manifest_of(root).model_copy(update={"root": root.as_uri()})
    return tenant.upload("manifest.json", manifest.encoded()).removesuffix("/manifest.json")


def test_an_uploaded_manifest_gives_nobodys_model(attacker: Tenant, secret_model: Path) -> None:
    rows = attacker.upload("rows.jsonl", ROWS)
    uri = forged(attacker, secret_model)
    for place in (uri, f"{uri}/", uri.removeprefix("file://")):
        refused(attacker, rows, place, "nothing was completed there")


def test_an_uploaded_manifest_gives_nobodys_adapter(attacker: Tenant, secret_model: Path, tiny_model: Path) -> None:
    rows = attacker.upload("rows.jsonl", ROWS)
    run = {"model": str(tiny_model), "dataset": {"uri": rows}, "steps": 1, "batch_size": 1, "max_tokens": 64}
    said = attacker.refusal("sft", **run, initial_adapter=forged(attacker, secret_model))
    assert "nothing was completed there" in said


def test_an_uploaded_manifest_tells_nothing_of_other_files(stack: Stack, attacker: Tenant) -> None:
    """Neither whether a file is there, nor its size, hash or fields: all answers are the same."""
    rows = attacker.upload("rows.jsonl", ROWS)
    said = set()
    for name, size in (("dev.json", 1), ("dev.json", (stack.root / "dev.json").stat().st_size), ("none.json", 1)):
        files = [{"path": name, "size": size, "sha256": "0" * 64}]
        data = json.dumps({"schema_version": 1, "files": files, "root": stack.root.as_uri()}).encode()
        uri = attacker.upload("manifest.json", data).removesuffix("/manifest.json")
        answer = attacker.http.post("/api/v1/preview", json={"source": {"uri": rows}, "model_uri": uri})
        said.add((answer.status_code, re.sub("[0-9a-f]{64}", "", answer.text)))
    assert len(said) == 1 and "nothing was completed there" in said.pop()[1]
