"""What files of tests took when it was last recorded, by which they are shared out among processes and drawn.

`python -m tests.costs CACHE` writes durations.json from the last run of tests/run.sh, whose cache is in that folder.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("durations.json")
DEAR_S = 5
"""Recorded seconds from which on a file is dear: CI runs a part of such files, drawn by the seed."""
KEY = "longshore/costs"
"""Of pytest's cache: seconds by file."""


def recorded() -> dict[str, float]:
    """What files took when it was last recorded, in seconds."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


class Bill:
    """In the process that reports: what each file has taken, fixtures included, into pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._by_file: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._config.cache.set(KEY, dict(self._by_file))


def pytest_configure(config: pytest.Config) -> None:
    """Where tests/run.sh asks for it by `-p tests.costs`."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Bill(config), "bill")


if __name__ == "__main__":
    by_file = json.loads(Path(sys.argv[1], "v", KEY).read_text())
    kept = {file: round(cost_s) for file, cost_s in sorted(by_file.items()) if cost_s >= 1}
    RECORDED.write_text(json.dumps(kept, indent=0) + "\n")
