"""Follow a run to its end. Leaving early never ends the run."""

import time
from collections import deque
from typing import TYPE_CHECKING

from service.cli.exits import INTERRUPTED, NOT_FINISHED, Stop, Unreachable
from service.cli.output.live import Display, display
from service.cli.output.step_table import step_line

if TYPE_CHECKING:
    from service.cli.client import Client
    from service.runs.views import RunView
    from shared.runs.status import StepStatus

_LONG_POLL_S = 1.0
_AWAY_FOR_S = 120.0


class Detached(Exception):
    """Following ended before the run did: by Ctrl-C, or after the timeout. Carries the last view of the run."""

    def __init__(self, view: "RunView", code: int) -> None:
        self.view = view
        self.code = code
        super().__init__(view.run_id)


def follow(client: "Client", view: "RunView", timeout_s: float | None) -> "RunView":
    """Show a run on stderr until it ends.

    Args:
        view: the run as it stands.
        timeout_s: when to stop looking; None for never.

    Raises:
        Detached: on Ctrl-C, or after the timeout. The run goes on.
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

    def __init__(self, client: "Client", view: "RunView") -> None:
        self.view = view
        self._client = client
        self._cursor: str | None = None
        self._last_step: int | None = None
        self._steps: deque[StepStatus] = deque()  # train steps that were read and not yet shown
        self._away_since: float | None = None

    def look(self, shown: Display) -> bool:
        """Ask the service once, and show what is new. Returns True when the run has ended and all events were shown."""
        try:
            return self._look(shown)
        except Unreachable as error:
            self._bear(error, shown)
            return False

    def _look(self, shown: Display) -> bool:
        # The status first: what is read after an end is complete.
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
        """Read an RL run's train steps that came on record, to be shown behind the events of their own jobs.

        Jobs are numbered as their steps are, and a step comes on record after its job's events and before the next job
        begins: a step that was known before no more events were found has none that are still to be shown.
        """
        if self.view.kind == "rl" and (found := list(self._client.steps(self.view.run_id, self._last_step))):
            self._steps += found
            self._last_step = found[-1].step

    def _show_step(self, shown: Display) -> None:
        shown.note(step_line(self._steps.popleft()))

    def _bear(self, error: Unreachable, shown: Display) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            shown.note(f"{error.message}; trying again")
        if now - self._away_since > _AWAY_FOR_S:
            raise Stop(error.message, error.code, attach_again(self.view.run_id)) from None
        time.sleep(0.5)
