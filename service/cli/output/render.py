"""Print to stdout: JSON, tables, the state and details of a run."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from service.cli.output.durations import span
from service.cli.output.timeline import phases, took

if TYPE_CHECKING:
    from rich.console import Console

    from service.runs.views import RunView

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
_RESUME = "go on: longshore resume {0}"
# What may be done about a run that has not come to a good end; of failed ones by their problem's kind, or _LOOK.
_NEXT = {"paused": _RESUME, "cancelled": _RESUME}
_LOOK = "look: longshore logs {0}; go on: longshore resume {0}; begin anew: longshore retry {0}"
_SAME_AGAIN = "resume would fail the same way: "
_AFTER = {
    "invalid_input": _SAME_AGAIN + "mend what is named and submit again; mended where it lies: longshore retry {0}",
    "corrupt_artifact": _SAME_AGAIN + "the bytes are not what was published; put them back, then longshore retry {0}",
    "not_finite": _SAME_AGAIN + "look at longshore metrics {0}, and submit with a smaller --learning-rate",
    "sampler_mismatch": _SAME_AGAIN + "let the sampler serve the run's model in its dtype, then longshore retry {0}",
    "disk_full": "make room on the host's disk; then go on: longshore resume {0}",
}


def outcome(view: "RunView") -> dict[str, Any]:
    """Return a run as the JSON object that --json prints."""
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
    """Print a line to stderr: stdout is for what programs read."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


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
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit} ago"
    return f"{seconds}s ago"


def size(num_bytes: float) -> str:
    """Return a number of bytes in the largest unit."""
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def summary(view: "RunView", place: int | None = None) -> str:
    """Return a few plain lines about the state of a run. `place`: its position in the queue for workers."""
    from service.runs.views import dropped, glance, seconds_left

    lines = [f"{view.run_id}: {view.state}, step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")]
    if view.state == "running":
        lines[0] += f", {doing(view, place)}"
    if (left_s := seconds_left(view, time.time())) is not None:
        lines[0] += f", about {span(left_s)} left"
    lines[0] = ", ".join([lines[0], *glance(view.metrics)])
    if view.problem:
        lines.append(view.problem.message)
    lines += [f"notice: {notice}" for notice in view.notices]
    if lost := dropped(view.metrics):
        lines.append(f"its newest step: {lost}")
    if view.adapter:
        lines.append(f"published: {view.adapter}")
    if advice := next_of(view):
        lines.append(advice)
    return "\n".join(lines)


def doing(view: "RunView", place: int | None = None) -> str:
    """Return the phase of a run that has not ended, with its position in the queue if it has one."""
    return view.phase.replace("_", " ") + (f", place {place} in the queue" if place is not None else "")


def next_of(view: "RunView") -> str | None:
    """Return advice about a run that did not succeed."""
    kind = view.problem.kind if view.problem else ""
    advice = _AFTER.get(kind, _LOOK) if view.state == "failed" else _NEXT.get(view.state)
    return advice.format(view.run_id) if advice else None


def print_details(view: "RunView") -> None:
    """Print everything in the status of a run, and its phases."""
    run, owner = view.run, f", by {view.owner}" if view.owner else ""
    rows = [
        (
            "kind",
            f"{view.kind}, {run.trainable.kind}"
            + (f", schedule {view.source.schedule}" if view.source.schedule else ""),
        ),
        ("model", run.model),
        ("name", run.name),
        ("layout", f"{run.layout.label}, {run.dtype}, {run.engine}"),
        ("submitted", f"{ago(view.created_at)}{owner}"),
        ("took", took(view)),
        ("GPU time", span(view.gpu_seconds) if view.gpu_seconds else None),
        ("checkpoint", f"of step {view.checkpoint.step}" if view.checkpoint else None),
        ("workers lost", str(view.workers_lost) if view.workers_lost else None),
    ]
    print_table(("", ""), [(name, plain(text)) for name, text in rows if text])
    if view.timeline:
        end = view.ended_at or time.time()
        spans = [(label, span((ended or end) - began), ago(began)) for label, began, ended in phases(view)]
        print_table(("phase", "took", "began"), spans)
