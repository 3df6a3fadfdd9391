"""The database: tables, connections, locks, migrations."""

import asyncio
import logging
import math
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakValueDictionary

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    String,
    Text,
    create_engine,
    event,
    insert,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from longshore.runs import FIRST_TENANT
from shared.errors import DatabaseUnavailable, InvalidInput
from shared.settings import Settings

# --- The tables ---
# Times are seconds since 1970.


class Table(DeclarativeBase):
    """The parent of all rows."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        float: Float(53),
        int: BigInteger,
        dict[str, Any]: JSON,
        list[str]: JSON,
    }


class TenantRow(Table):
    """A tenant. `quotas` overrides the installation's own, field by field."""

    __tablename__ = "tenants"

    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    title: Mapped[str] = mapped_column(String(128))
    quotas: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class KeyRow(Table):
    """An API key: its hash, never itself. `last_used_at` is the table's own, and at most a minute old."""

    __tablename__ = "keys"

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48), index=True)
    title: Mapped[str] = mapped_column(String(128))
    prefix: Mapped[str] = mapped_column(String(32))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]]
    created_by: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class SignInRow(Table):
    """A browser that is signed in to the page: hashes of its token and key."""

    __tablename__ = "sessions"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class FileRow(Table):
    """An uploaded file. Files with equal bytes and names share an object.

    `state`: `writing` before its bytes are in the store, then `kept`; `deleting` until they are gone. `state_at`: since
    when. A file whose process died in between is deleted later.
    """

    __tablename__ = "files"
    __table_args__ = (
        Index("files_by_time", "tenant", "created_at", "file_id"),
        Index("files_by_uri", "tenant", "uri"),
        Index("files_by_state", "state", "state_at"),
    )

    file_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(64))
    size: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    uri: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    state: Mapped[str] = mapped_column(String(16))
    state_at: Mapped[float]


class DocumentRow(Table):
    """A small record of a tenant, as JSON (accounts/tenants.py). Keys sort by their bytes."""

    __tablename__ = "documents"
    __table_args__ = (
        Index("documents_by_bytes", "tenant", "num_bytes"),
        Index("documents_by_age", "kind", "written_at"),
        Index("documents_by_alias", "tenant", "kind", "alias", unique=True),
    )

    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True)
    alias: Mapped[str | None] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)
    num_bytes: Mapped[int]
    written_at: Mapped[float]


class StoredRow(Table):
    """Bytes that count for a tenant beside its files and documents: what `owner`, a run or a shared unit, holds of a
    category, as it was at `at`. With `expires_at`: a reservation, which ends then if its process has died.
    """

    __tablename__ = "stored_bytes"

    tenant: Mapped[str] = mapped_column(String(48), primary_key=True)
    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    what: Mapped[str] = mapped_column(String(64), primary_key=True)
    num_bytes: Mapped[int]
    at: Mapped[float]
    expires_at: Mapped[float | None]


class RunRow(Table):
    """A run. `record` and `status` are JSON of RunRecord and RunStatus; the other columns are for questions to them.

    `recorded_at`: the time, by Temporal's clock, of the last change that the run's workflow has recorded; else 0.
    """

    __tablename__ = "runs"
    __table_args__ = (
        Index("runs_by_time", "tenant", "created_at", "run_id"),
        Index("runs_by_state", "tenant", "state", "created_at", "run_id"),
        Index("runs_open", "state", "run_id"),
        Index("runs_by_api", "tenant", "api", "created_at", "run_id"),
        Index("runs_by_end", "tenant", "ended_at", "gpu_seconds"),
    )

    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    owner: Mapped[str | None] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(8))
    name: Mapped[str | None] = mapped_column(String(64))
    api: Mapped[str] = mapped_column(String(16))
    schedule: Mapped[str | None] = mapped_column(String(128))
    model: Mapped[str] = mapped_column(Text)
    labels: Mapped[dict[str, Any]] = mapped_column("metadata")
    created_at: Mapped[float]
    state: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(32))
    step: Mapped[int]
    num_steps: Mapped[int | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    gpu_seconds: Mapped[float]
    record: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]
    recorded_at: Mapped[float]


class RemovedRow(Table):
    """A run that was removed, even if some of its files remain. Its GPU seconds count in its tenant's quota as if it
    were there. `stays_published`: its published versions stay, and need its record and one job file.
    """

    __tablename__ = "removed_runs"
    __table_args__ = (Index("removed_by_end", "tenant", "ended_at"),)

    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    created_at: Mapped[float]
    ended_at: Mapped[float]
    gpu_seconds: Mapped[float]
    stays_published: Mapped[bool]


