"""Runs, steps and sweeps as the command line shows them, and runs as it follows them."""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import longshore
from service.cli import command as cli

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from longshore import Client
    from longshore.automation import SweepView, TrialView
    from longshore.events import RunEvent
    from longshore.runs import Precision
    from longshore.views import RunView, SamplesNow, StepStatus, TrainStepMetrics


# --- Print train steps of RL runs: as a table, or one as a line ---

_TIMED = ("sampling", "grading", "training", "publishing")
# Broken so that a whole row fits into a terminal of 80 columns.
_HEADERS = {"held-out": "held-\nout", "seconds": "seconds:\nsample/grade/\ntrain/publish"}


def print_steps(steps: Iterable["StepStatus"]) -> None:
    from rich.markup import escape

    _print(
        [
            {
                "step": str(step.step),
                "state": cli.coloured(step.state),
                "policy": "" if step.policy_version is None else str(step.policy_version),
                **_cells(step.metrics),
                "": escape(_remark(step)),
            }
            for step in steps
        ]
    )


def print_step_metrics(rows: Iterable["TrainStepMetrics"]) -> None:
    _print([{"train step": str(row.step), **_cells(row.metrics)} for row in rows])


def step_line(step: "StepStatus") -> str:
    """Return the line of a finished step. It says "train step", since a worker's own lines count optimizer steps."""
    parts: list[str] = [step.state] if step.state != "done" else []
    if step.same_as is None:  # else all of this was said of the other step
        cells = _cells(step.metrics)
        parts += [f"{name} {cells[name].replace('±', ' ± ')}" for name in ("reward", "held-out") if cells[name]]
        parts += [f"published v{step.version}"] if step.version is not None else []
    if remark := _remark(step):
        parts.append(remark)
    return f"train step {step.step}: {', '.join(parts) or step.state}"


