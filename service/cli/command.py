"""The entry point of `longshore`, and what its commands share: functions that return their output, for people or with
`--json` for programs; the options before the command, and a client of the service that these name.

Nothing heavy is imported before a command needs it.
"""

import inspect
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from longshore.connection import Address, ConnectionProblem, Profiles, find_address

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from longshore import Client, Run
    from longshore.client import ServiceError
    from shared.settings import Settings

# --- Exit codes, and the errors that end a command with one or two plain lines ---

DONE = 0
USAGE = 2
FAILED = 100
NOT_FINISHED = 101
NOT_FOUND = 102
CANCELLED = 103
INTERRUPTED = 130

OF_STATE = {
    "running": NOT_FINISHED,
    "paused": NOT_FINISHED,
    "succeeded": DONE,
    "failed": FAILED,
    "cancelled": CANCELLED,
}


class Stop(Exception):
    """End the command.

    Args:
        message: what is wrong, with its place and rule.
        code: the exit code.
        advice: what to do next.
        details: more fields of the error's JSON document.
    """

    def __init__(
        self,
        message: str,
        code: int = FAILED,
        advice: str | None = None,
        details: dict[str, str | None] | None = None,
    ) -> None:
        self.message = message
        self.code = code
        self.advice = advice
        self._details = details or {}
        super().__init__(message)

    def document(self) -> dict[str, dict[str, str | int | None]]:
        """Return the error's JSON document for `--json`."""
        return {"error": {"message": self.message, "advice": self.advice, "exit_code": self.code, **self._details}}


def stop_of(error: "ServiceError") -> Stop:
    """Return the error that ends a command which the service refuses, with advice."""
    status, message, advice = error.status, str(error), None
    path = "" if error.response is None else error.response.url.path
    code = NOT_FOUND if status == 404 else FAILED
    match status:
        case 0:
            advice = "start the stack with `longshore dev`, or name another service with --api-url"
        case 401:
            advice = "`longshore login` keeps a key; or set LONGSHORE_API_KEY, or give --api-key"
            if error.response is not None and "authorization" in error.response.request.headers:
                advice = f"`longshore config show --origin` says where it comes from; {advice}"
        case 403:
            advice = "`longshore whoami` shows your scopes; an admin's `longshore keys create` gives others"
        case 404:
            advice = _list_command_hint(path)
        case 429 if "quota" in message or getattr(error, "is_quota", False):
            advice = "`longshore usage` shows what is used, and the quotas"
        case 429 if error.response is not None:
            advice = f"ask again in {error.response.headers.get('retry-after', 'a few')} seconds"
        case 502 | 503 | 504:
            advice = "`longshore doctor` says what is away"
        case 500 if error.response is not None:
            message = f"{message} ({error.response.headers.get('x-request-id')})"
    found = {} if status != 422 else {"place": error.place, "rule": error.rule}
    return Stop(message, code, advice, found)


def _list_command_hint(path: str) -> str:
    """Name the command that lists the resources of a kind."""
    kinds = {"files": "files", "keys": "keys", "tenants": "tenants", "schedules": "schedule", "webhooks": "webhook"}
    kinds |= {"models": "models", "chat": "models", "sweeps": "sweep"}
    kind = path.removeprefix("/api").removeprefix("/v1/").partition("/")[0]
    command = f"longshore {kinds[kind]} ls" if kind in kinds else "longshore ls"
    return f"`{command}` shows what there is"


# --- Print to stdout and stderr: JSON, tables, lines; format times, durations and sizes ---

