"""Migrate the tables to the newest revision, in one transaction, one process at a time.

Services of the release before serve on the tables, too, while one takes another's place or goes back. So a migration
adds tables, indexes, and columns that may be left out; unused ones are removed a release later.
"""

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from service.database.engine import Database

_log = logging.getLogger("longshore.service")
_LOCK = 0x10095409E  # of PostgreSQL; SQLite's writer has the whole file


def upgrade(database: Database) -> bool:
    """Run the migrations that are missing. Returns whether the database was empty before.

    A database that a newer release has migrated is not changed.

    Raises DatabaseUnavailable: it cannot be reached.
    """
    with database.connection() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        before = revision(connection)
        if before is not None and before not in _revisions():
            _log.warning("a newer version has migrated the database to revision %s: it stays so", before)
            return False
        command.upgrade(_config(connection), "head")
        return before is None


def revision(connection: Connection) -> str | None:
    """Return the revision of a database; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def newest() -> str | None:
    """Return the revision that this code needs."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _revisions() -> set[str]:
    return {each.revision for each in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
