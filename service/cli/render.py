"""Exit codes, and the errors that end a command with one or two plain lines."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from longshore.client import ServiceError

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
