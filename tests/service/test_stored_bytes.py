"""Room for bytes, on SQLite and on PostgreSQL: services that count at once, those that die, and what hosts write."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select

from longshore.accounts import QuotaSettings, Room
from service.accounts import tenants
from service.accounts.tenants import Quotas
from service.database import engine
from service.database.engine import Database, StoredRow, TenantRow
from shared.errors import InvalidInput, QuotaExceeded
from shared.storage.paths import RunKeys, published_version
from shared.storage.store import LocalStore
from shared.storage.stored_bytes import COMMANDS, Measurement, Stored, check_room

QUOTAS = QuotaSettings(stored_bytes=100)


@pytest.fixture(scope="module")
def database_of_all(database_url: str) -> Iterator[list[Database]]:
    """One database, as four services see it."""
    found = [Database(database_url) for _ in range(4)]
    engine.upgrade(found[0])
    found[0].write(lambda session: session.merge(TenantRow(tenant="acme", title="", quotas={}, created_at=1.0)))
    yield found
    for database in found:
        database.close()


@pytest.fixture
def databases(database_of_all: list[Database]) -> list[Database]:
    database_of_all[0].write(lambda session: session.execute(delete(StoredRow)))
    return database_of_all


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


async def write(
    quotas: Quotas, run_id: str, num_bytes: int, block_bytes: int = 0, answer: bool | Exception = True
) -> None:
    async def put() -> bool:
        await asyncio.sleep(0.01)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await quotas.put_noted("acme", run_id, COMMANDS, num_bytes, put, block_bytes)


async def used(quotas: Quotas) -> int:
    return (await quotas.usage("acme")).stored_bytes


async def test_of_many_services_writers_with_room_for_one_one_writes(
    databases: list[Database], store: LocalStore
) -> None:
    services = [Quotas(QUOTAS, store, database) for database in databases]
    answers = await asyncio.gather(
        *(write(services[n % 4], f"session-{n}", 60) for n in range(16)), return_exceptions=True
    )
    assert answers.count(None) == 1
    assert sum(isinstance(answer, QuotaExceeded) for answer in answers) == 15
    assert [await used(quotas) for quotas in services] == [60] * 4
    await write(services[3], "session-small", 40)
    assert await used(services[0]) == 100


async def test_what_is_counted_ahead_is_used_up_to_the_last_byte(
    databases: list[Database], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that come at once, that were there already, and that fail: the count is never below what is stored."""
    quotas, other, tight = (Quotas(QuotaSettings(stored_bytes=n), store, databases[0]) for n in (1000, 1000, 110))
    await write(quotas, "session-1", 10, block_bytes=50)
    assert await used(quotas) == 60
    written, writing = [], databases[0].writing
    monkeypatch.setattr(databases[0], "writing", lambda work: written.append(work) or writing(work))
    await asyncio.gather(*(write(quotas, "session-1", 10, 50) for _ in range(2)))
    await write(quotas, "session-1", 10, 50, answer=False)
    with pytest.raises(OSError):
        await write(quotas, "session-1", 10, 50, answer=OSError("the disk is full"))
    assert not written, "two that came at once shared what was counted ahead"
    num = await used(quotas)
    while await used(quotas) == num:
        await write(quotas, "session-1", 10, 50)
    assert num == 60 and len(written) == 1, "6 objects of 10 bytes fit into what was counted"
    await databases[0].writing(lambda session: session.execute(delete(StoredRow)))
    for _ in range(11):
        await write(tight, "session-2", 10, 50)
    with pytest.raises(QuotaExceeded):
        await write(tight, "session-2", 10, 50)
    assert await used(other) == 110, "the quota was used up"


async def test_what_was_never_written_is_given_back_also_by_the_dead(
    databases: list[Database], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, other = (Quotas(QUOTAS, store, database) for database in databases[:2])

    async def fail() -> bool:
        assert await used(other) == 100
        raise OSError("the disk is full")

    with pytest.raises(OSError):
        await quotas.put_noted("acme", "session-1", COMMANDS, 100, fail)
    async with quotas.reservation("acme") as reserved:
        await reserved.hold(50)
        await reserved.hold(70)
        assert await used(other) == 70
        with pytest.raises(QuotaExceeded, match="70 bytes of 100: 40 more"):
            await write(other, "session-2", 40)
        with pytest.raises(QuotaExceeded):
            await reserved.hold(101)
        assert await used(other) == 70, "an earlier reservation stays"
    assert await used(quotas) == 0
    dead = quotas.reservation("acme")
    await (await dead.__aenter__()).hold(100)
    with pytest.raises(QuotaExceeded):
        await write(other, "session-2", 1)
    later = time.time() + 1000
    monkeypatch.setattr(tenants.time, "time", lambda: later)
    assert await used(other) == 0
    async with other.reservation("acme") as reserved:
        await reserved.hold(100)
    count = select(func.count()).select_from(StoredRow).where(StoredRow.expires_at.is_not(None))
    assert await databases[0].reading(lambda session: session.scalars(count).one()) == 0, "the dead one's row is gone"


async def test_a_run_is_measured_and_what_is_noted_meanwhile_stays(
    databases: list[Database], store: LocalStore
) -> None:
    """Of data, what is a copy of the tenant's own upload does not count again."""
    quotas, keys = Quotas(QUOTAS, store, databases[0]), RunKeys("sft-1")
    for key, size in {
        keys.record: 3,
        f"{keys.dataset('train')}/rows.jsonl": 50,
        keys.own_bytes("train", 20): 0,
        keys.command(1): 5,
        keys.command_result(1): 7,
        f"{published_version('acme', 'adapters', 'a', 1)}/weights": 11,
        f"{published_version('other', 'adapters', 'a', 1)}/weights": 13,
    }.items():
        store.put_bytes(key, b"x" * size)
    await quotas.measure("acme", "sft-1")
    measured = (await quotas.usage("acme")).measured.num_bytes
    assert measured == {"commands": 5, "data": 30, "published": 11, "records": 3, "sessions": 7}
    assert await quotas.room("acme") == Room(used=56, most=100)
    began = time.time()
    await write(quotas, "sft-1", 10)
    every = [Stored(tenant="acme", owner="sft-1", what=what, num_bytes=1) for what in ("commands", "records")]
    await quotas.note_measured(Measurement(began=began, stored=tuple(every)))
    assert (await quotas.usage("acme")).measured.num_bytes == {"commands": 15, "records": 1}
    assert await Quotas(QuotaSettings(), store, databases[0]).room("acme") == Room()


def test_a_host_keeps_to_the_room_that_it_was_told() -> None:
    check_room(Room(used=70, most=100), "acme", 30, "data")
    check_room(Room(), "acme", 1 << 60, "data")
    with pytest.raises(InvalidInput, match="data: quota stored_bytes: acme stores 70 bytes of 100: 31 more"):
        check_room(Room(used=70, most=100), "acme", 31, "data")
