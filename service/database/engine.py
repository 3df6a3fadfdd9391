"""The database: SQLite in a file, or PostgreSQL by URL. Short transactions, in dedicated threads."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from service.errors import DatabaseUnavailable
from shared.errors import InvalidInput
from shared.settings import Settings

ResultT = TypeVar("ResultT")

_THREADS = 8
_BUSY_MS = 10_000
_CONNECT_S = 5


class Database:
    """Transactions. Blocking, except `reading` and `writing`. Returned rows stay readable afterwards."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: `sqlite:////absolute/path` or `postgresql://user:password@host/name`.

        Raises:
            InvalidInput: another kind of database.
        """
        self.engine = _engine(url)
        self._writer = self.engine.execution_options(writes=True)
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
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._do, work, self._writer)

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
                engine = create_engine(parsed, pool_size=_THREADS, connect_args={"timeout": _BUSY_MS / 1000})
                event.listen(engine, "connect", _set_up_sqlite)
                event.listen(engine, "begin", _begin_sqlite)
                return engine
            case "postgresql":
                return create_engine(
                    parsed.set(drivername="postgresql+psycopg"),
                    pool_size=_THREADS,
                    pool_pre_ping=True,
                    connect_args={"connect_timeout": _CONNECT_S},
                )
    except (ArgumentError, NoSuchModuleError, ValueError):
        pass  # the message may contain the URL, and the URL a password
    raise InvalidInput("the database is sqlite:////path or postgresql://user:password@host/name", "database_url")


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy begins transactions, not the driver
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
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
