"""Commands about this machine: run the stack, check it, and repair the service's database.

The commands of `db` open the database and the store themselves, without the service.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from service.cli.command import CommandAnswer, address, command, group, read_settings
from service.cli.render import DONE, FAILED, USAGE, Stop, print_table, say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import Client

    from service.database.engine import Database
    from shared.settings import Settings
    from shared.storage.store import ObjectStore

T = TypeVar("T")
app = typer.Typer(rich_markup_mode=None)
db = group(help="The service's database.")
app.add_typer(db, name="db")
builds = group(help="Builds of control hosts that run side by side during an upgrade.")
app.add_typer(builds, name="builds")
Root = Annotated[Path | None, typer.Option(help="Folder of the stack's state; LONGSHORE_ROOT, or ~/.longshore.")]


@app.command()
def dev(
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running in the background.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the stack of --root.")] = False,
    root: Root = None,
    opened: Annotated[
        list[Path] | None,
        typer.Option(
            "--open",
            help="A folder whose files runs may read; the current one if absent. A running stack accepts more.",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The web service's port; the next free one if it is taken.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Print another link that signs a browser in once.")] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Also serve Temporal's own pages, which need no key.")] = False,
) -> None:
    """Run the whole stack on this machine: Temporal, the web service, hosts."""
    from service.dev import supervisor as stack
    from service.dev.supervisor import add_folders
    from service.errors import DevError

    settings = read_settings()
    if root is not None:
        settings = settings.model_copy(update={"root": root})
    if detach and stop:
        raise Stop("--detach starts a stack and --stop ends one: give one of them", USAGE)
    running = stack.supervisor(settings.root_path) if opened and not (stop or detach) else None
    try:
        if link:
            print(_link(settings.root_path))
        elif running is not None:
            open_now = add_folders(settings.root_path, running, opened or ())
            say(f"runs may read files below {', '.join(open_now)}; if one is new, the web service starts anew")
        elif stop:
            say("stopped" if stack.stop(settings.root_path) else f"no stack was running in {settings.root_path}")
        elif detach:
            say(stack.detach(settings.root_path, port, ui, opened or ()))
        else:
            stack.Stack(settings, port, ui, opened or (), tells_link=True).run()
    except DevError as error:
        raise Stop(str(error)) from None


def _link(root: Path) -> str:
    from service.dev.supervisor import Connection

    connection = Connection.read(root)
    if connection is None or (link := connection.sign_in_link()) is None:
        raise Stop(f"no stack answers in {root}", advice="longshore dev --detach")
    return link


@command(app)
def doctor(context: typer.Context, as_json: bool) -> CommandAnswer:
    """Check this machine and the service, and give advice on problems."""
    from service.cli.doctor import checks

    service = address(context.obj)
    found = []
    for check in checks(read_settings(), service.url, service.key):
        found.append(check)
        if not as_json:
            print(f"{check.verdict:<5} {check.name}: {check.text}")
            if check.advice:
                print(f"      {check.advice}")
    return CommandAnswer(found, lambda: None, FAILED if any(check.verdict == "fail" for check in found) else DONE)


@db.command()
def upgrade() -> None:
    """Migrate the tables to the newest revision. The service does so when it starts."""
    from service.database import engine

    with _opened() as (_, database):
        engine.upgrade(database)
        with database.connection() as connection:
            say(f"the database is at revision {engine.revision(connection)}")


@command(builds)
def ls() -> CommandAnswer:
    """List builds: which one new runs begin on, and whether other builds still have active runs."""
    from service.temporal import builds as found

    listed = _of_temporal(found)
    rows = tuple((each.build_id, each.state) for each in listed)
    nothing = "hosts are of no build: LONGSHORE_BUILD_ID is not set"
    return CommandAnswer(listed, partial(print_table, ("build", ""), rows) if rows else partial(say, nothing))


@command(builds)
def use(
    build: Annotated[str, typer.Argument(metavar="BUILD", help="The build, as in LONGSHORE_BUILD_ID of its hosts.")],
) -> CommandAnswer:
    """Let new runs begin on a build whose hosts are up. Active runs stay on their build; sessions move to it."""
    from service.temporal import make_current

    _of_temporal(partial(make_current, build_id=build))
    return CommandAnswer({"build_id": build, "state": "current"}, partial(say, f"new runs begin on {build}"))


def _of_temporal(ask: "Callable[[Client, Settings], Awaitable[T]]") -> T:
    """Ask Temporal itself, with this machine's settings. Raises Stop with its reason."""
    import asyncio

    from temporalio.service import RPCError

    from service.temporal import connect_once
    from shared.errors import LongshoreError

    settings = read_settings()

    async def asked() -> T:
        return await ask(await connect_once(settings), settings)

    try:
        return asyncio.run(asked())
    except (LongshoreError, RPCError, RuntimeError) as error:
        raise Stop(f"Temporal at {settings.temporal_address}: {error}") from None


@command(db)
def files() -> CommandAnswer:
    """List uploads that no file of the database names, and files whose bytes are gone, if older than a day.

    There are such if the database or the store was restored from an older backup. Fails if there are any.
    """
    import asyncio

    from service.accounts.tenants import Quotas
    from service.files import Files, uploads_folder

    settings = read_settings()
    with _opened() as (store, database):
        quotas = Quotas(settings.quotas, store, database)
        found = asyncio.run(Files(store, database, quotas, uploads_folder(settings.root_path)).compare())

    def show() -> None:
        for key in found.unnamed:
            print(f"no file: {key}")
        for name in found.missing:
            print(f"no bytes: {name}")
        if not (found.unnamed or found.missing):
            say("every upload has a file, and every file its bytes")

    return CommandAnswer(found, show, FAILED if (found.unnamed or found.missing) else DONE)


@contextmanager
def _opened() -> "Iterator[tuple[ObjectStore, Database]]":
    """Open the store and the database of this machine's settings. Their errors end the command with a plain line."""
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
