"""Rebuilds the database from the store: tenants, keys, files and runs. The store has no audit log and no outbox."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from pydantic import ValidationError
from sqlalchemy import inspect, select
from sqlalchemy.orm import Session

from service.accounts.keys import KeyRecord
from service.accounts.tenants import TenantRecord, ensure_first
from service.database.engine import Database, FileRow, KeyRow, RemovedRow, RunRow, Table, TenantRow
from service.files import FileRecord
from service.runs.rows import removed_row, run_row
from service.runs.runs import queued
from shared.errors import NotFound
from shared.runs.requests import FIRST_TENANT, RunRecord
from shared.runs.status import RunStatus
from shared.storage import paths
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import RemovedRun, removed_run

_AT_ONCE = 20  # rows in a transaction: few, as other writers wait for it
_SETTLED_S = 60.0  # the record of a younger row may still be on its way into the store


@dataclass
class Differences:
    """Differences between store and database: rows by table, and records that cannot be read."""

    missing: Counter[str] = field(default_factory=Counter)
    outdated: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    """The number of records read, by table."""

    @property
    def any(self) -> bool:
        return bool(self.missing or self.outdated or self.unknown or self.unreadable)


def rebuild(store: ObjectStore, database: Database, *, only_look: bool = False) -> Differences:
    """Make every row equal to its record. Rows of running runs are only added: `Watch` (runs/runs.py) updates them.

    May be done repeatedly, and while services work. Webhooks get no notice of changes. Blocking.

    Args:
        only_look: change nothing.

    Returns:
        What differed.

    Raises:
        StoreUnavailable, DatabaseUnavailable
    """
    return _Rebuild(store, database, only_look).all()


@dataclass(frozen=True)
class _Record:
    """A record in the store. `key` is named in messages about it; `row` reads the record each time."""

    key: str
    row: Callable[[], Table]
    """Raises NotFound, ValidationError."""


class _Rebuild:
    def __init__(self, store: ObjectStore, database: Database, only_look: bool) -> None:
        self._store = store
        self._database = database
        self._only_look = only_look
        self._began = time.time()
        self._found = Differences()

    def all(self) -> Differences:
        self._table(TenantRow, self._records(paths.tenant_record(), TenantRecord))
        self._table(KeyRow, self._records(paths.key_record(), KeyRecord))
        self._table(FileRow, self._records(paths.FILE_RECORDS, FileRecord))
        self._table(RemovedRow, self._removed())
        self._table(RunRow, self._runs())
        if not self._only_look:
            self._database.write(ensure_first)
        return self._found

    def _records(self, prefix: str, kind: type[TenantRecord | KeyRecord | FileRecord]) -> Iterator[_Record]:
        for info in self._store.list(prefix):
            yield _Record(info.key, partial(self._row, kind, info.key))

    def _row(self, kind: type[TenantRecord | KeyRecord | FileRecord], key: str) -> Table:
        return kind.model_validate_json(self._store.get_bytes(key)).row()

    def _runs(self) -> Iterator[_Record]:
        prefix = paths.run_index()
        for info in self._store.list(prefix):
            keys = paths.RunKeys(info.key.removeprefix(prefix))
            yield _Record(keys.record, partial(self._run_row, keys))

    def _removed(self) -> Iterator[_Record]:
        for info in self._store.list(removed_run()):
            yield _Record(info.key, partial(self._removed_row, info.key))

    def _removed_row(self, key: str) -> Table:
        return removed_row(RemovedRun.model_validate_json(self._store.get_bytes(key)))

    def _run_row(self, keys: paths.RunKeys) -> Table:
        if self._store.head(removed_run(keys.prefix.rpartition("/")[2])) is not None:
            raise NotFound(f"{keys.prefix} is of a removed run")
        record = RunRecord.model_validate_json(self._store.get_bytes(keys.record))
        status = queued(record)
        with suppress(NotFound):  # it has not ended
            status = RunStatus.model_validate_json(self._store.get_bytes(keys.result))
        return run_row(record, status)

    def _table(self, table: type[Table], records: Iterator[_Record]) -> None:
        known: set[Any] = set()
        rows = ((record, row) for record in records if (row := self._read(record)) is not None)
        while some := list(islice(rows, _AT_ONCE)):
            before = self._database.write(partial(_rows_of, [row for _, row in some]))
            due = [(record, was) for (record, row), was in zip(some, before, strict=True) if _is_due(was, row)]
            # Others write a record before its row: so a record that is read behind its row is not older.
            read = [(was, row) for record, was in due if (row := self._read(record)) is not None]
            self._in_transaction(partial(self._put, read))
            self._found.read[table.__tablename__] += len(some)
            known.update(inspect(table).primary_key_from_instance(row)[0] for _, row in some)
        self._in_transaction(partial(self._drop, table, known))

    def _read(self, record: _Record) -> Table | None:
        """Read a record's row; None for one that was deleted since it was listed, never accepted, or cannot be read."""
        try:
            return record.row()
        except NotFound:
            return None
        except ValidationError as error:
            self._found.unreadable.append(f"{record.key}: {error.errors()[0]['msg']}")
            return None

    def _in_transaction(self, work: Callable[[Session], object]) -> None:
        def work_or_look(session: Session) -> None:
            work(session)
            if self._only_look:
                session.rollback()

        self._database.write(work_or_look)

    def _put(self, rows: list[tuple[Table | None, Table]], session: Session) -> None:
        """Put rows, each if the one before is still as it was: else somebody has just written it, from its record."""
        for before, row in rows:
            identity = inspect(type(row)).primary_key_from_instance(row)
            now = session.get(type(row), identity, populate_existing=True, with_for_update=True)
            is_as_before = before is None if now is None else before is not None and not _differ(now, before)
            if is_as_before and _is_due(before, row):
                (self._found.missing if before is None else self._found.outdated)[row.__tablename__] += 1
                session.merge(row)

    def _drop(self, table: type[Table], known: set[Any], session: Session) -> None:
        is_settled = inspect(table).columns["created_at"] < self._began - _SETTLED_S
        for row in session.scalars(select(table).where(is_settled)).all():
            identity = inspect(table).primary_key_from_instance(row)[0]
            if identity not in known and identity != FIRST_TENANT:
                self._found.unknown[table.__tablename__] += 1
                session.delete(row)


def _rows_of(rows: list[Table], session: Session) -> list[Table | None]:
    """Return the rows of the database that are of the same things."""
    return [session.get(type(row), inspect(type(row)).primary_key_from_instance(row)) for row in rows]


def _is_due(before: Table | None, row: Table) -> bool:
    """True if a row is missing or outdated. The rows of running runs are updated by `Watch`."""
    if before is None:
        return True
    return _differ(before, row) and not (isinstance(before, RunRow) and before.state == "running")


def _differ(before: Table, after: Table) -> bool:
    """True if a column that comes from the record differs."""
    given = (name for name in inspect(after).dict if not name.startswith("_") and name != "updated_at")
    return any(getattr(before, name) != getattr(after, name) for name in given)
