"""Records of requests are rows: they cost the store nothing, and two services on one database agree on them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from longshore.accounts import QuotaSettings
from service.accounts.keys import Principal
from service.accounts.tenants import Documents
from service.apis.openai.jobs import SentRequests
from service.apis.tinker.records import CheckpointRecord, ModelRecord, SessionRecord, TinkerRecords
from service.automation.sweeps import SweepState
from service.automation.webhooks import WebhookChange, WebhookChoice
from service.backend import Backend
from service.database.engine import Database, DocumentRow
from service.inference.art_models import ArtSettings, new_model
from shared.automation import ScheduledRun, ScheduleRecord, Sweep, SweepRecord
from shared.errors import Conflict, InvalidInput, QuotaExceeded
from shared.settings import Settings
from shared.storage.store import LocalStore
from tests.service.apis.native.schedule_stack import stack_run
from tests.service.conftest import STORE_REQUESTS

SWEEP = f"sweep-{'0' * 17}"


class CountingStore(LocalStore):
    """Counts its requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in STORE_REQUESTS:
            self.asked[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def backend(database: Database, tmp_path: Path) -> Backend:
    return Backend(Settings(root=tmp_path), CountingStore(tmp_path / "store"), database)


@pytest.fixture
async def tenant(backend: Backend) -> str:
    """A tenant of the test's own: the database is all tests'."""
    return (await backend.tenants.create(f"t{time.time_ns()}")).tenant


async def make_one_of_each(backend: Backend, tenant: str) -> None:
    database, quotas = backend.database, backend.quotas
    asking = Principal(tenant=tenant, key_id="key-1", scopes=frozenset({"write"}))
    request = ScheduledRun.model_validate({"name": "s", "run": stack_run("file:///x"), "cron": "@daily"})
    key = await backend.keys.create(tenant)
    await backend.keys.revoke(tenant, key.key_id)
    assert await backend.runs.claim(tenant, "once", "sft-1", request) == "sft-1"
    assert await backend.runs.claim(tenant, "once", "sft-2", request) == "sft-1"
    assert await SentRequests(database, quotas).key_of(asking, request, None)
    webhook = await backend.webhooks.create(tenant, None, WebhookChoice(url="https://example.org/"))
    await backend.webhooks.change(tenant, webhook.id, WebhookChange(enabled=False))
    schedule = ScheduleRecord(tenant=tenant, scheduled=request, created_at=1.0, salt="0")
    await Documents(database, quotas, "schedule", ScheduleRecord).add(tenant, "s", schedule)
    swept = {"run": {**stack_run("file:///x"), "kind": "sft"}, "parameters": {"learning_rate": {"choices": [1e-4]}}}
    sweep = Sweep.model_validate({"name": "w", "sampler": "grid", "metric": "loss", **swept})
    state = SweepState(record=SweepRecord(sweep_id=SWEEP, tenant=tenant, sweep=sweep, created_at=1.0))
    await Documents(database, quotas, "sweep", SweepState).add(tenant, SWEEP, state)
    model = new_model(tenant, "e", "p", "n", "org/m", ArtSettings(), "float32")
    await Documents(database, quotas, "model", type(model)).add(tenant, model.model_id, model, alias="title")
    records, session = TinkerRecords(database, quotas, tenant), SessionRecord(session_id=f"tinker-{'0' * 21}")
    await records.add(session)
    await records.change(session, finished="success")
    made = ModelRecord.model_validate(
        {"session_id": session.session_id, "number": 0, "run_id": "session-1", "published_as": "n", "rank": 1}
        | {"base_model": "m"}
        | dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), True)
    )
    await records.add(made)
    checkpoint = CheckpointRecord(model_id=made.id, kind="weights", name="a", command=1)
    await records.claim(checkpoint, overwrite=False)
    assert [each.name for each in await records.checkpoints()] == ["a"]
    await records.delete(checkpoint)


@pytest.mark.parametrize("most", [None, 1 << 20], ids=["no quota", "a quota of bytes"])
async def test_a_record_costs_no_request_to_the_store(backend: Backend, tenant: str, most: int | None) -> None:
    if most is not None:
        await backend.tenants.set_quotas(tenant, QuotaSettings(stored_bytes=most))
    assert isinstance(backend.store, CountingStore)
    backend.store.asked.clear()
    await make_one_of_each(backend, tenant)
    assert backend.store.asked == Counter()
    upload = await backend.uploads.create(tenant, name="a.jsonl", purpose="fine-tune", size=0)
    backend.store.asked.clear()
    await backend.uploads.cancel(tenant, upload.upload_id)
    assert backend.store.asked == Counter(list=1), "parts that may have come"


