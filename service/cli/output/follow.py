"""Follow a run to its end, on stderr: a progress bar on a terminal, log lines elsewhere. Leaving never ends the run."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from service.cli.exits import INTERRUPTED, NOT_FINISHED, Stop, Unreachable
from service.cli.output.render import say, span
from service.cli.output.step_table import step_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from service.cli.client import CliClient
    from service.runs.views.run_view import RunView
    from shared.runs.events import RunEvent
    from shared.runs.status import StepStatus

_LONG_POLL_S = 1.0
_AWAY_FOR_S = 120.0
_GAP = 2
_LEAST_BAR, _GOOD_BAR, _LONGEST_BAR = 6, 20, 40


class Detached(Exception):
    """Following ended before the run did: by Ctrl-C, or after the timeout. Carries the last view of the run."""

    def __init__(self, view: "RunView", code: int) -> None:
        self.view = view
        self.code = code
        super().__init__(view.run_id)


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
        from service.runs.views.run_view import seconds_left
        from service.runs.views.words import log_line

        body, left = event.event, ""
        if body.event in ("step", "evaluated") and body.step >= self._view.step:  # other events are old
            left_s = seconds_left(self._view, time.time())
            left = f", about {span(left_s)} left" if left_s else ""
        say(log_line(event) + left)

    def status(self, view: "RunView") -> None:
        self._view = view
        if view.state == "running" and view.phase != self._phase:
            self._phase = view.phase
            say(view.phase.replace("_", " "))

    def note(self, text: str) -> None:
        say(text)


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

        from service.runs.views.words import event_in_words

        body = event.event
        self._evaluating = f"evaluating {body.fraction:.0%}" if body.event == "evaluating" else ""
        if body.event == "step":
            if self._view.state == "running":  # else it is a repeated event
                self._step = body.step
                self._metrics |= body.metrics
        elif body.event not in ("evaluating", "offloaded", "probed", "saved"):
            self.console.print(escape(event_in_words(body)))

    def status(self, view: "RunView") -> None:
        self._view = view
        if view.state != "running" or view.phase != "training":  # while it trains, events are newer than the status
            self._step = view.step
        self._metrics = view.metrics | self._metrics if view.state == "running" else dict(view.metrics)

    def note(self, text: str) -> None:
        from rich.markup import escape

        self.console.print(escape(text))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        label, done, others = self._parts(options.max_width)
        full, empty = ("#", "-") if options.ascii_only else ("━", "━")
        if console.no_color or console.color_system is None:
            empty = " " if not options.ascii_only else empty
        width = self._bar_width(options.max_width, [label, *others])
        num_full = round(done * width)
        bar = Text.assemble((full * num_full, "bar.complete"), (empty * (width - num_full), "bar.back"))
        cells = [Text(label), bar, *map(Text, others)]
        # One line of text, and not rich's own Progress: on a narrow terminal a table cuts every cell, a text its end.
        yield Text(" " * _GAP, no_wrap=True, overflow="ellipsis").join(cell for cell in cells if cell)

    def _parts(self, width: int) -> tuple[str, float, list[str]]:
        """Return the parts of the line at this width: label, fraction of steps done, and the others in order."""
        from service.runs.views.run_view import seconds_left
        from service.runs.views.words import main_metrics

        view, now = self._view, time.time()
        label = self._evaluating or view.phase.replace("_", " ") if view.state == "running" else view.state
        steps = f"{self._step}/{view.num_steps}" if view.num_steps else f"step {self._step}" if self._step else ""
        took = span((view.ended_at or now) - view.started_at) if view.started_at is not None else ""
        left_s = seconds_left(view, now)
        left = f"{span(left_s)} left" if left_s else ""
        metrics = main_metrics(self._metrics)
        others = [steps, took, left, *metrics[:1]]
        if self._bar_width(width, [label, *others]) < _LEAST_BAR:
            others.remove(took)
        for metric in metrics[1:]:
            if self._bar_width(width, [label, *others, metric]) < _GOOD_BAR:
                break
            others.append(metric)
        return label, self._step / view.num_steps if view.num_steps else 0.0, [part for part in others if part]

    @staticmethod
    def _bar_width(width: int, parts: Sequence[str]) -> int:
        """Return the width left for the bar; 0 if it would be too short."""
        left = width - sum(len(part) + _GAP for part in parts if part)
        return min(_LONGEST_BAR, left) if left >= _LEAST_BAR else 0


def follow(client: "CliClient", view: "RunView", timeout_s: float | None) -> "RunView":
    """Show a run on stderr until it ends.

    Args:
        view: the run's current view.
        timeout_s: when to stop looking; None for never.

    Raises:
        Detached: on Ctrl-C, or after the timeout. The run continues.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    followed = _Followed(client, view)
    try:
        with display(view) as shown:
            while not followed.look(shown):
                if end is not None and time.monotonic() > end:
                    raise Detached(followed.view, NOT_FINISHED)
    except KeyboardInterrupt:
        raise Detached(followed.view, INTERRUPTED) from None
    return followed.view


def attach_again(run_id: str) -> str:
    return f"the run goes on; attach again with: longshore watch {run_id}"


class _Followed:
    """The state of following a run: its newest view, the events and steps read, and since when the service is away."""

    def __init__(self, client: "CliClient", view: "RunView") -> None:
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
        except Unreachable as error:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                shown.note(f"{error.message}; trying again")
            if now - self._away_since > _AWAY_FOR_S:
                raise Stop(error.message, error.code, attach_again(self.view.run_id)) from None
            time.sleep(0.5)
            return False

    def _look(self, shown: Lines | Bar) -> bool:
        # The status first: events read after the end are complete.
        self.view = self._client.run(self.view.run_id)
        has_ended = self.view.state != "running"
        shown.status(self.view)
        page = self._client.events(self.view.run_id, self._cursor, 0 if has_ended else _LONG_POLL_S)
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
        if self.view.kind == "rl" and (found := list(self._client.steps(self.view.run_id, self._last_step))):
            self._steps += found
            self._last_step = found[-1].step

    def _show_step(self, shown: Lines | Bar) -> None:
        shown.note(step_line(self._steps.popleft()))
