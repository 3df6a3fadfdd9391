"""Show a run: as JSON, as a few lines, and in all its details."""

import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from service.cli.output.render import ago, plain, print_table, span

if TYPE_CHECKING:
    from service.runs.views.run_view import RunView
    from shared.runs.requests import Precision

_RESUME = "go on: longshore resume {0}"
# Hints for runs that did not succeed: by state, and for failed runs by the problem's kind, else _LOOK.
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
_OF_DATA = ("downloading", "tokenizing", "packing")
_A_MOMENT_S = 0.5


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


def summary(view: "RunView", place: int | None = None) -> str:
    """Return a few plain lines about the state of a run. `place`: its position in the queue for workers."""
    from service.runs.views.run_view import seconds_left
    from service.runs.views.words import dropped, main_metrics

    lines = [f"{view.run_id}: {view.state}, step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")]
    if view.state == "running":
        lines[0] += f", {doing(view, place)}"
    if (left_s := seconds_left(view, time.time())) is not None:
        lines[0] += f", about {span(left_s)} left"
    lines[0] = ", ".join([lines[0], *main_metrics(view.metrics)])
    if view.problem:
        lines.append(view.problem.message)
    if view.paused_by and view.state in ("running", "paused"):
        lines.append(f"paused by a limit: {view.paused_by}; it goes on by itself when that is raised")
    if view.client_away:
        lines.append("paused since its client sent nothing; the client's next command or step has it go on")
    lines += [f"notice: {notice}" for notice in view.notices]
    if lost := dropped(view.metrics):
        lines.append(f"its newest step: {lost}")
    if view.adapter:
        name = f"{view.name}:v{view.version}" if view.version else view.run_id
        lines.append(f"published: {name}")
        if view.state == "succeeded":
            next_one = f"models show {name}" if view.kind == "reward" else f'chat {name} "…"'
            lines.append(f"next: longshore {next_one}, or longshore download {name}")
    kind = view.problem.kind if view.problem else ""
    if advice := _AFTER.get(kind, _LOOK) if view.state == "failed" else _NEXT.get(view.state):
        lines.append(advice.format(view.run_id))
    return "\n".join(lines)


def doing(view: "RunView", place: int | None = None) -> str:
    """Return the phase of a run that has not ended, with its position in the queue if it has one."""
    return view.phase.replace("_", " ") + (f", place {place} in the queue" if place is not None else "")


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
        ("precision", precision_in_words(view.precision)),
        ("submitted", f"{ago(view.created_at)}{owner}"),
        ("tokens", f"{view.planned_tokens:,} in all steps" if view.planned_tokens else None),
        ("took", took(view)),
        ("GPU time", span(view.gpu_seconds) if view.gpu_seconds else None),
        ("cost", cost_in_words(view)),
        ("checkpoint", f"of step {view.checkpoint.step}" if view.checkpoint else None),
        ("workers lost", str(view.workers_lost) if view.workers_lost else None),
    ]
    print_table(("", ""), [(name, plain(text)) for name, text in rows if text])
    if view.timeline:
        end = view.ended_at or time.time()
        spans = [(label, span((ended or end) - began), ago(began)) for label, began, ended in phases(view)]
        print_table(("phase", "took", "began"), spans)


def precision_in_words(precision: "Precision | None") -> str | None:
    """Return a precision with the reason why it was chosen; None where the request named it."""
    return None if precision is None or precision.reason is None else f"{precision.dtype}: {precision.reason}"


def cost_in_words(view: "RunView") -> str | None:
    """Return a run's cost so far, and at its end; None if GPU hours have no price."""
    if (cost := view.cost) is None:
        return None
    whole = "" if cost.estimated is None or view.state != "running" else f", about {cost.estimated:,.2f} at its end"
    return f"{cost.so_far:,.2f} {cost.currency}{whole}"


def took(view: "RunView") -> str | None:
    """Return the duration of a run from its first start, and how much of it the run was stopped."""
    if view.started_at is None:
        return None
    spans = view.timeline
    stopped_s = sum(after.began - before.ended for before, after in pairwise(spans) if before.ended is not None)
    whole = span((view.ended_at or time.time()) - view.started_at)
    return whole + (f", {span(stopped_s)} of it stopped" if stopped_s >= 1 else "")


def phases(view: "RunView") -> list[tuple[str, float, float | None]]:
    """Return a run's phases as text, each with begin and end in seconds since 1970; None while a phase is active.

    Spans of one phase on several workers are joined, and very short waits for a worker are left out. Phases that occur
    for the dataset and for held-out rows are labelled so.
    """
    found: list[tuple[str, float, float | None]] = []
    times: Counter[str] = Counter()
    is_twice = view.run.kind in ("sft", "dpo", "distill", "reward") and view.run.eval_dataset is not None
    for each in view.timeline:
        if each.phase == "checking":  # a new execution of the run
            times.clear()
        times[each.phase] += 1
        label = each.phase.replace("_", " ")
        if is_twice and each.phase in _OF_DATA:
            label += " (train)" if times[each.phase] == 1 else " (held out)"
        if found and found[-1][0] == label and found[-1][2] == each.began:
            found[-1] = label, found[-1][1], each.ended
        else:
            found.append((label, each.began, each.ended))
    return [
        (label, began, ended)
        for label, began, ended in found
        if label != "waiting for worker" or ended is None or ended - began >= _A_MOMENT_S
    ]