_COLOURS = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "done": "green",
    "skipped": "yellow",
}
_WIDTH_OF_FILES = 1000
_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def print_json(value: Any) -> None:
    """Print a JSON value, which may contain pydantic models and dataclasses."""
    from pydantic_core import to_jsonable_python

    sys.stdout.write(json.dumps(to_jsonable_python(value), indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line to stderr: stdout is for output that programs read."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def waiting(what: str, every_s: float = 5.0) -> Iterator[Callable[[], None]]:
    """Print every few seconds what the program waits for, until the block ends or calls the function that it gets."""
    is_over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not is_over.wait(every_s):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield is_over.set
    finally:
        is_over.set()


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Its first column is never cut, so that ids can be copied. Without column names, no header."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    out.width = _WIDTH_OF_FILES  # a file or a program has no width: nothing is folded for it, and nothing filled up
    with out.capture() as printed:
        out.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())


def print_items(items: Iterable[Any], columns: Mapping[str, str | Callable[[Any], str]]) -> None:
    """Print a table of models. `columns`: by its heading the name of a field, which says how it is shown; or a function
    that returns a cell."""
    print_table(tuple(columns), ([_cell(item, column) for column in columns.values()] for item in items))


def _cell(item: Any, name: str | Callable[[Any], str]) -> str:
    if not isinstance(name, str):
        return name(item)
    match value := getattr(item, name):
        case None | "":
            return "never" if name == "last_used_at" else ""
        case float() if name.endswith(("_at", "time")):
            return ago(value)
        case tuple() | list() | frozenset():
            return ", ".join(map(str, value))
        case int() | float() if not isinstance(value, bool):
            return f"{value:,}"
        case _:
            return plain(str(value))


def coloured(state: str) -> str:
    """Return a state with its colour, in Rich's markup."""
    return f"[{_COLOURS[state]}]{state}[/]"


def plain(text: str | None) -> str:
    """Escape a user's text for a table cell: nothing in it is taken for markup."""
    from rich.markup import escape

    return escape(text or "")


def ago(moment: float) -> str:
    """Return how long ago a moment was, in the largest unit."""
    seconds = max(0, int(time.time() - moment))
    unit, length = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{seconds // length}{unit} ago"


def seconds_of(text: str, option: str) -> int:
    """Parse 90s, 90m, 6h or 1d into seconds. Raises Stop, with the option's name."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise Stop(f"{option}: {text!r} is no time: write it as 90m, 6h or 1d", USAGE)
    return int(found[1]) * dict(_UNITS)[found[2]]


def span(seconds: float) -> str:
    """Format seconds in their two largest units: 3d 4h, 2h 10m, 4m 30s, 12s."""
    left = max(0, round(seconds))
    for (unit, length), (smaller, part) in pairwise(_UNITS):
        if left >= length:
            rest = left % length // part
            return f"{left // length}{unit}" + (f" {rest}{smaller}" if rest else "")
    return f"{left}s"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the largest unit."""
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


M = TypeVar("M", bound="BaseModel")
Command = Callable[..., "CommandAnswer | None"]
_LONGEST_HELP = 200
TRACE_PARENT = "TRACEPARENT"
"""The variable by which programs pass on the trace that they are part of."""
_OWN = ("client", "context", "as_json")
_MEND = "mend the LONGSHORE_ variable, ./longshore.toml or the user's configuration file"
_MOST_COMPLETIONS, _COMPLETION_PATIENCE_S = 50, 2.0
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for programs.")]


@dataclass(frozen=True)
class Globals:
    """Options before the command."""

    as_json: bool = False
    api_url: str | None = None
    api_key: str | None = None
    profile: str | None = None
    take_run: "Callable[[Run], None] | None" = None  # of a command that wants the run that `submit` would start


def address(given: Globals) -> Address:
    """Find the URL and key of the service, each in the first place that has one (longshore/connection.py)."""
    read_settings()  # a wrong setting is named, whatever the command
    return find_address(given.api_url, given.api_key, given.profile)


def client_at(url: str, key: str | None, patience_s: float = 2.0, **options: Any) -> "Client":
    """Return a client. The validators of its models are built when they are used: building all takes long."""
    from longshore.fields import Frozen

    Frozen.model_config["defer_build"] = True
    from longshore.client import Client

    return Client(url, key, patience_s=patience_s, **options)


def client_of(context: typer.Context, patience_s: float = 2.0) -> "Client":
    """Return a client of the service that this command talks to. `patience_s`: as for Client."""
    found = address(context.obj)
    return client_at(found.url, found.key, patience_s, traceparent=os.environ.get(TRACE_PARENT))


def read_settings() -> "Settings":
    """Read the settings. Raises Stop, which names the setting that is wrong."""
    from pydantic import ValidationError

    from shared.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "LONGSHORE_" + "__".join(str(part) for part in first["loc"]).upper()
        raise Stop(f"{name}: {first['msg']}", USAGE, _MEND) from None
    except ValueError as error:  # no TOML, or no JSON in a variable that wants it
        raise Stop(f"the settings cannot be read: {error}", USAGE, _MEND) from None


# Shell completion. Errors give an empty completion, and no message.


def run_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of the newest runs, each with its state and name. (Typer keeps those that match.)"""
    # Nothing was called yet, the callback of the options before the command neither.
    given = context.find_root().params
    try:
        found = address(Globals(False, given.get("api_url"), given.get("api_key"), given.get("profile")))
        with client_at(found.url, found.key, patience_s=0, timeout_s=_COMPLETION_PATIENCE_S) as client:
            page = client.runs.list(_MOST_COMPLETIONS, words=incomplete or None)
    except Exception:  # whatever it is, a shell has no place for it
        return []
    return [(view.run_id, f"{view.state} {view.run.name or ''}".strip()) for view in page.runs]


def profile_names() -> list[str]:
    try:
        return list(Profiles.read().profiles)
    except (ConnectionProblem, OSError):
        return []


@dataclass(frozen=True)
class CommandAnswer:
    """The result of a command.

    Args:
        document: printed with `--json`: a JSON value, which may contain pydantic models and dataclasses.
        show: prints it for people.
        code: the exit code.
    """

    document: Any
    show: Callable[[], object]
    code: int = 0


def group(name: str | None = None, **options: Any) -> typer.Typer:
    """Make a group of commands, which shows its help when it is called without one. `options`: Typer's own."""
    return typer.Typer(name=name, no_args_is_help=True, rich_markup_mode=None, cls=WholeHelp, **options)


class WholeHelp(TyperGroup):
    """Lists commands with all of their descriptions' first sentence: below `headings`, if a group has some."""

    # Typer's own headings need Rich, which takes long to load.
    headings: Mapping[str, Iterable[str]] | None = None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in (self.headings or {"Commands": self.list_commands(ctx)}).items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, each.get_short_help_str(_LONGEST_HELP)) for name, each in found if each])


