"""What a run of the suite tells while it goes on, and that a test which hangs ends without it."""

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests import progress

progress._LONG_S, progress._STUCK_S = 2.0, 3.0
pytest_configure = progress.pytest_configure
pytest_xdist_make_scheduler = progress.pytest_xdist_make_scheduler
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
        assert f'{name}.py", line 11 in test_that_cannot_be_interrupted' in told  # where it stood
    assert "!! test_first.py::test_that_fails failed in call" in told and "as it should" in told
    assert "3 failed, 14 passed" in failures
