"""Which tests run one after another in one process, and which are begun first.

Processes that share the suite end together only where what takes long is begun first, as recorded (tests/costs.py).
Tests of one stack belong into one process, so that the stack is started once.
"""

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.costs import DEAR_S, recorded
from tests.depth import IS_DEEP, SEED, drawn

# Folders whose tests share a stack or a service. Rollouts, snippets, and tests with a stack of their own run by
# themselves, so that the others do not end long after everything else.
_TOGETHER = (
    "tests/end_to_end/test_left_clients",
    "tests/end_to_end/test_snippets",
    "tests/end_to_end/test_team_install",
    "tests/end_to_end/test_r",
    "tests/end_to_end/",
    "tests/security/attacks/",
    "tests/security/",
    "tests/page/",
)


def group(test: str) -> str:
    """What is run in one process: a file, a folder of files, or those of it whose names begin alike."""
    file = test.partition("::")[0]
    return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def ranks(costs: Mapping[str, float]) -> Counter[str]:
    """By group, what its recorded files cost together. Groups of a file that nobody has recorded cost nothing."""
    found: Counter[str] = Counter()
    for file, cost_s in costs.items():
        found[group(file)] += cost_s
    return found


def parts(costs: Mapping[str, float], num: int) -> dict[str, int]:
    """Share out the recorded groups among parts of the suite, 1 to `num`, that take about as long."""
    found: dict[str, int] = {}
    loads = dict.fromkeys(range(1, num + 1), 0.0)
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        found[name] = min(loads, key=loads.__getitem__)
        loads[found[name]] += costs[name]
    return found


class Groups(LoadFileScheduling):
    """`--dist loadfile` by groups, in the order of the collection; and it goes on when a process ends, where
    pytest-xdist 3.8 waits for ever (its issue 1323).

    There the test that took its process along is given to the next one, and a process with fewer than two tests in hand
    is not told that no more will come.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of tests: a run of minutes is one

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that a process ended in, which is not tried again; the rest of its groups are for others."""
        units = self.assigned_work.pop(node)
        left = [(unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done]
        if not left:
            return None
        last_unit, last_test = left[0]
        last_unit[last_test] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return last_test

    def _reschedule(self, node: WorkerController) -> None:
        """Nothing is for a process that has taken another's place and has not told yet what it finds."""
        if node in self.registered_collections:
            super()._reschedule(node)

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:  # again: a second group, or that there is none
            self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For a conftest.py to import."""
    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For a conftest.py to import. LONGSHORE_TEST_PART: `1/3` is the first of three parts of the suite.

    LONGSHORE_TEST_SHARE: the part of the dear files that is run, drawn by the seed. Whole files are drawn, as most of
    them start a stack or an engine for all of their tests.
    """
    for item in items:
        if isinstance(item, pytest.Function) and any(value is drawn for value in vars(item.module).values()):
            item.add_marker("drawn")  # `make test-deep` runs it, where its file draws all
    costs = ranks(recorded())
    if asked := os.environ.get("LONGSHORE_TEST_PART"):
        part, num = map(int, asked.split("/"))
        shared_out = parts(costs, num)

        def is_mine(test: str) -> bool:  # what nobody has recorded goes by its name, the same at every collection
            return shared_out.get(name := group(test), zlib.crc32(name.encode()) % num + 1) == part

        _keep(config, items, is_mine)
    if (share := float(os.environ.get("LONGSHORE_TEST_SHARE") or 1)) < 1 and not IS_DEEP:
        dear = {file for file, cost_s in recorded().items() if cost_s >= DEAR_S}

        def is_drawn(test: str) -> bool:
            file = test.partition("::")[0]
            return file not in dear or random.Random(f"{SEED} of {file}").random() < share

        _keep(config, items, is_drawn)
    items.sort(key=lambda item: -costs[group(item.nodeid)])


def _keep(config: pytest.Config, items: list[pytest.Item], is_kept: Callable[[str], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item.nodeid)])
    items[:] = [item for item in items if is_kept(item.nodeid)]
