"""Tests of one stack share a process and what takes long is begun first; `make check` runs what is there."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import costs, order
from tests.test_run import XDIST_ALONE

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import order

order._TOGETHER = ("whole/",)
order.recorded = lambda: {"whole/test_c.py": 2, "whole/test_d.py": 3, "test_slow.py": 4, "test_a.py": 1}
pytest_xdist_make_scheduler = order.pytest_xdist_make_scheduler
pytest_collection_modifyitems = order.pytest_collection_modifyitems


"""
TESTS = """
import os
from pathlib import Path


def test_one():
    with Path(__file__).parents[{depth}].joinpath("order").open("a") as file:
        file.write(f"{name} {{os.getpid()}}\\n")


def test_two():
    pass


def test_three():
    pass
"""


def test_what_takes_long_is_begun_first_and_a_folder_of_one_stack_shares_a_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "whole").mkdir()
    for name in ("test_a", "test_b", "test_slow", "whole/test_c", "whole/test_d"):
        (tmp_path / f"{name}.py").write_text(TESTS.format(name=name, depth=name.count("/")))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=os.environ | XDIST_ALONE,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    processes = dict(ran)
    assert processes["whole/test_c"] == processes["whole/test_d"] != processes["test_slow"]
    first = {process: name for name, process in reversed(ran)}
    assert set(first.values()) == {"whole/test_c", "test_slow"}


def test_parts_of_the_suite_are_all_of_it_once_and_take_about_as_long(tmp_path: Path) -> None:
    recorded = order.ranks(costs.recorded())
    shared_out = order.parts(recorded, 3)
    loads = [sum(recorded[name] for name, part in shared_out.items() if part == number) for number in (1, 2, 3)]
    assert max(loads) <= max(1.1 * sum(loads) / 3, max(recorded.values())), loads
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    names = ("test_a", "test_b", "test_slow", "test_of_tomorrow")
    for name in names:
        (tmp_path / f"{name}.py").write_text(TESTS.format(name=name, depth=0))
    for part in ("1/2", "2/2"):
        environment = os.environ | XDIST_ALONE | {"LONGSHORE_TEST_PART": part}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True)
    assert sorted(line.split()[0] for line in (tmp_path / "order").read_text().splitlines()) == sorted(names)


@pytest.mark.parametrize(("share", "deep", "nums"), [("0.5", "", (6, 9)), ("1.0", "", (12,)), ("0.5", "1", (12,))])
def test_a_part_of_the_dear_files_is_drawn(tmp_path: Path, share: str, deep: str, nums: Sequence[int]) -> None:
    """Each whole or not at all, and cheap ones always."""
    names = [f"test_{name}" for name in "abcd"]
    costs_of = {f"{name}.py": costs.DEAR_S - (name == "test_a") for name in names}
    (tmp_path / "conftest.py").write_text(CONFTEST + f"order.recorded = lambda: {costs_of}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in names:
        (tmp_path / f"{name}.py").write_text(TESTS.format(name=name, depth=0))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    told = {"LONGSHORE_TEST_SHARE": share, "LONGSHORE_TEST_DEEP": deep, "LONGSHORE_TEST_SEED": "3"}
    done = subprocess.run(command, env=os.environ | XDIST_ALONE | told, cwd=ROOT, capture_output=True, text=True)
    [num] = re.findall(r"(\d+) passed", done.stdout)
    assert int(num) in nums, done.stdout
    assert (f"{12 - int(num)} deselected" in done.stdout) == (int(num) < 12)


DRAWS = """
import pytest
from tests.depth import drawn


@pytest.mark.parametrize("point", drawn(range(5), 2))
def test_some(point):
    pass
"""


@pytest.mark.parametrize(("deep", "num"), [("", 2), ("1", 5)])
def test_what_draws_is_run_whole_by_a_deep_run(tmp_path: Path, deep: str, num: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = drawn\n")
    (tmp_path / "test_a.py").write_text(DRAWS)
    (tmp_path / "test_b.py").write_text(TESTS.format(name="test_b", depth=0))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "drawn", "--rootdir", tmp_path, tmp_path]
    environment = os.environ | XDIST_ALONE | {"LONGSHORE_TEST_DEEP": deep}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert f"{num} passed, 3 deselected" in done.stdout, done.stdout + done.stderr


def test_what_files_took_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(1.2)\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.costs", "-n", "1", "-o", f"cache_dir={tmp_path / 'cache'}"]
    subprocess.run([*command, tmp_path], env=os.environ | XDIST_ALONE, cwd=ROOT, check=True, capture_output=True)
    [(file, cost_s)] = json.loads((tmp_path / "cache" / "v" / costs.KEY).read_text()).items()
    assert file == "test_a.py" and cost_s >= 1.2


def test_the_places_that_are_named_are_there() -> None:
    gone = [file for file in costs.recorded() if not (ROOT / file).exists()]
    assert not gone, "python -m tests.costs .pytest_cache"
    for beginning in order._TOGETHER:
        folder, _, name = beginning.rpartition("/")
        assert (ROOT / folder).is_dir() and (not name or any((ROOT / folder).glob(f"{name}*.py"))), beginning
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    named = re.findall(r"tests/[\w/.:]+", check)
    assert len(named) > 10
    for place in named:
        file, _, test = place.partition("::")
        assert (ROOT / file).exists(), place
        assert not test or f"def {test}(" in (ROOT / file).read_text(), place
