"""Show a run on stderr while it is followed: a progress bar on a terminal, log lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from service.cli.output.durations import span
from service.cli.output.render import say

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from service.runs.views import RunView
    from shared.runs.events import RunEvent

_GAP = 2
_LEAST_BAR, _GOOD_BAR, _LONGEST_BAR = 6, 20, 40


class Display(Protocol):
    """Shows a run while it is followed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: "RunEvent") -> None: ...

    def status(self, view: "RunView") -> None: ...

    def note(self, text: str) -> None: ...


def display(view: "RunView") -> Display:
    """Return a progress bar on a terminal, log lines elsewhere."""
    return Bar(view) if sys.stderr.isatty() else Lines(view)


class Lines:
    """Print a line for each phase and event; for steps, at most one a second."""

    _STEP_EVERY_S = 1.0

    def __init__(self, view: "RunView") -> None:
        self._view = view
        self._phase = ""
        self._last_step_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: "RunEvent") -> None:
        from service.runs.views import log_line, seconds_left

        body = event.event
        if body.event == "step":
            if time.monotonic() - self._last_step_at < self._STEP_EVERY_S:
                return
            self._last_step_at = time.monotonic()
        left = ""
        if body.event in ("step", "evaluated") and body.step >= self._view.step:  # others tell of what is past
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

    Steps, time left and the first metric are whole at 80 columns: what else there is gives way to them.
    """

    def __init__(self, view: "RunView", console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._view = view
        self._step = view.step
        self._metrics = dict(view.metrics)
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, event: "RunEvent") -> None:
        from rich.markup import escape

        from service.runs.views import describe

        body = event.event
        if body.event == "step":
            if self._view.state == "running":  # else it is only told again
                self._step = body.step
                self._metrics |= body.metrics
        elif body.event not in ("offloaded", "probed"):
            self._console.print(escape(describe(body)))

    def status(self, view: "RunView") -> None:
        self._view = view
        if view.state != "running" or view.phase != "training":  # while it trains, its events are ahead of this
            self._step = view.step
        self._metrics = view.metrics | self._metrics if view.state == "running" else dict(view.metrics)

    def note(self, text: str) -> None:
        from rich.markup import escape

        self._console.print(escape(text))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        label, done, others = self._parts(options.max_width)
        full, empty = ("#", "-") if options.ascii_only else ("━", "━")
        if console.no_color or console.color_system is None:
            empty = " " if not options.ascii_only else empty
        width = self._bar_width(options.max_width, [label, *others])
        num_full = round(done * width)
        num_empty = width - num_full
        bar = Text.assemble((full * num_full, "bar.complete"), (empty * num_empty, "bar.back"))
        cells = [Text(label), bar, *map(Text, others)]
        yield Text(" " * _GAP, no_wrap=True, overflow="ellipsis").join(cell for cell in cells if cell)

    def _parts(self, width: int) -> tuple[str, float, list[str]]:
        """Return the parts of the line at this width: label, fraction of steps done, and the others in order."""
        from service.runs.views import glance, seconds_left

        view, now = self._view, time.time()
        label = view.phase.replace("_", " ") if view.state == "running" else view.state
        steps = f"{self._step}/{view.num_steps}" if view.num_steps else f"step {self._step}" if self._step else ""
        took = span((view.ended_at or now) - view.started_at) if view.started_at is not None else ""
        left_s = seconds_left(view, now)
        left = f"{span(left_s)} left" if left_s else ""
        metrics = glance(self._metrics)
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