def command(
    app: typer.Typer, name: str | None = None, *, patience_s: float = 2.0, **options: Any
) -> Callable[[Command], Command]:
    """Add a function to an app as a command with `--json`. Arguments: as for `answering`; `options`: Typer's own."""

    def add(function: Command) -> Command:
        app.command(name=name, **options)(answering(function, patience_s))
        return function

    return add


def answering(function: Command, patience_s: float = 2.0) -> Callable[..., None]:
    """Wrap a function for Typer: the wrapper also takes `--json`, prints the answer and exits with its code.

    Args:
        function: its parameters are the command's arguments and options, except `client`, a client of the service,
            `context`, the command's context, and `as_json`. It returns None if it has printed everything.
        patience_s: as for Client.
    """
    wanted = inspect.signature(function).parameters

    def called(context: typer.Context, as_json: bool, **values: Any) -> None:
        given: Globals = context.obj
        as_json = as_json or given.as_json
        own: dict[str, Any] = {"context": context, "as_json": as_json}
        with ExitStack() as stack:
            if "client" in wanted:
                own["client"] = stack.enter_context(client_of(context, patience_s))
            answer = function(**values, **{name: value for name, value in own.items() if name in wanted})
            if answer is None:
                return
            if as_json:
                print_json(answer.document)
            else:
                answer.show()
        if answer.code:
            raise typer.Exit(answer.code)

    keyword = inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = [each.replace(kind=keyword) for name, each in wanted.items() if name not in _OWN]
    last = inspect.Parameter("as_json", keyword, default=False, annotation=Json)
    # Without the function's annotations: Typer would look up the names in them.
    update_wrapper(called, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    called.__signature__ = inspect.Signature([first, *options, last])  # type: ignore[attr-defined]
    return called


def by_id(
    app: typer.Typer,
    name: str,
    id: Any,
    ask: "Callable[[Client, str], Any]",
    show: Callable[[str, Any], object],
    help: str,
) -> None:
    """Add a command whose only argument is an id or a name, which it asks the service about.

    Args:
        id: the annotation of the argument.
        show: prints the answer to people, given the id and the answer.
    """

    def function(client: "Client", id: Any) -> CommandAnswer:
        found = ask(client, id)
        return CommandAnswer(found, partial(show, id, found))

    function.__doc__ = help
    function.__annotations__["id"] = id
    command(app, name)(function)


def checked(model: "type[M]", fields: dict[str, Any]) -> "M":
    """Validate a request. Raises Stop with the first rule that it breaks."""
    from pydantic import ValidationError

    from shared.field_rules import first_rule

    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise Stop(first_rule(error), USAGE, "--help lists the options") from None


def said(message: dict[str, Any]) -> str:
    calls = (f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (str(message.get("content") or ""), *calls)))


# --- The headings of `longshore --help`, and the module that defines each command ---
#
# A module is imported when one of its commands is asked for: `longshore ls` loads nothing of `submit`.