class UnitRow(Table):
    """An artifact that several runs may share, or the folder of a run. `claimed_at`: since when a process deletes it;
    0: none does.
    """

    __tablename__ = "units"

    unit: Mapped[str] = mapped_column(String(128), primary_key=True)
    claimed_at: Mapped[float]


class UseRow(Table):
    """A run that uses a unit until it has ended. `at`: when it last said so."""

    __tablename__ = "uses"

    unit: Mapped[str] = mapped_column(String(128), primary_key=True)
    run_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    at: Mapped[float]


class OutboxRow(Table):
    """A change of a run's state that webhooks have not been notified of yet.

    It is written with the change, and deleted when a workflow has taken it over.
    """

    __tablename__ = "outbox"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(48))
    type: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(index=True)


class AuditRow(Table):
    """A request that changed something, or was refused: who, what, on which id, when, from where, and the answer."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_tenant", "tenant", "id"),)

    # SQLite counts up a column of exactly this type by itself.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    time: Mapped[float] = mapped_column(index=True)
    tenant: Mapped[str | None] = mapped_column(String(48))
    key_id: Mapped[str | None] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str] = mapped_column(Text)
    target: Mapped[str | None] = mapped_column(Text)
    status: Mapped[int] = mapped_column(Integer)
    address: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str] = mapped_column(String(64))


# --- Locks by key, in this process: changes of the same object wait for each other ---


class KeyedLocks:
    """A lock for each key, which `places` tasks may hold at once. It exists while a task holds it or waits for it."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Semaphore] = WeakValueDictionary()

    def of(self, *key: str) -> asyncio.Semaphore:
        return self._locks.setdefault(key, asyncio.Semaphore(self._places))


RecordT = TypeVar("RecordT")
_MOST_TRUSTED = 4096


class Recent(Generic[RecordT]):
    """Records that were found less than `trusted_s` ago, so that not every request reads them anew.

    A change by another process takes effect here within this time, and one by this process at once if it is forgotten.
    """

    def __init__(self, trusted_s: float = 2.0) -> None:
        self._trusted_s = trusted_s
        self._found: dict[tuple[str, ...], tuple[float, RecordT]] = {}

    async def of(self, *key: str, find: Callable[[], Awaitable[RecordT | None]]) -> RecordT | None:
        """Return the record of a key, as `find` finds it or has found it. That there is none is not remembered."""
        since, record = self._found.get(key, (-math.inf, None))
        if time.monotonic() - since > self._trusted_s:
            asked = time.monotonic()
            if (record := await find()) is None:
                self.forget(*key)
            else:
                if len(self._found) >= _MOST_TRUSTED:
                    self._found.clear()
                self._found[key] = asked, record
        return record

    def forget(self, *key: str) -> None:
        self._found.pop(key, None)


# --- The database: SQLite in a file, or PostgreSQL by URL. Short transactions, in dedicated threads ---

ResultT = TypeVar("ResultT")

_THREADS = 8
_BUSY_MS = 10_000
_CONNECT_S = 5


