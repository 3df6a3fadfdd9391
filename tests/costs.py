"""CPU seconds of the suite by file: what this process, all that it starts and the stacks of its tests have used.

Seconds of the clock say how busy a machine was. `tests/durations.json` keeps what files took when it was last
recorded, by which they are shared out among processes.

python -m tests.costs tell CACHE      the ten dearest files of the last run of tests/run.sh, whose cache is in that
                                      folder; exits with 1 where all files together are over their share of the budget
python -m tests.costs record CACHE    the same, and writes durations.json
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from tests.leftovers import MARK

BUDGET_CPU_S = 2 * 90 * 60
"""CI has two cores for 90 minutes, of which the suite takes at most a share: the rest is for a slower machine."""
SHARE = 0.4
RECORDED = Path(__file__).with_name("durations.json")
KEY = "longshore/costs"
"""Of pytest's cache: CPU seconds by file."""
_PROPERTY = "cpu_s"


class Meter:
    """In a process that runs tests: what each file has cost, told with the report of its last test's end."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, bool]] = {}
        self._gone_s = 0.0
        self._last_s = self._used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._is_last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._is_last:
            used_s = self._used_s()
            item.user_properties.append((_PROPERTY, round(max(0.0, used_s - self._last_s), 1)))
            self._last_s = used_s

    def _used_s(self) -> float:
        """Stacks are nobody's children: they are found by the mark in their environment."""
        own = os.times()
        living = dict(_marked())
        # Whoever waits for a child has its seconds. Nobody has those of one that was nobody's child.
        self._gone_s += sum(s for pid, (s, is_orphan) in self._seen.items() if is_orphan and pid not in living)
        self._seen = living
        return sum(own[:4]) + sum(s for s, _ in living.values()) + self._gone_s


def _marked() -> Generator[tuple[int, tuple[float, bool]], None, None]:
    mark = os.environ.get(MARK)
    for process in psutil.process_iter():
        try:
            if mark and process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process.pid, (sum(process.cpu_times()[:4]), process.ppid() == 1)
        except psutil.Error:
            continue


class Bill:
    """In the process that reports: what each file has cost, into pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._by_file: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            cost_s = sum(value for name, value in report.user_properties if name == _PROPERTY)
            self._by_file[report.nodeid.partition("::")[0]] += cost_s

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
    command, cache = sys.argv[1:]
    by_file = Counter(json.loads(Path(cache, "v", KEY).read_text()))
    if command == "record":
        kept = {file: round(cost_s) for file, cost_s in sorted(by_file.items()) if cost_s >= 1}
        RECORDED.write_text(json.dumps(kept, indent=0) + "\n")
    print(told(by_file))
    sys.exit(not fits(by_file))


if __name__ == "__main__":
    main()
