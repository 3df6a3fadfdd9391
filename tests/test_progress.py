"""What a run of the suite tells while it goes on, and that a test which hangs ends without it."""

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests import progress

progress._LONG_S, progress._STUCK_S = 2.0, 3.0
pytest_configure = progress.pytest_configure
"""
TESTS = """
import time

import pytest


@pytest.mark.timeout(6)
def test_that_cannot_be_interrupted():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass


def test_that_fails():
    assert 1 == 2, "as it should"


def test_that_passes():
    pass
"""


def test_a_test_that_hangs_is_named_and_takes_no_other_along(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout
    name = "test_all.py::test_that_"
    told, _, failures = done.stdout.partition("= FAILURES =")
    assert f".. {name}cannot_be_interrupted has been running for " in told
    assert "time.sleep(600)" not in told and "in test_that_cannot_be_interrupted" in told  # where it stood
    assert f"!! {name}cannot_be_interrupted failed" in told
    assert f"!! {name}fails failed in call" in told and "as it should" in told
    assert "2 failed, 1 passed" in failures