async def test_what_two_services_add_at_once_is_there_once(backend: Backend, tenant: str) -> None:
    other = Backend(backend.settings, backend.store, Database(backend.database.engine.url.render_as_string(False)))
    run = ScheduledRun.model_validate({"name": "s", "run": stack_run("file:///x"), "cron": "@daily"})
    for number in range(10):
        services = [backend, other] * 4
        claims = [each.runs.claim(tenant, f"k{number}", f"sft-{n}", run) for n, each in enumerate(services)]
        assert len(set(await asyncio.gather(*claims))) == 1
    with pytest.raises(InvalidInput, match="another request"):
        await other.runs.claim(tenant, "k0", "sft-9", run.model_copy(update={"name": "t"}))
    made = [each.webhooks.create(tenant, None, WebhookChoice(url="https://h/")) for each in [backend, other] * 20]
    answers = await asyncio.gather(*made, return_exceptions=True)
    assert sum(isinstance(answer, Conflict) for answer in answers) == 20 == len(await backend.webhooks.of(tenant))
    other.database.close()


async def test_a_record_that_has_no_room_is_not_written_and_one_that_is_there_can_be_ended(
    backend: Backend, tenant: str
) -> None:
    webhook = await backend.webhooks.create(tenant, None, WebhookChoice(url="https://h/"))
    await backend.tenants.set_quotas(tenant, QuotaSettings(stored_bytes=1))
    with pytest.raises(QuotaExceeded, match="stored_bytes"):
        await backend.webhooks.create(tenant, None, WebhookChoice(url="https://h/"))
    await backend.webhooks.change(tenant, webhook.id, WebhookChange(enabled=False))
    await backend.webhooks.delete(tenant, webhook.id)
    left = select(func.count()).where(DocumentRow.tenant == tenant)
    assert await backend.database.reading(lambda session: session.scalars(left).one()) == 0
    await backend.tenants.set_quotas(tenant, QuotaSettings())
    kept = Documents(backend.database, backend.quotas, "kept", SessionRecord)
    await kept.put(tenant, "a", SessionRecord(session_id="a"))
    await backend.tenants.set_quotas(tenant, QuotaSettings(stored_bytes=1))
    longer = SessionRecord(session_id="a", user_metadata={"a": "x" * 1000})
    with pytest.raises(QuotaExceeded, match="stored_bytes"):
        await kept.change(tenant, "a", lambda _: longer)
    assert await kept.change(tenant, "a", lambda _: longer, always=True) == longer == await kept.get(tenant, "a")
    records = TinkerRecords(backend.database, backend.quotas, "roomy")
    with pytest.raises(InvalidInput, match="at most"):
        await records.add(SessionRecord(session_id=f"tinker-{'0' * 21}", user_metadata={"a": "x" * (5 << 20)}))


async def test_records_are_listed_by_their_keys_bytes(backend: Backend, tenant: str) -> None:
    """On PostgreSQL, too, whatever its collation."""
    records = TinkerRecords(backend.database, backend.quotas, tenant)
    model = f"tinker-{'0' * 21}:train:0"
    for name in ("b", "B", "a-1", "a", "a_1", "A"):
        await records.claim(CheckpointRecord(model_id=model, kind="weights", name=name, command=1), overwrite=False)
    places = await records.keys(CheckpointRecord)
    assert places == sorted(places) and len(places) == 6
    begin = places[0].rpartition("/")[0]
    assert await records.keys(CheckpointRecord, f"{begin}/a") == places[2:5]
    assert await records.keys(CheckpointRecord, f"{begin}/A") == places[:1]


async def test_files_are_compared_with_the_store(
    backend: Backend, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if one of both had been restored from an older backup."""

    async def chunks(content: bytes) -> AsyncIterator[bytes]:
        yield content

    files = backend.files
    lost, newer, _ = [await files.receive(tenant, f"{n}.jsonl", chunks(b"%d" % n)) for n in range(3)]
    store = backend.store

    def key_of(uri: str) -> str:
        return uri.removeprefix(f"{store.uri}/")

    kept = store.get_bytes(key_of(newer.uri))
    await files.delete(tenant, newer.file_id)
    store.put_bytes(key_of(newer.uri), kept)
    store.delete(key_of(lost.uri))
    assert not any(tenant in each for each in (await files.compare()).unnamed), "it may be on its way"
    later = time.time() + 100_000
    monkeypatch.setattr("service.files.time.time", lambda: later)
    found = await files.compare()
    assert [each for each in found.unnamed if tenant in each] == [key_of(newer.uri)]
    assert [each for each in found.missing if tenant in each] == [f"{tenant}/{lost.file_id}"]
