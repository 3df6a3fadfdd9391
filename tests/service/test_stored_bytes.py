"""Room for bytes, on SQLite and on PostgreSQL: services that count at once, hosts beside them, and those that die."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import update

from service.accounts.tenants import Quotas
from service.automation.schedule_views import Backfill
from service.database import engine
from service.database.engine import Database, TenantRow
from service.errors import QuotaExceeded
from shared.automation import ScheduledRun
from shared.errors import InvalidInput
from shared.limits import QuotaSettings
from shared.storage import paths, stored_bytes
from shared.storage.store import LocalStore, ObjectInfo
from shared.storage.stored_bytes import Ledger, Reservation, Room
from tests.service.conftest import sft

QUOTAS = QuotaSettings(stored_bytes=100)


@pytest.fixture(scope="module")
def databases(database_url: str) -> Iterator[list[Database]]:
    """One database, as four services see it."""
    found = [Database(database_url) for _ in range(4)]
    engine.upgrade(found[0])
    found[0].write(lambda session: session.merge(TenantRow(tenant="acme", title="", quotas={}, created_at=1.0)))
    yield found
    for database in found:
        database.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


async def write(quotas: Quotas, store: LocalStore, name: str, num_bytes: int) -> None:
    async with quotas.reservation("acme") as reserved:
        await reserved.hold(num_bytes)
        await asyncio.to_thread(store.put_bytes, f"{paths.tenant_folder('acme')}/uploads/{name}/x", b"x" * num_bytes)
        await reserved.settle(num_bytes)


async def test_of_many_services_writers_with_room_for_one_one_writes(
    databases: list[Database], store: LocalStore
) -> None:
    services = [Quotas(QUOTAS, store, database) for database in databases]
    for quotas in services:
        assert await quotas.stored_bytes("acme") == 0  # counted, and trusted for a minute
    writers = (write(services[n % 4], store, str(n), 60) for n in range(16))
    answers = await asyncio.gather(*writers, return_exceptions=True)
    assert answers.count(None) == 1
    assert sum(isinstance(answer, QuotaExceeded) for answer in answers) == 15
    for quotas in services:
        assert await quotas.stored_bytes("acme") == 60
    await write(services[3], store, "small", 40)
    assert await services[0].stored_bytes("acme") == 100


async def test_a_service_and_a_host_see_each_other(databases: list[Database], store: LocalStore) -> None:
    quotas, host = Quotas(QUOTAS, store, databases[0]), Room(store, "acme", QUOTAS)
    with host.reserving(70, "data"):
        with pytest.raises(QuotaExceeded, match="70 bytes of 100: 40 more"):
            await write(quotas, store, "a", 40)
        host.ledger.bring("sft-1", "train", 70)
    with pytest.raises(QuotaExceeded):
        await write(Quotas(QUOTAS, store, databases[1]), store, "a", 40)
    await write(quotas, store, "b", 30)
    assert host.left() == 0
    with pytest.raises(InvalidInput, match="quota stored_bytes"), host.reserving(1, "data"):
        pass


def test_what_was_never_written_is_given_back_also_by_the_dead(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Room(store, "acme", QUOTAS)
    with pytest.raises(OSError), host.reserving(100, "data"):
        raise OSError("the disk is full")
    assert host.left() == 100
    Reservation(store, "acme").hold(100)  # its process dies
    assert host.left() == 0
    later = stored_bytes.time.time() + 1000
    monkeypatch.setattr(stored_bytes.time, "time", lambda: later)
    assert host.left() == 100


class SlowStore(LocalStore):
    """Answers no list until it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.is_asked.set()
        assert self.may_answer.wait(120)
        return super().list(prefix)


async def test_a_slow_store_keeps_no_database_waiting(databases: list[Database], tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.may_answer.set()
    quotas = Quotas(QUOTAS, store, databases[0])
    assert await quotas.stored_bytes("acme") == 0
    store.may_answer.clear()
    store.is_asked.clear()
    writer = asyncio.create_task(write(quotas, store, "a", 60))
    try:
        assert await asyncio.to_thread(store.is_asked.wait, 60)
        # Both the process that waits for its store, and another.
        change = update(TenantRow).where(TenantRow.tenant == "acme").values(title="changed")
        for database in databases[:2]:
            await asyncio.wait_for(database.writing(lambda session: session.execute(change) and None), 100)
        assert not writer.done()
    finally:
        store.may_answer.set()
        await writer


async def test_reservations_leave_nothing_behind(
    databases: list[Database], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither folders, which every count would walk, nor for long the entries of what was written."""
    quotas, place = Quotas(QUOTAS, store, databases[0]), store.root / paths.reserved("acme")
    for number in range(4):
        await write(quotas, store, str(number), 1)
        with pytest.raises(QuotaExceeded):
            await write(quotas, store, "large", 200)
    assert not [path for path in place.rglob("*") if path.is_dir()]
    assert len(list(place.iterdir())) == 4
    later = stored_bytes.time.time() + 300
    monkeypatch.setattr(stored_bytes.time, "time", lambda: later)
    ledger = Ledger(store, "acme")
    assert (ledger.count().num_bytes, ledger.written_since(later)) == (4, 0)
    assert not list(place.iterdir())


def test_of_many_hosts_writers_with_room_for_one_one_writes(store: LocalStore) -> None:
    def bring(number: int) -> bool:
        try:
            with Room(store, "acme", QUOTAS).reserving(60, "data"):
                store.put_bytes(f"{paths.tenant_folder('acme')}/uploads/{number}/x", b"x" * 60)
            return True
        except InvalidInput:
            return False

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(bring, range(8))) == 1
    assert Room(store, "acme", QUOTAS).left() == 40


def test_a_tenants_own_quota_is_found_on_its_record(store: LocalStore) -> None:
    store.put_bytes(paths.tenant_record("acme"), b'{"tenant": "acme", "quotas": {"stored_bytes": 7}, "created_at": 1}')
    assert Room(store, "acme", QUOTAS).left() == 7
    assert Room(store, "other", QUOTAS).left() == 100
    assert Room(store, "other", QuotaSettings()).left() is None
    Ledger(store, "acme").bring("sft-1", "train", 5)
    assert Room(store, "acme", QUOTAS).left() == 2
    Ledger(store, "acme").forget("sft-1")
    assert Room(store, "acme", QUOTAS).left() == 7


@pytest.mark.parametrize(
    ("times", "days", "is_taken"),
    [
        ({"every_s": 3600}, 8, True),
        ({"every_s": 3600}, 9, False),
        ({"cron": "0 2 * * *"}, 31, True),
        ({"cron": "@daily"}, 31, True),
        ({"cron": "@hourly"}, 31, False),
        ({"cron": "0,30 9-17 * * MON-FRI"}, 10, True),
        ({"cron": "*/15 * * * *"}, 2, True),
        ({"cron": "*/15 * * * *"}, 3, False),
        ({"cron": "? ? * * *"}, 1, False),
    ],
)
def test_how_many_times_a_backfill_may_act_at(times: dict[str, object], days: int, is_taken: bool) -> None:
    scheduled = ScheduledRun.model_validate({"name": "n", "run": {"kind": "sft"} | sft()} | times)
    span = Backfill(begin=0, end=days * 86_400 - 1)
    if is_taken:
        span.check_times(scheduled)
    else:
        with pytest.raises(InvalidInput, match="at most"):
            span.check_times(scheduled)
