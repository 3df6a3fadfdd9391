"""Whatever a tenant names, it reads its own and what all may read; signatures of URIs stand in one record.

A preview resolves a model and brings a dataset by the activities that runs use. What succeeds shows it in its rows.
"""

import asyncio
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.sources.download import find_sources
from service.temporal import Temporal
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import manifest_of
from shared.storage.paths import MANIFEST
from shared.storage.places import with_query
from shared.storage.store import open_store
from tests.end_to_end.stack import Stack
from tests.files_below import files_below
from tests.opened import opened
from tests.security.attacks.tenants import Tenant
from tests.security.belongings import TENANT, Belongings
from tests.service.conftest import Service, sft
from tests.service.stand_in import WAITS
from tests.waiting import wait_until

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


SIGNATURE = "c0ffee5ec4e7"
URI = f"https://bucket.example.com/rows.jsonl?X-Amz-Date=20261122&X-Amz-Signature={SIGNATURE}"


def test_a_signature_is_in_nothing_but_its_record(
    service: Service, belongings: Belongings, owner: httpx.Client
) -> None:
    begun = datetime.now(UTC)
    made = owner.post("/api/v1/runs/sft", json=sft(seed=WAITS, dataset={"uri": URI})).json()
    job = {"model": "file:///models/tiny", "training_file": URI, "seed": WAITS}
    owner.post("/v1/fine_tuning/jobs", json=job)
    nightly = {"name": "signed", "run": sft(kind="sft", dataset={"uri": URI}), "cron": "0 2 1 1 *"}
    assert owner.post("/api/v1/schedules", json=nightly).status_code == 201
    step = {"source": {"uri": URI}, "model_uri": "file:///models/tiny"}
    owner.post("/api/v1/validate", json=step)
    wait_until(lambda: owner.get(f"/api/v1/runs/{made['run_id']}").json()["phase"] == "training", "it runs")
    holding = [name for name, data in files_below(service.settings.root_path) if SIGNATURE.encode() in data]
    assert [name for name in holding if "records/queries/" not in name] == []
    assert len(holding) == 1
    for path in (f"/api/v1/runs/{made['run_id']}", "/api/v1/runs", "/v1/fine_tuning/jobs", "/api/v1/schedules"):
        assert SIGNATURE not in owner.get(path).text
    assert SIGNATURE not in asyncio.run(_histories(service.settings, begun))
    # And hosts still fetch what the user named.
    run = json.loads(service.store.get_bytes(f"runs/{made['run_id']}/run.json"))["run"]
    [source] = find_sources(run["dataset"]["uri"], TENANT, service.settings).values()
    assert getattr(source, "uri", None) == URI


async def _histories(settings: Settings, begun: datetime) -> str:
    """All that Temporal keeps of what this service has started since."""
    found = []
    async with Temporal(settings).client() as client:
        async for one in client.list_workflows(
            f'TaskQueue = "{settings.control_queue}" AND StartTime >= "{begun.isoformat()}"'
        ):
            handle = client.get_workflow_handle(one.id, run_id=one.run_id)
            found += [str(opened(event, settings)) async for event in handle.fetch_history_events()]
    return "\n".join(found)


def test_a_name_of_a_query_opens_it_for_its_own_address_alone(service: Service, owner: httpx.Client) -> None:
    made = owner.post("/api/v1/runs/sft", json=sft(seed=WAITS, dataset={"uri": URI})).json()
    named = json.loads(service.store.get_bytes(f"runs/{made['run_id']}/run.json"))["run"]["dataset"]["uri"]
    assert with_query(service.store, named) == URI
    for stolen in (
        named.replace("bucket.example.com", "evil.example.com"),
        named.replace("rows.jsonl", "other.jsonl"),
        named[:-1],
        f"{named.partition('=')[0]}=../../runs/x",
    ):
        with pytest.raises(InvalidInput, match="not known here"):
            with_query(service.store, stolen)


def test_the_same_request_again_is_the_same_run(owner: httpx.Client) -> None:
    headers = {"idempotency-key": "signed"}
    body = sft(seed=WAITS, dataset={"uri": URI})
    ids = {owner.post("/api/v1/runs/sft", json=body, headers=headers).json()["run_id"] for _ in range(2)}
    assert len(ids) == 1


def test_other_uris_are_left_as_they_are(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri(), Settings().s3)
    for uri in ("https://host/rows.jsonl", "file:///data/a?b", "s3://bucket/key?x"):
        assert with_query(store, uri) == uri


def forged(tenant: Tenant, root: Path) -> str:
    """The folder of an upload whose manifest says that its files lie at `root`."""
    manifest = manifest_of(root).model_copy(update={"root": root.as_uri()})
    return tenant.upload("manifest.json", manifest.encoded()).removesuffix("/manifest.json")


def test_an_uploaded_manifest_gives_nobodys_model(attacker: Tenant, secret_model: Path) -> None:
    rows = attacker.upload("rows.jsonl", ROWS)
    uri = forged(attacker, secret_model)
    for place in (uri, f"{uri}/", uri.removeprefix("file://")):
        refused(attacker, rows, place, "nothing was completed there")


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