def _cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the main metrics by column; empty where the step did not measure one."""

    def cell(name: str, form: str, before: str = "") -> str:
        return before + format(metrics[name], form) if name in metrics else ""

    return {
        "reward": cell("reward_mean", ".3g") + cell("reward_std", ".3g", before="±"),
        "held-out": cell("eval_reward_mean", ".3g"),
        "tokens": cell("response_tokens_mean", ".0f"),
        "KL": cell("kl_reference", ".2g") or cell("kl_old_new", ".2g"),
        "ratio": cell("ratio_mean", ".4g"),
        "seconds": _seconds([metrics.get(f"{doing}_seconds") for doing in _TIMED]),
    }


def _seconds(found: Sequence[float | None]) -> str:
    """Format the seconds of each part of a step; - for a part that was not done by the run."""
    if not any(found):
        return ""
    return "/".join("-" if s is None else f"{s:.0f}" if s >= 10 else f"{s:.1f}" for s in found)


def _remark(step: "StepStatus") -> str:
    from service.runs.views import dropped

    if step.same_as is not None:
        return f"the key of step {step.same_as} again: not trained twice"
    if step.problem is not None:
        return step.problem.message
    return dropped(step.metrics) or ""


def _print(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table without its empty columns."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    cli.print_table([_HEADERS.get(name, name) for name in names], ([row[name] for name in names] for row in rows))


# --- Show a run: as JSON, as a few lines, and in all its details ---

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
    from service.runs.views import dropped, main_metrics, seconds_left

    lines = [f"{view.run_id}: {view.state}, step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")]
    if view.state == "running":
        lines[0] += f", {doing(view, place)}"
    if (left_s := seconds_left(view, time.time())) is not None:
        lines[0] += f", about {cli.span(left_s)} left"
    lines[0] = ", ".join([lines[0], *main_metrics(view.metrics)])
    if view.problem:
        lines.append(view.problem.message)
    if view.paused_by and view.state in ("running", "paused"):
        lines.append(f"paused by a limit: {view.paused_by}; it goes on by itself when that is raised")
    if view.client_away:
        lines.append("paused since its client sent nothing; the client's next command or step has it go on")
    if view.samples_now is not None:
        lines += samples_in_words(view.samples_now)
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


def samples_in_words(now: "SamplesNow") -> list[str]:
    """Say how many samples or episodes run, wait and have ended, and why; and what the first errors were."""
    ends = ", ".join(f"{end.replace('_', ' ')} {num}" for end, num in sorted(now.ended.items()))
    told = [f"{now.running} running", f"{now.waiting} waiting", f"{sum(now.ended.values())} ended"]
    told[-1] += f" ({ends})" if ends else ""
    told += [f"{now.before} from before an interruption"] if now.before else []
    return [f"samples: {', '.join(told)}", *(f"without a reward: {error}" for error in now.errors)]


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
        ("submitted", f"{cli.ago(view.created_at)}{owner}"),
        ("tokens", f"{view.planned_tokens:,} in all steps" if view.planned_tokens else None),
        ("took", took(view)),
        ("GPU time", cli.span(view.gpu_seconds) if view.gpu_seconds else None),
        ("cost", cost_in_words(view)),
        ("checkpoint", f"of step {view.checkpoint.step}" if view.checkpoint else None),
        ("workers lost", str(view.workers_lost) if view.workers_lost else None),
    ]
    cli.print_table(("", ""), [(name, cli.plain(text)) for name, text in rows if text])
    if view.timeline:
        end = view.ended_at or time.time()
        spans = [(label, cli.span((ended or end) - began), cli.ago(began)) for label, began, ended in phases(view)]
        cli.print_table(("phase", "took", "began"), spans)


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
    whole = cli.span((view.ended_at or time.time()) - view.started_at)
    return whole + (f", {cli.span(stopped_s)} of it stopped" if stopped_s >= 1 else "")


def phases(view: "RunView") -> list[tuple[str, float, float | None]]:
    """Return a run's phases as text, each with begin and end in seconds since 1970; None while a phase is active.

    Spans of one phase on several workers are joined, and very short waits for a worker are left out. Phases that occur
    for the dataset and for held-out rows are labelled so.
    """
    found: list[tuple[str, float, float | None]] = []
    times: Counter[str] = Counter()
    is_twice = view.run.kind in ("sft", "dpo", "distill", "reward") and bool(view.run.evaluations)
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


# --- Print sweeps and their trials ---


def print_sweep(view: "SweepView") -> None:
    print(f"{view.sweep_id} ({view.sweep.name}): {view.state}, {progress(view)} trials have ended")
    if view.problem:
        print(view.problem)
    paths = tuple(view.sweep.parameters)

    def row(trial: "TrialView") -> tuple[str, ...]:
        name = f"{trial.number}*" if trial.number == view.best else f"{trial.number}"
        values = (cli.plain(json.dumps(trial.values.get(path))) for path in paths)
        return name, trial.state, number(trial.value), f"{trial.step}", *values, trial.run_id

    cli.print_table(("trial", "state", view.metric, "step", *paths, "run"), map(row, view.trials))
    if view.adapter:
        print(f"published: {view.sweep.name}:v{view.version} {view.adapter}")


def progress(view: "SweepView") -> str:
    """Return how many trials have ended, of how many."""
    return f"{sum(trial.state not in ('running', 'paused') for trial in view.trials)} of {view.num_trials}"


def best(view: "SweepView") -> str:
    """Return the metric and the number of the best trial."""
    return "" if view.best is None else f"{number(view.trials[view.best].value)} (trial {view.best})"


def number(value: float | None) -> str:
    """Return a number in as many digits as people read; nothing for None."""
    return "" if value is None else f"{value:.6g}"


# --- Follow a run to its end, on stderr ---
# A progress bar on a terminal, log lines elsewhere. Leaving never ends the run.

_LONG_POLL_S = 1.0
_AWAY_FOR_S = 120.0
_GAP, _BAR = 2, 14


@contextmanager
def display(view: "RunView") -> Iterator["Lines | Bar"]:
    """Show a progress bar on a terminal, log lines elsewhere."""
    if not sys.stderr.isatty():
        yield Lines(view)
        return
    from rich.console import Console
    from rich.live import Live

    bar = Bar(view, Console(stderr=True, highlight=False))
    with Live(bar, console=bar.console, refresh_per_second=4):
        yield bar


class Lines:
    """Print a line for each phase and event, except checkpoints, which would hide the steps.

    At most one step per second of the run is printed, and about forty of the steps before following began; the last
    one is always printed.
    """

    _STEP_EVERY_S = 1.0
    _PAST_STEPS = 40

    def __init__(self, view: "RunView") -> None:
        self._view = view
        self._phase = ""
        self._last_step_at = 0.0
        self._held_back: RunEvent | None = None
        self._began = time.time()
        past_s = (view.ended_at or self._began) - (self._began if view.started_at is None else view.started_at)
        self._past_every_s = max(self._STEP_EVERY_S, past_s / self._PAST_STEPS)

    def event(self, event: "RunEvent") -> None:
        body = event.event
        if body.event in ("saved", "probed"):
            return
        if body.event == "step":
            every_s = self._STEP_EVERY_S if body.time > self._began else self._past_every_s
            if body.time - self._last_step_at < every_s:
                self._held_back = event
                return
            self._last_step_at = body.time
        elif self._held_back is not None:
            self._print(self._held_back)
        self._held_back = None
        self._print(event)

    def _print(self, event: "RunEvent") -> None:
        from service.runs.views import log_line, seconds_left

        body, left = event.event, ""
        if body.event in ("step", "evaluated") and body.step >= self._view.step:  # other events are old
            left_s = seconds_left(self._view, time.time())
            left = f", about {cli.span(left_s)} left" if left_s else ""
        cli.say(log_line(event) + left)

    def status(self, view: "RunView") -> None:
        self._view = view
        if view.state == "running" and view.phase != self._phase:
            self._phase = view.phase
            cli.say(view.phase.replace("_", " "))

    def note(self, text: str) -> None:
        cli.say(text)


class Bar:
    """A line with phase, bar, steps, times and metrics; events scroll above it.

    At 80 columns, steps, time left and the first metric are shown in full, and other parts are shortened or left out.
    """

    def __init__(self, view: "RunView", console: "Console") -> None:
        self.console = console
        self._view = view
        self._step = view.step
        self._metrics = dict(view.metrics)
        self._evaluating = ""

    def event(self, event: "RunEvent") -> None:
        from rich.markup import escape

        from service.runs.views import format_event

        body = event.event
        self._evaluating = f"evaluating {body.fraction:.0%}" if body.event == "evaluating" else ""
        if body.event == "step":
            if self._view.state == "running":  # else it is a repeated event
                self._step = body.step
                self._metrics |= body.metrics
        elif body.event not in ("evaluating", "offloaded", "probed", "saved"):
            self.console.print(escape(format_event(body)))

    def status(self, view: "RunView") -> None:
        self._view = view
        if view.state != "running" or view.phase != "training":  # while it trains, events are newer than the status
            self._step = view.step
        self._metrics = view.metrics | self._metrics if view.state == "running" else dict(view.metrics)

    def note(self, text: str) -> None:
        from rich.markup import escape

        self.console.print(escape(text))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from service.runs.views import main_metrics, seconds_left

        view, now = self._view, time.time()
        left_s = seconds_left(view, now)
        label = self._evaluating or view.phase.replace("_", " ") if view.state == "running" else view.state
        steps = f"{self._step}/{view.num_steps}" if view.num_steps else f"step {self._step}" if self._step else ""
        took = cli.span((view.ended_at or now) - view.started_at) if view.started_at is not None else ""
        left = f"{cli.span(left_s)} left" if left_s else ""
        metrics, bar = main_metrics(self._metrics), "━" * _BAR
        parts = [part for part in (label, bar, steps, took, left, *metrics) if part]
        for least in (*metrics[:0:-1], took, bar, *metrics[:1]):  # left out, in this order, until the line has room
            if sum(len(part) + _GAP for part in parts) - _GAP > options.max_width and least in parts:
                parts.remove(least)
        line = Table.grid(*parts, padding=(0, _GAP, 0, 0))
        done = ProgressBar(view.num_steps or 1, self._step if view.num_steps else 0, width=_BAR)
        line.add_row(*(done if part == bar else Text(part, no_wrap=True, overflow="ellipsis") for part in parts))
        yield line


def follow(client: "Client", view: "RunView", timeout_s: float | None) -> "tuple[RunView, int]":
    """Show a run on stderr until it ends, Ctrl-C, or the timeout; the run continues after these.

    Returns its last view, and the exit code.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    followed, code = _Followed(client, view), cli.NOT_FINISHED
    try:
        with display(view) as shown:
            while not followed.look(shown):
                if end is not None and time.monotonic() > end:
                    break
            else:
                return followed.view, cli.OF_STATE[followed.view.state]
    except KeyboardInterrupt:
        code = cli.INTERRUPTED
    cli.say(attach_again(view.run_id))
    return followed.view, code


