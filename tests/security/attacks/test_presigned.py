"""A presigned URI's signature stands in one record of the store, and in nothing else of ours."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from activities.sources.download import find_sources
from service.temporal import Temporal
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.places import with_query
from shared.storage.store import open_store
from tests.files_below import files_below
from tests.opened import opened
from tests.security.belongings import TENANT, Belongings
from tests.service.conftest import Service, sft
from tests.service.stand_in import WAITS
from tests.waiting import wait_until

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
