"""The entry point of `longshore`. Nothing heavy is imported before a command needs it."""

import os
import sys
from typing import Annotated

import typer

from service.cli import data_commands, rl_commands, run_commands, stack_commands, submit_commands
from service.cli.connection import Globals, Json
from service.cli.exits import FAILED, INTERRUPTED, Stop
from service.cli.render import say

app = typer.Typer(
    name="longshore",
    help="Train language models on your own machines: a dataset in, a trained adapter out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _globals(
    context: typer.Context,
    as_json: Json = False,
    api_url: Annotated[str | None, typer.Option("--api-url", help="The service, as http://host:port.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Better: LONGSHORE_API_KEY.")] = None,
) -> None:
    context.obj = Globals(as_json, api_url, api_key)


stack_commands.register(app)
app.add_typer(submit_commands.app, name="submit")
run_commands.register(app)
rl_commands.register(app, submit_commands.app)
data_commands.register(app)


def main() -> None:
    """Run the command line; every error that a user can meet ends as a plain line and an exit code."""
    try:
        app()
    except Stop as stop:
        say(f"error: {stop.message}")
        if stop.advice:
            say(stop.advice)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `longshore ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:  # a file of this machine: a full disk, a folder that may not be written
        say(f"error: {error}")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
