"""What a run of the suite tells while it goes on, and that a test which hangs ends without it."""

import os
import subprocess
import sys
from pathlib import Path

# Other plugins are dear to import, in every process.
XDIST_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist,pytest_timeout"}
CONFTEST = """
from tests import order, progress

progress._LONG_S, progress._STUCK_S = 2.0, 3.0
pytest_configure = progress.pytest_configure
pytest_xdist_make_scheduler = order.pytest_xdist_make_scheduler
"""
HANGS = """
import time

import pytest


@pytest.mark.timeout(6)
def test_that_cannot_be_interrupted():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""
FAILS = """

def test_that_fails():
    assert 1 == 2, "as it should"
"""
PASSES = "\n\ndef test_that_passes_{number}():\n    pass\n"


BROKEN_FIXTURE = """
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def server():
    tries = Path(__file__).with_name("tries")
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) > 1, "the first time it does not start"


@pytest.mark.parametrize("number", range(72))
def test_that_wants_it(server, number):
    pass
"""


def run_of(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    return subprocess.run(
        [Path(__file__).with_name("run.sh"), "-c", folder / "pytest.ini", "--rootdir", folder, folder],
        env=os.environ | XDIST_ALONE | {"LONGSHORE_TEST_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


def test_the_end_says_how_many_tests_and_errors_there_were(tmp_path: Path) -> None:
    """A fixture that fails takes all tests of its file along: one cause, and not one failure."""
    (tmp_path / "test_shared.py").write_text(BROKEN_FIXTURE)
    (tmp_path / "test_once.py").write_text(
        "from pathlib import Path\n\n\ndef test_that_fails_once():\n    tried = Path(__file__).with_name('tried')\n"
        "    was_there = tried.exists()\n    tried.touch()\n    assert was_there\n"
    )
    done = run_of(tmp_path)
    assert done.returncode == 0, done.stdout
    numbers = "1 failed test, 72 errors in 2 files:\n  test_once.py: 1 failed test\n  test_shared.py: 72 errors\n"
    assert f"== failed beside other tests, now alone: {numbers}" in done.stdout
    assert done.stdout.endswith(f"!! failed beside other tests and passed alone: {numbers}")


def test_what_fails_twice_fails_the_suite_and_too_much_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(FAILS)
    done = run_of(tmp_path)
    assert done.returncode == 1
    numbers = "1 failed test in 1 file:\n  test_a.py: 1 failed test\n"
    assert done.stdout.endswith(f"!! failed beside other tests: {numbers}!! and alone: {numbers}")
    (tmp_path / "test_a.py").write_text("".join(FAILS.replace("fails", f"fails_{n}") for n in range(9)))
    done = run_of(tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith(
        "!! too much for a second round: 9 failed tests in 1 file:\n  test_a.py: 9 failed tests\n"
    )


def test_tests_that_hang_are_named_and_take_no_others_along(tmp_path: Path) -> None:
    """One with others behind it in its file, and the very last one."""
    files = {
        "conftest": CONFTEST,
        "test_first": HANGS + FAILS + "".join(PASSES.format(number=number) for number in range(6)),
        **{f"test_{letter}": "".join(PASSES.format(number=number) for number in range(2)) for letter in "abcd"},
        "test_last": HANGS,
    }
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        env=os.environ | XDIST_ALONE,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1, done.stdout
    told, _, failures = done.stdout.partition("= FAILURES =")
    for name in ("test_first", "test_last"):
        assert f".. {name}.py::test_that_cannot_be_interrupted has been running for " in told
        assert f"!! {name}.py::test_that_cannot_be_interrupted failed" in told
        # Where it stood, in its process's own words: on a busy machine they come later than the others'.
        assert f'{name}.py", line 11 in test_that_cannot_be_interrupted' in done.stdout
    assert "!! test_first.py::test_that_fails failed in call" in told and "as it should" in told
    assert "3 failed, 14 passed" in failures