# Heading: {command: module of service.cli}.
HEADINGS = {
    "Before a run": {"validate": "data", "preview": "data", "estimate": "data", "grader": "data", "files": "data"},
    "Start runs": {
        **dict.fromkeys(("submit", "rollout", "step", "finish", "import"), "runs"),
        **{"sweep": "schedules", "schedule": "schedules"},
    },
    "Look at runs": {
        **dict.fromkeys(("ls", "get", "watch", "logs", "events", "steps", "metrics", "compare"), "runs"),
        **dict.fromkeys(("checkpoints", "profile", "episodes"), "runs"),
        "session": "runs",
        "webhook": "schedules",
    },
    "Change runs": dict.fromkeys(("pause", "cancel", "resume", "retry", "rm"), "runs"),
    "Use what they published": {
        **dict.fromkeys(("models", "chat", "download", "export", "verify", "episode"), "models"),
    },
    "Services, keys, tenants": {
        **{"login": "account", "logout": "account"},
        **dict.fromkeys(("whoami", "usage", "keys", "tenants", "audit", "gc"), "account"),
        "config": "account",
        "api": "account",
    },
    "This machine": dict.fromkeys(("dev", "doctor", "db", "builds"), "stack"),
}
COMMANDS = {command: module for modules in HEADINGS.values() for command, module in modules.items()}


class HeadedHelp(WholeHelp):
    """The commands below HEADINGS."""

    headings = HEADINGS

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names alone: `get_command` loads one

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of its module's `app`, or the app itself if that is the group of this name."""
        if cmd_name not in COMMANDS:
            return None
        group = _group(COMMANDS[cmd_name])
        return group if group.name == cmd_name else group.commands[cmd_name]


@cache
def _group(module: str) -> TyperGroup:
    return typer.main.get_group(import_module(f"service.cli.{module}").app)


_EXAMPLES = """\b
Examples:
  longshore dev --detach
  longshore preview -m org/model -d train.jsonl
  longshore estimate sft -m org/model -d train.jsonl --epochs 3
  longshore submit sft -m org/model -d train.jsonl --epochs 3 --wait
  longshore ls --state running --json

Exit codes: 0 done, 2 wrong usage, 100 failed, 101 not finished in time, 102 not found, 103 cancelled, 130 Ctrl-C.
"""

app = typer.Typer(
    name="longshore",
    cls=HeadedHelp,
    epilog=_EXAMPLES,
    help="Train language models on your own machines: a dataset in, a trained adapter out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"longshore {version('longshore')}")
        raise typer.Exit


@app.callback()
def _globals(
    context: typer.Context,
    as_json: Json = False,
    api_url: Annotated[str | None, typer.Option("--api-url", help="URL of the service, as http://host:port.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The API key. Better: longshore login.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar="LONGSHORE_PROFILE",
            help="The name of a service from `longshore login`.",
            autocompletion=profile_names,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    context.obj = Globals(as_json, api_url, api_key, profile)


@contextmanager
def _traced() -> Iterator[None]:
    """Record a span of the command if an endpoint is set. Programs pass a trace on to others in `TRACEPARENT`."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        yield
        return
    from service.telemetry import span_of_program

    command = next((word for word in sys.argv[1:] if word in COMMANDS), "")
    with span_of_program("cli", f"longshore {command}".strip(), os.environ.get(TRACE_PARENT)) as traceparent:
        os.environ |= {TRACE_PARENT: traceparent} if traceparent else {}
        yield


def main() -> None:
    """Run the command line; every error that a user can meet ends as a plain line and an exit code."""
    try:
        with _traced():
            code = app(prog_name="longshore", standalone_mode=False)
    except Stop as stop:
        code = _ended_by(stop)
    except ConnectionProblem as error:
        code = _ended_by(Stop(str(error), USAGE, error.advice))
    except typer.TyperException as error:  # an option that there is not, an argument that is missing
        error.show()  # type: ignore[attr-defined]  # all that Typer raises have it, and no public class does
        code = _ended_by(Stop(error.format_message(), error.exit_code), is_shown=True)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `longshore ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    except OSError as error:  # a file of this machine: a full disk, a folder that may not be written
        code = _ended_by(Stop(str(error)))
    except Exception as error:
        if (ended := _of_client(error)) is None:
            raise
        code = _ended_by(ended)
    if code:
        sys.exit(code)


def _of_client(error: Exception) -> Stop | None:
    """Return what ends a command when the client raises; None for other errors. Without httpx, no client was made."""
    if (client := sys.modules.get("longshore.client")) is None:
        return None
    if isinstance(error, client.ServiceError):
        return stop_of(error)
    return Stop(str(error)) if isinstance(error, client.DownloadFailed) else None


def _ended_by(stop: Stop, is_shown: bool = False) -> int:
    """Print an error, as JSON if requested; parsing the arguments itself may have failed. Returns the exit code."""
    if not is_shown:
        say(f"error: {stop.message}")
        if stop.advice:
            say(stop.advice)
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        print_json(stop.document())
    return stop.code