def attach_again(run_id: str) -> str:
    return f"the run goes on; attach again with: longshore watch {run_id}"


class _Followed:
    """The state of following a run: its newest view, the events and steps read, and since when the service is away."""

    def __init__(self, client: "Client", view: "RunView") -> None:
        self.view = view
        self._client = client
        self._cursor: str | None = None
        self._last_step: int | None = None
        self._steps: deque[StepStatus] = deque()  # train steps that were read and not yet shown
        self._away_since: float | None = None

    def look(self, shown: Lines | Bar) -> bool:
        """Ask the service once, and show news. Returns True when the run has ended and all events were shown."""
        try:
            return self._look(shown)
        except longshore.Unreachable as error:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                shown.note(f"{error}; trying again")
            if now - self._away_since > _AWAY_FOR_S:
                raise cli.Stop(str(error), advice=attach_again(self.view.run_id)) from None
            time.sleep(0.5)
            return False

    def _look(self, shown: Lines | Bar) -> bool:
        # The status first: events read after the end are complete.
        self.view = self._client.runs.get(self.view.run_id)
        has_ended = self.view.state != "running"
        shown.status(self.view)
        page = self._client.runs.events(self.view.run_id, self._cursor, wait_s=0 if has_ended else _LONG_POLL_S)
        num_known = len(self._steps)
        self._read_steps()
        for event in page.events:
            while self._steps and self._steps[0].step < int(event.job_id):
                self._show_step(shown)
            shown.event(event)
        self._cursor = page.next or self._cursor
        if not page.events:
            for _ in range(len(self._steps) if has_ended else num_known):
                self._show_step(shown)
        if self._away_since is not None:
            shown.note("the service is back")
            self._away_since = None
        return has_ended and not page.events

    def _read_steps(self) -> None:
        """Read newly recorded train steps of an RL run. Each is shown after the events of its job.

        Jobs have the numbers of their steps, and a step is recorded after its job's events and before the next job
        begins. So if a step was known when no more events were found, all events of its job have been shown.
        """
        while self.view.kind == "rl":
            page = self._client.runs.steps(self.view.run_id, self._last_step)
            self._steps += page.steps
            self._last_step = page.next
            if not page.has_more:
                return

    def _show_step(self, shown: Lines | Bar) -> None:
        shown.note(step_line(self._steps.popleft()))
