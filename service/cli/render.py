"""Exit codes, and the errors that end a command with one or two plain lines."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


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
    """

    def __init__(self, message: str, code: int = FAILED, advice: str | None = None) -> None:
        self.message = message
        self.code = code
        self.advice = advice
        super().__init__(message)

    def document(self) -> dict[str, dict[str, str | int | None]]:
        """Return the error's JSON document for `--json`."""
        return {"error": {"message": self.message, "advice": self.advice, "exit_code": self.code}}


class ServiceRefused(Stop):
    """The service refused a request. `place`: the field, if it named one; `rule`: the rule that it breaks."""

    def __init__(self, rule: str, place: str | None) -> None:
        self.rule = rule
        self.place = place
        super().__init__(f"{place}: {rule}" if place else rule)

    def document(self) -> dict[str, dict[str, str | int | None]]:
        found = super().document()
        return {"error": {**found["error"], "place": self.place, "rule": self.rule}}


class Unreachable(Stop):
    """The service does not answer, or is temporarily unavailable. The call may be retried."""


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
