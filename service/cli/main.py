"""The entry point of `longshore`. Nothing heavy is imported before a command needs it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from longshore.connection import ConnectionProblem
from service.cli import command as cli

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
        **dict.fromkeys(("checkpoints", "profile"), "runs"),
        "episodes": "episodes",
        "session": "runs",
        "webhook": "schedules",
    },
    "Change runs": dict.fromkeys(("pause", "cancel", "resume", "retry", "rm"), "runs"),
    "Use what they published": {
        **dict.fromkeys(("models", "chat", "download", "export", "verify"), "models"),
        "episode": "episodes",
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


class HeadedHelp(cli.WholeHelp):
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
    as_json: cli.Json = False,
    api_url: Annotated[str | None, typer.Option("--api-url", help="URL of the service, as http://host:port.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The API key. Better: longshore login.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar="LONGSHORE_PROFILE",
            help="The name of a service from `longshore login`.",
            autocompletion=cli.profile_names,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    context.obj = cli.Globals(as_json, api_url, api_key, profile)


@contextmanager
def _traced() -> Iterator[None]:
    """Record a span of the command if an endpoint is set. Programs pass a trace on to others in `TRACEPARENT`."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        yield
        return
    from service.telemetry import span_of_program

    command = next((word for word in sys.argv[1:] if word in COMMANDS), "")
    with span_of_program("cli", f"longshore {command}".strip(), os.environ.get(cli.TRACE_PARENT)) as traceparent:
        os.environ |= {cli.TRACE_PARENT: traceparent} if traceparent else {}
        yield


def main() -> None:
    """Run the command line; every error that a user can meet ends as a plain line and an exit code."""
    try:
        with _traced():
            code = app(prog_name="longshore", standalone_mode=False)
    except cli.Stop as stop:
        code = _ended_by(stop)
    except ConnectionProblem as error:
        code = _ended_by(cli.Stop(str(error), cli.USAGE, error.advice))
    except typer.TyperException as error:  # an option that there is not, an argument that is missing
        error.show()  # type: ignore[attr-defined]  # all that Typer raises have it, and no public class does
        code = _ended_by(cli.Stop(error.format_message(), error.exit_code), is_shown=True)
    except (KeyboardInterrupt, typer.Abort):
        code = cli.INTERRUPTED
    except BrokenPipeError:  # `longshore ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = cli.DONE
    except OSError as error:  # a file of this machine: a full disk, a folder that may not be written
        code = _ended_by(cli.Stop(str(error)))
    except Exception as error:
        if (ended := _of_client(error)) is None:
            raise
        code = _ended_by(ended)
    if code:
        sys.exit(code)


def _of_client(error: Exception) -> cli.Stop | None:
    """Return what ends a command when the client raises; None for other errors. Without httpx, no client was made."""
    if (client := sys.modules.get("longshore.client")) is None:
        return None
    if isinstance(error, client.ServiceError):
        return cli.stop_of(error)
    return cli.Stop(str(error)) if isinstance(error, client.DownloadFailed) else None


def _ended_by(stop: cli.Stop, is_shown: bool = False) -> int:
    """Print an error, as JSON if requested; parsing the arguments itself may have failed. Returns the exit code."""
    if not is_shown:
        cli.say(f"error: {stop.message}")
        if stop.advice:
            cli.say(stop.advice)
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        cli.print_json(stop.document())
    return stop.code


if __name__ == "__main__":
    main()
