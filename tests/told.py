"""Hooks of pytest's by which a run tells what fails as it comes, and ends a test that hangs. Cheap to import."""

import faulthandler
import os
import tempfile
import threading
from collections.abc import Generator

import pytest
import pytest_timeout

_STDERR = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Generator[None, None, None]:
    """Say at once what failed: a run that is cut off has then said what it was about."""
    yield
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n!! {report.nodeid} failed in {report.when}:\n{report.longreprtext}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # now: while a test runs, what is written there is captured


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """A test that hangs may catch what is raised in it: its process ends, with all stacks on stderr. pytest-xdist fails
    the test, and goes on in another process. (The plugin's own thread tells the stacks to a terminal, which processes
    of pytest-xdist do not have.)
    """

    def end() -> None:
        with tempfile.TemporaryFile(buffering=0) as stacks:  # at once, or another process writes in their midst
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            os.write(item.config.stash[_STDERR], stacks.read())
        os._exit(1)

    timer = threading.Timer(settings.timeout, end)
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel  # type: ignore[attr-defined]
    return True
