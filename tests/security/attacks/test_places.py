"""Item 6: whatever a tenant names (hub ids, paths, links, URIs), it reads what is its own and what all may read.

A preview resolves a model and brings a dataset by the activities that runs use. What succeeds shows it in its rows.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from shared.storage.paths import MANIFEST
from tests.end_to_end.stack import Stack
from tests.security.attacks.tenants import Tenant

ROWS = b'{"prompt": "q", "completion": "a"}\n' * 2


@pytest.fixture(scope="module")
def rows(attacker: Tenant) -> str:
    return attacker.upload("rows.jsonl", ROWS)


def preview(tenant: Tenant, dataset: str, model: str) -> tuple[int, str]:
    """The status, and what is said."""
    body: dict[str, Any] = {"source": {"uri": dataset}, "model_uri": model, "num_rows": 1}
    answer = tenant.http.post("/api/v1/preview", json=body)
    return answer.status_code, answer.text


def refused(tenant: Tenant, dataset: str, model: str, because: str) -> None:
    status, said = preview(tenant, dataset, model)
    assert status == 422 and because in said, said


def test_what_the_tenant_may_read_is_read(attacker: Tenant, rows: str, tiny_model: Path) -> None:
    status, said = preview(attacker, rows, str(tiny_model))
    assert status == 200, said


def test_a_hub_id_whose_revision_leads_to_an_upload_takes_nobodys_model(
    attacker: Tenant, rows: str, secret_model: Path, hub_home: Path
) -> None:
    """The library reads `refs/<revision>` of its cache, and takes what stands there for a snapshot."""
    path = attacker.upload("ref", str(secret_model).encode()).removeprefix("file://")
    up = os.path.relpath(path, hub_home / "hub" / "models--a--b" / "refs")
    (hub_home / "hub" / "models--a--b" / "refs").mkdir(parents=True, exist_ok=True)
    for revision in (path, up, f"main/../../{path}"):
        refused(attacker, rows, f"a/b@{revision}", "give an absolute path")


def test_a_hub_id_takes_no_weights_as_initial_adapter_either(
    attacker: Tenant, rows: str, secret_model: Path, tiny_model: Path
) -> None:
    path = attacker.upload("ref", str(secret_model).encode()).removeprefix("file://")
    run = {"model": str(tiny_model), "dataset": {"uri": rows}, "steps": 1, "batch_size": 1, "max_tokens": 64}
    assert "give an absolute path" in attacker.refusal("sft", **run, initial_adapter=f"a/b@{path}")


@pytest.mark.parametrize("revision", ["/dev/zero", "/proc/self/environ", "..", ".git/config", "a//b", "a/./b", "-r"])
def test_a_revision_has_a_revisions_letters(attacker: Tenant, rows: str, revision: str) -> None:
    refused(attacker, rows, f"a/b@{revision}", "give an absolute path")


def test_a_snapshot_that_a_reference_of_the_cache_leads_to_must_lie_in_its_repository(
    attacker: Tenant, rows: str, secret_model: Path, hub_home: Path
) -> None:
    refs = hub_home / "hub" / "models--c--d" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(str(secret_model))
    refused(attacker, rows, "c/d", "the hub's cache has no such revision")


def test_a_model_that_is_in_the_hubs_cache_is_read_by_its_id(
    attacker: Tenant, rows: str, tiny_model: Path, hub_home: Path
) -> None:
    repository = hub_home / "hub" / "models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for path in tiny_model.iterdir():
        (repository / "blobs" / path.name).write_bytes(path.read_bytes())
        (repository / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{path.name}")
    for name in ("org/tiny", "org/tiny@main", f"org/tiny@{commit}"):
        status, said = preview(attacker, rows, name)
        assert status == 200, said


def test_links_in_an_open_folder_lead_to_nobodys_files(
    attacker: Tenant, victim: Tenant, rows: str, open_folder: Path, secret_model: Path, tiny_model: Path
) -> None:
    """Somebody who may write there puts links in; files of the stack's own stand beside others' uploads."""
    theirs = victim.upload("theirs.jsonl", b'{"text": "the victims words"}\n').removeprefix("file://")
    data = open_folder / "data"
    data.mkdir()
    (data / "rows.jsonl").symlink_to(theirs)
    for uri in (data.as_uri(), (data / "rows.jsonl").as_uri()):
        refused(attacker, uri, str(tiny_model), "nothing of yours")
    model = open_folder / "linked"
    model.mkdir()
    for path in secret_model.iterdir():
        if path.name != MANIFEST:
            (model / path.name).symlink_to(path)
    refused(attacker, rows, str(model), "a link that leads out of its folder")
    (open_folder / "whole").symlink_to(secret_model)
    refused(attacker, rows, str(open_folder / "whole"), "nothing of yours")


def test_a_pipe_is_no_model_and_no_dataset(attacker: Tenant, rows: str, open_folder: Path, tiny_model: Path) -> None:
    model = open_folder / "pipes"
    model.mkdir()
    os.mkfifo(model / "config.json")
    (model / "tokenizer.json").write_text("{}")
    refused(attacker, rows, str(model), "the folder has no config.json")
    refused(attacker, (model / "config.json").as_uri(), str(tiny_model), "there is no such file or folder")


def test_a_config_that_never_ends_is_read_to_its_cap(
    attacker: Tenant, rows: str, open_folder: Path, tiny_model: Path
) -> None:
    model = open_folder / "endless"
    model.mkdir()
    with (model / "config.json").open("wb") as file:
        file.truncate(2 << 40)
    refused(attacker, rows, str(model), "too large")


def test_what_the_stack_keeps_for_itself_is_nobodys(
    stack: Stack, attacker: Tenant, victim: Tenant, rows: str, tiny_model: Path, secret_model: Path
) -> None:
    theirs = victim.upload("more.jsonl", ROWS)
    store = stack.root / "store"
    places = [theirs, *(stack.root / name for name in ("dev.json", "temporal.db", "service/longshore.db"))]
    places += [store / "records/queries", store / "models/imported/00000000000000000000000000000000", store / "runs"]
    for place in places:
        uri = place if isinstance(place, str) else place.as_uri()
        refused(attacker, uri, str(tiny_model), "nothing of yours")
        refused(attacker, rows, uri, "nothing of yours")
    refused(attacker, rows, str(secret_model), "nothing of yours")
