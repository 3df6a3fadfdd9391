"""Commands: functions that return their output, for people or with `--json` for programs."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import typer
from typer.core import TyperGroup

from service.cli.connection import Globals, Json, cli_client
from service.cli.render import print_json

Command = Callable[..., "CommandAnswer | None"]
LONGEST_HELP = 200
_OWN = ("client", "context", "as_json")


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