class Database:
    """Transactions. Blocking, except `reading` and `writing`. Returned rows stay readable afterwards.

    Attributes:
        recent: records of clients that each of their requests needs. What may change in them is not read from here.
    """

    def __init__(self, url: str) -> None:
        """
        Args:
            url: `sqlite:////absolute/path` or `postgresql://user:password@host/name`.

        Raises:
            InvalidInput: another kind of database.
        """
        self.engine = _engine(url)
        self.recent = Recent[Any](60.0)
        self._writer = self.engine.execution_options(writes=True)
        # SQLite has one writer at a time, whom others would wait for in threads that readers need.
        self._writers = ThreadPoolExecutor(1 if self.is_sqlite else _THREADS, "database-writer")
        self._threads = ThreadPoolExecutor(_THREADS, "database")

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    async def reading(self, work: Callable[[Session], ResultT]) -> ResultT:
        """Do `work` in a read-only transaction. Raises DatabaseUnavailable; InvalidInput for a NUL in a text."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._do, work, self.engine)

    async def writing(self, work: Callable[[Session], ResultT]) -> ResultT:
        """Do `work` in a transaction, which is rolled back if it raises. Raises DatabaseUnavailable.

        If another writer has meanwhile inserted a row that `work` inserts, `work` is done a second time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writers, self._do, work, self._writer)

    def read(self, work: Callable[[Session], ResultT]) -> ResultT:
        """Like `reading`, but blocking."""
        return self._do(work, self.engine)

    def write(self, work: Callable[[Session], ResultT]) -> ResultT:
        """Like `writing`, but blocking."""
        return self._do(work, self._writer)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Open a connection in one writing transaction, for migrations."""
        with _away(), self._writer.begin() as connection:
            yield connection

    def close(self) -> None:
        self._threads.shutdown()
        self._writers.shutdown()
        self.engine.dispose()

    def _do(self, work: Callable[[Session], ResultT], engine: Engine) -> ResultT:
        with _away():
            try:
                return _done(work, engine)
            except IntegrityError:  # PostgreSQL, whose writers work side by side
                return _done(work, engine)


def open_database(settings: Settings) -> Database:
    """Open the database that the settings name. Its tables may not be there yet."""
    if settings.database_url:
        return Database(settings.database_url.get_secret_value())
    path = settings.root_path / "service" / "longshore.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    return Database(f"sqlite:///{path}")


def _done(work: Callable[[Session], ResultT], engine: Engine) -> ResultT:
    with Session(engine, expire_on_commit=False) as session, session.begin():
        return work(session)


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        match parsed.get_backend_name():
            case "sqlite":
                engine = create_engine(
                    parsed, pool_size=_THREADS, connect_args={"timeout": _BUSY_MS / 1000}, hide_parameters=True
                )
                event.listen(engine, "connect", _set_up_sqlite)
                event.listen(engine, "begin", _begin_sqlite)
                return engine
            case "postgresql":
                return create_engine(
                    parsed.set(drivername="postgresql+psycopg"),
                    pool_size=_THREADS,
                    pool_pre_ping=True,
                    hide_parameters=True,  # webhooks' secrets are among them
                    connect_args={"connect_timeout": _CONNECT_S},
                )
    except (ArgumentError, NoSuchModuleError, ValueError):
        pass  # the message may contain the URL, and the URL a password
    raise InvalidInput("the database is sqlite:////path or postgresql://user:password@host/name", "database_url")


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy begins transactions, not the driver
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous=FULL")  # what was accepted survives a power failure
    connection.execute("PRAGMA foreign_keys=ON")


def _write_ahead(connection: Any) -> None:
    """Switch to a write-ahead log. On a new file SQLite lets only one connection do so, so others try again."""
    end = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(random.uniform(0.005, 0.02))


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock at once: if a transaction began as a reader, its first write could fail without waiting.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except (OperationalError, PoolTimeout) as error:
        raise DatabaseUnavailable("the database does not answer; the service's log says why") from error
    except DataError as error:  # PostgreSQL, where SQLite takes any text
        raise InvalidInput("a text with a NUL character is found nowhere here, and kept nowhere") from error


# --- Migrate the tables to the newest revision, in one transaction, one process at a time ---
#
# A new database gets the tables above at once. Migrations are for databases that an earlier release has made.
#
# Services of the release before serve on the tables, too, while one takes another's place or goes back. So a migration
# adds tables, indexes, and columns that may be left out; unused ones are removed a release later.

_log = logging.getLogger("longshore.service")
_LOCK = 0x10095409E  # of PostgreSQL; SQLite's writer has the whole file


def upgrade(database: Database) -> bool:
    """Make the tables, or run the migrations that are missing. Returns whether the database was empty before.

    A database that a newer release has migrated is not changed.

    Raises DatabaseUnavailable: it cannot be reached.
    """
    with database.connection() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        before = revision(connection)
        if before is None:
            Table.metadata.create_all(connection)
            first = {"tenant": FIRST_TENANT, "title": "", "quotas": {}, "created_at": 0.0}
            connection.execute(insert(TenantRow).values(first))
            command.stamp(_config(connection), "head")
        elif before in {each.revision for each in ScriptDirectory.from_config(_config()).walk_revisions()}:
            command.upgrade(_config(connection), "head")
        else:
            _log.warning("a newer version has migrated the database to revision %s: it stays so", before)
        return before is None


def revision(connection: Connection) -> str | None:
    """Return the revision of a database; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def newest() -> str | None:
    return ScriptDirectory.from_config(_config()).get_current_head()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
