"""The entry point of `longshore`. Nothing heavy is imported before a command needs it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from service.cli.connection import TRACE_PARENT, Globals, Json, profile_names
from service.cli.exits import DONE, INTERRUPTED, Stop
from service.cli.help_groups import COMMANDS, HeadedHelp
from service.cli.output.render import print_json, say

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
    api_url: Annotated[str | None, typer.Option("--api-url", help="The service, as http://host:port.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Better: longshore login.")] = None,
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
    from service.telemetry.traces import span_of_program

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
        say(f"error: {stop.message}")
        if stop.advice:
            say(stop.advice)
        code = _ended_by(stop)
    except typer.TyperException as error:  # an option that there is not, an argument that is missing
        error.show()  # type: ignore[attr-defined]  # all that Typer raises have it, and no public class does
        code = _ended_by(Stop(error.format_message(), error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `longshore ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    except OSError as error:  # a file of this machine: a full disk, a folder that may not be written
        say(f"error: {error}")
        code = _ended_by(Stop(str(error)))
    if code:
        sys.exit(code)


def _ended_by(stop: Stop) -> int:
    """Print an error, as JSON if requested; parsing the arguments itself may have failed. Returns the exit code."""
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        print_json(stop.document())
    return stop.code


if __name__ == "__main__":
    main()
