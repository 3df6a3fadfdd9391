"""The index on SQLite and on PostgreSQL: migrations, places for runs, changes that overtake each other, pages."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Barrier, Event

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import delete, select, text, update
from sqlalchemy.orm import Session

from longshore.accounts import QuotaSettings
from longshore.commands import CommandResult, TokenScores
from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord, Source
from longshore.training import SessionRun
from service.accounts.tenants import Quotas
from service.backend import Backend
from service.database import engine
from service.database.engine import Database, OutboxRow, RunRow, Table, TenantRow
from service.runs.rows import BeingDeleted, RunRows, Uses, run_row
from service.runs.runs import queued
from shared.errors import DatabaseUnavailable, InvalidInput, QuotaExceeded
from shared.settings import Settings
from shared.storage.paths import RunKeys, tokenized
from shared.storage.store import LocalStore
from tests.conftest import free_port
from tests.service.conftest import sft
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def migrated(database_url: str) -> Iterator[Database]:
    """A database that several processes found empty at once."""
    databases = [Database(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(engine.upgrade, databases)) == [False, False, False, True]
    yield databases[0]
    for database in databases:
        database.close()


def test_a_new_file_is_opened_by_many_at_once(tmp_path) -> None:
    """SQLite answers "locked" to about one opening in a hundred, so many are tried."""
    for number in range(100):
        gate = Barrier(6)
        databases = [Database(f"sqlite:///{tmp_path}/{number}.db") for _ in range(6)]

        def opened(database: Database, gate: Barrier = gate) -> int:
            gate.wait()
            with database.connection() as connection:
                return connection.execute(text("SELECT 1")).scalar_one()

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(opened, databases)) == [1] * 6
        for database in databases:
            database.close()


@pytest.fixture
def database(migrated: Database) -> Database:
    for table in (RunRow, OutboxRow, TenantRow):
        migrated.write(lambda session, table=table: session.execute(delete(table)))
    migrated.write(lambda session: session.add(TenantRow(tenant="acme", title="", quotas={}, created_at=1.0)))
    return migrated


def rows_of(database: Database, tmp_path, **quotas) -> RunRows:
    return RunRows(database, Quotas(QuotaSettings(**quotas), LocalStore(tmp_path), database))


def record(number: int, tenant: str = "acme", created_at: float | None = None, **source) -> RunRecord:
    return RunRecord(
        run_id=f"sft-{number:08d}",
        tenant=tenant,
        source=Source(**source),
        run=SFTRun.model_validate(sft()),
        created_at=number if created_at is None else created_at,
    )


def test_migrations_make_the_tables_that_the_code_has(migrated: Database) -> None:
    with migrated.connection() as connection:
        assert engine.revision(connection) == engine.newest()
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []


def test_a_service_that_goes_back_serves_on_what_a_newer_one_has_migrated(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/newer.db")
    assert engine.upgrade(database), "it was empty"
    newer = "UPDATE alembic_version SET version_num = 'newer'"
    database.write(lambda session: session.execute(text(newer)))
    assert not engine.upgrade(database)
    with database.connection() as connection:
        assert engine.revision(connection) == "newer"
    database.close()


async def test_of_many_who_want_the_last_places_so_many_get_one(database: Database, tmp_path) -> None:
    rows = rows_of(database, tmp_path, concurrent_runs=3)
    records = [record(number) for number in range(24)]
    answers = await asyncio.gather(*(rows.admit(r, queued(r)) for r in records), return_exceptions=True)
    assert answers.count(True) == 3
    refusals = [answer for answer in answers if answer is not True]
    assert len(refusals) == 21 and all(isinstance(r, QuotaExceeded) and r.quota == "concurrent_runs" for r in refusals)
    assert len(await rows.open()) == 3


def test_who_asks_for_a_place_waits_for_the_one_who_is_getting_one(database: Database, tmp_path) -> None:
    """The first has counted and not committed: to count at that moment would be to count one too few."""
    quotas = Quotas(QuotaSettings(concurrent_runs=1), LocalStore(tmp_path), database)
    counted, go_on = Event(), Event()

    def take(number: int, session: Session) -> None:
        quotas.admit_run(session, "acme")
        session.add(run_row(record(number), queued(record(number))))
        session.flush()
        counted.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(database.write, partial(take, 1))
        assert counted.wait(60)
        second = threads.submit(database.write, partial(take, 2))
        wait([second], timeout=1)
        go_on.set()
        first.result()
        with pytest.raises(QuotaExceeded):
            second.result()


@pytest.mark.parametrize(("tenant", "most"), [("acme", 1), ("acme", 2), ("nobody", 2)])
def test_the_same_run_twice_at_once_takes_one_place(database: Database, tmp_path, tenant: str, most: int) -> None:
    """On PostgreSQL the second looks before the first has committed. `nobody` has no row that one could wait for."""
    quotas = Quotas(QuotaSettings(concurrent_runs=most), LocalStore(tmp_path), database)
    rows, same = RunRows(database, quotas), record(1, tenant)
    taken, go_on = Event(), Event()

    def take(session: Session) -> None:
        quotas.admit_run(session, tenant)
        session.add(run_row(same, queued(same)))
        session.flush()
        taken.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(database.write, take)
        assert taken.wait(60)
        second = threads.submit(lambda: asyncio.run(rows.admit(same, queued(same))))
        wait([second], timeout=1)
        go_on.set()
        first.result()
        assert second.result() is False
    assert database.write(lambda session: session.scalars(select(RunRow.run_id)).all()) == [same.run_id]


def test_of_uses_and_claims_that_come_at_once_each_use_is_seen_or_waits(database: Database) -> None:
    """Nobody has used the unit before, so that there is no row to wait for."""
    uses = Uses(database)
    for unit in (tokenized(f"{number:032x}") for number in range(8)):
        gate, over = Barrier(8), Event()

        def claim(unit: str = unit, gate: Barrier = gate, over: Event = over) -> set[str] | None:
            gate.wait()
            with uses.claiming(unit) as (claim,):
                assert claim is None or over.wait(60)
            return None if claim is None else set(claim.users)

        def note(run_id: str, unit: str = unit, gate: Barrier = gate) -> str | None:
            gate.wait()
            try:
                asyncio.run(uses.note(unit, run_id))
            except BeingDeleted:
                return None
            return run_id

        with ThreadPoolExecutor(8) as threads:
            claims = [threads.submit(claim) for _ in range(4)]
            notes = [threads.submit(note, f"sft-{number}") for number in range(4)]
            noted = {each.result() for each in notes} - {None}
            wait_until(lambda claims=claims: sum(each.done() for each in claims) == 3, "one alone has the claim")
            over.set()
            found = [each.result() for each in claims]
        assert found.count(None) == 3 and noted in found


async def test_gpu_hours_are_those_of_thirty_days(database: Database, tmp_path) -> None:
    rows = rows_of(database, tmp_path, gpu_hours=2.0)
    old, new = time.time() - 31 * 86_400, time.time() - 29 * 86_400
    for number, ended_at in ((1, old), (2, new)):
        ended = queued(record(number)).model_copy(
            update={"state": "succeeded", "ended_at": ended_at, "gpu_seconds": 3600.0}
        )
        await rows.add(record(number), ended)
    third, fourth = record(3), record(4)
    assert await rows.admit(third, queued(third))
    found = await rows.find(third.run_id)
    await rows.change(found, found.status.model_copy(update={"gpu_seconds": 3600.0}))
    with pytest.raises(QuotaExceeded, match="gpu_hours"):
        await rows.admit(fourth, queued(fourth))


async def test_a_change_that_was_overtaken_is_dropped_and_told_of_once(database: Database, tmp_path) -> None:
    rows = rows_of(database, tmp_path)
    accepted = record(1)
    await rows.admit(accepted, queued(accepted))
    read = await rows.find(accepted.run_id)
    ended = read.status.model_copy(update={"state": "succeeded", "phase": "done"})
    late = read.status.model_copy(update={"phase": "training", "step": 3})
    first, second = await asyncio.gather(rows.change(read, ended), rows.change(read, ended))
    assert first.status == second.status == ended
    assert (await rows.change(read, late)).status == ended
    assert (await rows.find(accepted.run_id)).status == ended
    told = database.write(lambda s: s.scalars(select(OutboxRow.type).order_by(OutboxRow.created_at)).all())
    assert told == ["run.created", "run.succeeded"]


async def test_reads_do_not_wait_behind_writes(database: Database) -> None:
    may_end = Event()
    writes = [asyncio.create_task(database.writing(lambda _: may_end.wait(60))) for _ in range(20)]
    await asyncio.sleep(0)  # they begin
    async with asyncio.timeout(30):
        assert await database.reading(lambda session: session.scalar(text("SELECT 1"))) == 1
    assert not any(write.done() for write in writes)
    may_end.set()
    assert all(await asyncio.gather(*writes))


async def test_pages_go_on_behind_a_run_and_keep_to_their_tenant(database: Database, tmp_path) -> None:
    rows = rows_of(database, tmp_path)
    mine = [record(n, created_at=float(n // 3), api="openai", metadata={"team": str(n % 2)}) for n in range(9)]
    for one in (*mine, record(100, tenant="other")):
        await rows.add(one, queued(one))
    expected = [one.run_id for one in reversed(mine)]
    seen, after = [], None
    while page := await rows.page("acme", 2, after):
        seen += [run.run_id for run in page]
        after = seen[-1]
    assert seen == expected
    odd = await rows.page("acme", 50, metadata={"team": "1"}, api="openai")
    assert [run.run_id for run in odd] == [one.run_id for one in reversed(mine[1::2])]
    assert await rows.page("acme", 50, api="art") == ()
    assert await rows.page("acme", 50, state="failed") == ()
    assert await rows.page("acme", 50, after="sft-00000100") == ()  # another tenant's run is no place to go on from


async def test_sessions_whose_clients_are_gone_can_be_left_out(database: Database, tmp_path) -> None:
    rows = rows_of(database, tmp_path)
    for number in range(4):
        one = record(number)
        await rows.add(one, queued(one))
    idle = {"kind": "session", "state": "running", "phase": "waiting_for_commands", "updated_at": 100.0}
    stays = ({}, {"updated_at": 300.0}, {"phase": "training"}, {"kind": "rl"})
    for number, other in enumerate(stays):
        values = update(RunRow).where(RunRow.run_id == record(number).run_id).values(**idle | other)
        database.write(lambda session, values=values: session.execute(values))
    for since, gone in ((None, set()), (50.0, set()), (200.0, {record(0).run_id})):
        seen = {run.run_id for run in await rows.page("acme", 50, no_session_idle_since=since)}
        assert {record(n).run_id for n in range(4)} - seen == gone
        assert await rows.num_sessions_idle_since("acme", since or 0.0) == len(gone)
    assert await rows.num_sessions_idle_since("strangers", 200.0) == 0


def test_a_page_is_read_from_an_index(database: Database) -> None:
    """However many runs there are, a page costs a page."""
    records = [record(number, tenant=f"t{number % 7}") for number in range(1000)]
    database.write(lambda session: session.add_all(run_row(one, queued(one)) for one in records))
    query = (
        "SELECT * FROM runs WHERE tenant = 't1' AND state = 'running' ORDER BY created_at DESC, run_id DESC LIMIT 50"
    )
    explain = "EXPLAIN QUERY PLAN " if database.is_sqlite else "EXPLAIN "

    def plan(session) -> str:
        if not database.is_sqlite:
            session.execute(text("ANALYZE runs"))
        return "\n".join(str(row) for row in session.execute(text(explain + query)))

    said = database.write(plan)
    assert "runs_by_" in said
    assert "TEMP B-TREE" not in said and "Seq Scan" not in said


def test_a_database_that_is_away_says_so_and_tells_no_password() -> None:
    away = Database(f"postgresql://me:a-secret-value@127.0.0.1:{free_port()}/nothing")
    with pytest.raises(DatabaseUnavailable) as caught:
        away.write(lambda session: session.execute(text("SELECT 1")))
    assert "a-secret-value" not in str(caught.value)
    away.close()
    for url in ("mysql://u:a-secret-value@h/d", "a-secret-value", "oracle+nothing://a-secret-value"):
        with pytest.raises(InvalidInput) as refused:
            Database(url)
        assert "a-secret-value" not in str(refused.value)


async def test_scores_of_sessions_that_ended_long_ago_are_deleted(database: Database, tmp_path) -> None:
    """Of others they stay, and so does what the results say beside them."""
    store = LocalStore(tmp_path / "store")
    limited = QuotaSettings(stored_bytes=1 << 30)
    backend = Backend(Settings(root=tmp_path, session_results_days=2, quotas=limited), store, database)
    rows, now = rows_of(database, tmp_path), time.time()
    many = CommandResult(number=1, kind="forward", data=(TokenScores(logprobs=(-0.5,) * 1000),))
    few = CommandResult(number=2, kind="forward_backward", metrics={"loss": 1.0}, data=(TokenScores(logprobs=(-0.5,)),))
    sessions = {"old": now - 3 * 86_400, "new": now - 86_400, "open": None}
    for name, ended_at in sessions.items():
        made = record(1).model_copy(update={"run_id": f"session-{name}", "run": SessionRun(model="file:///m")})
        status = queued(made)
        if ended_at is not None:
            status = status.model_copy(update={"state": "succeeded", "ended_at": ended_at})
        await rows.add(made, status)
        for result in (many, few):
            key = RunKeys(made.run_id).command_result(result.number)
            store.put_bytes(key, result.model_dump_json().encode())
        await backend.quotas.measure("acme", made.run_id)
    before = await backend.quotas.room("acme")
    for _ in range(2):
        await backend.sessions.prune()
        found = {
            name: [
                CommandResult.model_validate_json(store.get_bytes(RunKeys(f"session-{name}").command_result(number)))
                for number in (1, 2)
            ]
            for name in sessions
        }
        assert found["new"] == found["open"] == [many, few]
        assert found["old"] == [many.model_copy(update={"data": None, "expired": True}), few]
        assert before.used - (await backend.quotas.room("acme")).used == len(many.model_dump_json()) - len(
            found["old"][0].model_dump_json()
        )
