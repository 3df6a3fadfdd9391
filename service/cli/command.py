"""Commands: functions that return their output, for people or with `--json` for programs; and what all of them share:
the options before the command, and a client of the service that these name.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from longshore.connection import Address, ConnectionProblem, Profiles, find_address
from service.cli.render import USAGE, Stop, print_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from longshore import Client, Run
    from shared.settings import Settings

M = TypeVar("M", bound="BaseModel")
Command = Callable[..., "CommandAnswer | None"]
LONGEST_HELP = 200
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


def cli_client(context: typer.Context, patience_s: float = 2.0) -> "Client":
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
    """Lists commands with all of their descriptions' first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(LONGEST_HELP)) for name, each in found if each])


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
                own["client"] = stack.enter_context(cli_client(context, patience_s))
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
