"""CPU seconds of the suite by file: what this process, all that it starts and the stacks of its tests have used.

Seconds of the clock say how busy a machine was. `tests/durations.json` keeps what files took when it was last
recorded, by which they are shared out among processes.

python -m tests.costs tell CACHE      the ten dearest files of the last run of tests/run.sh, whose cache is in that
                                      folder; exits with 1 where all files together are over their share of the budget
python -m tests.costs record CACHE    the same, and writes durations.json
python -m tests.costs reap ARGUMENTS  Python with these arguments, beside a parent of all orphans that it leaves
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from execnet.xspec import XSpec

BUDGET_CPU_S = 2 * 90 * 60
"""CI has two cores for 90 minutes, of which the suite takes at most a share: the rest is for what else CI does."""
SHARE = 0.85  # seconds of whatever CPU it runs on, of which a slow one takes 2.3 times those of a fast one
RECORDED = Path(__file__).with_name("durations.json")
DEAR_S = 5
"""Recorded CPU seconds from which on a file is dear: CI runs a part of such files, drawn by the seed."""
KEY = "longshore/costs"
"""Of pytest's cache: CPU seconds by file."""
_PROPERTY = "cpu_s"


class Meter:
    """In a process that runs tests: what each file has cost, told with the report of its last test's end."""

    def __init__(self) -> None:
        self._last_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._is_last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._is_last:
            used_s = _used_s()
            item.user_properties.append((_PROPERTY, round(max(0.0, used_s - self._last_s), 1)))
            self._last_s = used_s


def _used_s() -> float:
    """What the process below `reap` and all that it ever started have used."""
    reaper = psutil.Process(os.getppid())
    waited_for = reaper.cpu_times()
    used_s = waited_for.children_user + waited_for.children_system
    for process in reaper.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            used_s += sum(process.cpu_times()[:4])
    return float(used_s)


def reap(arguments: Sequence[str]) -> int:
    """Run Python with these arguments. Who loses its parent meanwhile becomes a child of this process, which waits for
    it: its seconds are kept, where those of a child of init are lost.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    die_with_us = lambda: libc.prctl(1, signal.SIGKILL)  # noqa: E731 (PR_SET_PDEATHSIG)
    child = subprocess.Popen([sys.executable, *arguments], preexec_fn=die_with_us)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


class Bill:
    """In the process that reports: what each file has cost, into pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._by_file: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            cost_s = sum(value for name, value in report.user_properties if name == _PROPERTY)
            self._by_file[report.nodeid.partition("::")[0]] += cost_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[XSpec]) -> None:
        for spec in specs:
            spec.python = f"{sys.executable} -m tests.costs reap"

    def pytest_sessionfinish(self) -> None:
        self._config.cache.set(KEY, dict(self._by_file))


def fits(by_file: Counter[str]) -> bool:
    return sum(by_file.values()) <= SHARE * BUDGET_CPU_S


def told(by_file: Counter[str]) -> str:
    """The ten dearest files, and the sum beside the budget."""
    total_s, allowed_s = sum(by_file.values()), SHARE * BUDGET_CPU_S
    lines = [f"the ten dearest of {len(by_file)} files, in CPU seconds:"]
    lines += [f"  {cost_s:7.0f}  {file}" for file, cost_s in by_file.most_common(10)]
    sign, verdict = ("..", "fits") if fits(by_file) else ("!!", "does not fit: make the dearest files cheaper")
    lines.append(
        f"{sign} the suite took {total_s:.0f} CPU seconds and {verdict}: at most {SHARE:.0%} of the {BUDGET_CPU_S} s "
        f"that two cores have in 90 minutes, {allowed_s:.0f} s"
    )
    return "\n".join(lines)


def recorded() -> dict[str, float]:
    """What files took when it was last recorded, in CPU seconds."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def pytest_configure(config: pytest.Config) -> None:
    """Both ends of the account, each in its process, where tests/run.sh asks for it by `-p tests.costs`."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Meter(), "meter")
    else:
        config.pluginmanager.register(Bill(config), "bill")


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "reap":
        sys.exit(reap(arguments))
    [cache] = arguments
    by_file = Counter(json.loads(Path(cache, "v", KEY).read_text()))
    if command == "record":
        kept = {file: round(cost_s) for file, cost_s in sorted(by_file.items()) if cost_s >= 1}
        RECORDED.write_text(json.dumps(kept, indent=0) + "\n")
    print(told(by_file))
    sys.exit(not fits(by_file))


if __name__ == "__main__":
    main()
