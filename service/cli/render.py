"""What people see: tables on stdout, progress on stderr."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from service.run_views import RunView
    from shared.run_events import RunEvent

_COLOURS = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "done": "green",
    "skipped": "yellow",
}

_WIDTH_OF_FILES = 1000


def outcome(view: "RunView") -> dict[str, Any]:
    """A run as the one JSON object that programs read."""
    whole = view.model_dump(mode="json", exclude={"state", "step", "run", "kind"})
    return {
        "run_id": view.run_id,
        "status": view.state,
        "adapter": view.adapter,
        "steps": view.step,
        "metrics": view.metrics,
        **whole,
    }


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for people, out of the way of what programs read."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose first column is never cut, so that ids can be copied. Without any column's name, no header."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    if not out.is_terminal:  # a file or a program has no width: nothing is folded for it
        out.width = _WIDTH_OF_FILES
    out.print(table)


def coloured(state: str) -> str:
    """A state with its colour, in Rich's markup."""
    return f"[{_COLOURS[state]}]{state}[/]"


def ago(moment: float) -> str:
    """How long ago, in the largest unit."""
    seconds = max(0, int(time.time() - moment))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit} ago"
    return f"{seconds}s ago"


def summary(view: "RunView") -> str:
    """How a run stands, in one or two plain lines."""
    lines = [f"{view.run_id}: {view.state}, step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")]
    if view.state == "running":
        lines[0] += f", {view.phase.replace('_', ' ')}"
    if view.metrics:
        from service.run_views import brief

        lines[0] += f", {brief(view.metrics)}"
    if view.problem:
        lines.append(view.problem.message)
    if view.adapter:
        lines.append(f"published: {view.adapter}")
    return "\n".join(lines)


class Display(Protocol):
    """Shows a run while it is followed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: "RunEvent") -> None: ...

    def status(self, view: "RunView") -> None: ...

    def note(self, text: str) -> None: ...


def display() -> Display:
    """A progress bar on a terminal, lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()


class Lines:
    """One line a change of phase and an event; of steps, at most one a second."""

    _STEP_EVERY_S = 1.0

    def __init__(self) -> None:
        self._phase = ""
        self._last_step_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: "RunEvent") -> None:
        if event.event.event == "step":
            if time.monotonic() - self._last_step_at < self._STEP_EVERY_S:
                return
            self._last_step_at = time.monotonic()
        from service.run_views import log_line

        say(log_line(event))

    def status(self, view: "RunView") -> None:
        if view.state == "running" and view.phase != self._phase:
            self._phase = view.phase
            say(view.phase.replace("_", " "))

    def note(self, text: str) -> None:
        say(text)


class Bar:
    """A bar of steps with the newest loss; other events scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True, highlight=False),
        )
        self._task: TaskID = self._progress.add_task("queued", total=None, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def event(self, event: "RunEvent") -> None:
        from rich.markup import escape

        from service.run_views import brief, describe

        body = event.event
        if body.event == "step":
            self._progress.update(self._task, completed=body.step, numbers=brief(body.metrics))
        elif body.event not in ("offloaded", "probed"):
            self._progress.console.print(escape(describe(body)))

    def status(self, view: "RunView") -> None:
        self._progress.update(
            self._task, description=view.phase.replace("_", " "), total=view.num_steps, completed=view.step
        )

    def note(self, text: str) -> None:
        from rich.markup import escape

        self._progress.console.print(escape(text))
