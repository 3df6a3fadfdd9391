"""What a run of the suite says while it goes on: what fails, and what takes long; and the end of what never ends.

A run that is cut off has then said what it was about.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Generator

import pytest

from tests import failures

# How long a test takes before it is named; it is named again each time that this has doubled.
_LONG_S = 120.0
# pytest-timeout raises in the test once. What catches that, or waits in a `finally`, is given so long; then its
# process ends, with all stacks on stderr. pytest-xdist fails the test, and goes on in another process.
_STUCK_S = 120.0


class Told:
    """In the process that reports: failures as they come, tests that run for long, and at the end how many failed."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._since: dict[str, float] = {}
        self._named: dict[str, float] = {}
        self._kinds: dict[str, str] = {}
        self._ended = threading.Event()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._ended.set()
        if (cache := getattr(session.config, "cache", None)) is not None and self._kinds:
            cache.set(failures.KEY, self._kinds)

    def pytest_terminal_summary(self) -> None:
        if self._kinds:
            self._say(f"!! {failures.told(self._kinds)}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._since.pop(nodeid, None)
        self._named.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if report.when not in ("setup", "call", "teardown"):  # its process ended: nothing says that it has finished
            self.pytest_runtest_logfinish(report.nodeid)
        # As pytest counts: what a fixture raises is an error of every test that wanted it.
        kind = "error" if report.when in ("setup", "teardown") else "failed"
        if self._kinds.get(report.nodeid) != "failed":
            self._kinds[report.nodeid] = kind
        since = self._since.get(report.nodeid)
        after = f" after {time.monotonic() - since:.0f} s" if since is not None else ""
        self._say(f"!! {report.nodeid} failed in {report.when}{after}:\n{report.longreprtext}")

    def _look(self) -> None:
        while not self._ended.wait(5):
            now = time.monotonic()
            for nodeid, since in list(self._since.items()):
                if now - since >= 2 * self._named.get(nodeid, _LONG_S / 2):
                    self._named[nodeid] = now - since
                    self._say(f".. {nodeid} has been running for {now - since:.0f} s")

    def _say(self, text: str) -> None:
        self._terminal.write(f"\n{text}\n")
        self._terminal.flush()


class Bounded:
    """In a process that runs tests: it does not outlast a test that hangs."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # now: while a test runs, what is written there is captured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._begin(item)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._begin(item)  # again: pytest's own plugin takes a failed test's back

    def _begin(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        given = item.config.getoption("timeout") or item.config.getini("timeout")
        allowed = float(marker.args[0] if marker else given)
        faulthandler.dump_traceback_later(allowed + _STUCK_S, exit=True, file=self._stderr)


@pytest.hookimpl(trylast=True)  # pytest's reporter is there only then
def pytest_configure(config: pytest.Config) -> None:
    """For a conftest.py to import: watches over a session, by what this process does in it."""
    if config.option.collectonly:
        return
    is_worker = hasattr(config, "workerinput")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not is_worker:
        config.pluginmanager.register(Told(terminal), "told")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Bounded(), "bounded")
