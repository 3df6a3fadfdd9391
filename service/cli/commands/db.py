"""Commands for operators about the service's database. They open it and the store themselves, without the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from service.cli.connection import Json, read_settings, wants_json
from service.cli.exits import FAILED, Stop
from service.cli.output.render import print_json, say

if TYPE_CHECKING:
    from service.database.engine import Database
    from service.rebuild import Differences
    from shared.storage.store import ObjectStore

app = typer.Typer(help="The service's database.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def upgrade() -> None:
    """Bring the tables to the newest revision. The service does so when it starts."""
    from service.database import migrate

    with _opened() as (_, database):
        migrate.upgrade(database)
        say(f"the database is at revision {migrate.newest()}")


@app.command()
def rebuild(context: typer.Context, as_json: Json = False) -> None:
    """Build tenants, keys, files and runs again from the store. The audit log stays as it is.

    The service may run meanwhile. Runs that go on are brought up to date by it.
    """
    from service.database import migrate
    from service.rebuild import rebuild

    with _opened() as (store, database):
        migrate.upgrade(database)
        _tell(rebuild(store, database), wants_json(context, as_json), "the database says what the store says")


@app.command()
def check(context: typer.Context, as_json: Json = False) -> None:
    """Compare the database with the store, and change nothing. Fails when they differ."""
    from service.database import migrate
    from service.rebuild import rebuild

    with _opened() as (store, database):
        with database.connection() as connection:
            found, wanted = migrate.revision(connection), migrate.newest()
        if found != wanted:
            message = f"the database is at revision {found}, this version needs {wanted}"
            raise Stop(message, advice="longshore db upgrade")
        differences = rebuild(store, database, only_look=True)
        _tell(differences, wants_json(context, as_json), "the database says what the store says")
    if differences.any:
        raise typer.Exit(FAILED)


def _tell(found: "Differences", as_json: bool, all_well: str) -> None:
    if as_json:
        print_json({**vars(found)})
        return
    say("read from the store: " + (", ".join(f"{number} {table}" for table, number in found.read.items()) or "nothing"))
    for word, counts in (("missing", found.missing), ("outdated", found.outdated), ("not in the store", found.unknown)):
        for table, number in counts.items():
            print(f"{table}: {number} {word}")
    for text in found.unreadable:
        print(f"unreadable: {text}")
    if not found.any:
        say(all_well)


@contextmanager
def _opened() -> "Iterator[tuple[ObjectStore, Database]]":
    """The store and the database of this machine's settings. Their errors end the command in a plain line."""
    from service.database.engine import open_database
    from shared.errors import LongshoreError
    from shared.storage.store import open_store

    settings = read_settings()
    try:
        database = open_database(settings)
        try:
            yield open_store(settings.store, settings.s3), database
        finally:
            database.close()
    except LongshoreError as error:
        raise Stop(str(error), advice="longshore doctor") from error
