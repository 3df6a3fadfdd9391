"""A run of the suite tells what fails as it comes, tries it again, goes on beside a hang, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

# Other plugins are dear to import, in every process.
XDIST_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist,pytest_timeout"}
# A run of its own: what says that this process is one of pytest-xdist's is not for it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | XDIST_ALONE
CONFTEST = """
from tests.told import pytest_configure, pytest_runtest_logreport, pytest_timeout_set_timer
from tests.order import pytest_xdist_make_scheduler
"""
INI = "[pytest]\ntimeout = 60\n"
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
FAILS = '\n\ndef test_that_fails():\n    assert 1 == 2, "as it should"\n'
FAILS_ONCE = """
from pathlib import Path


def test_that_fails_once():
    tried = Path(__file__).with_name("tried")
    was_there = tried.exists()
    tried.touch()
    assert was_there
"""
PASSES = "\n\ndef test_that_passes_{number}():\n    pass\n"


def run_of(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, content in {"conftest.py": CONFTEST, "pytest.ini": INI, **files}.items():
        (folder / name).write_text(content)
    return subprocess.run(
        [Path(__file__).with_name("run.sh"), "-c", folder / "pytest.ini", "--rootdir", folder, folder],
        env=ENVIRONMENT | {"LONGSHORE_TEST_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


def test_what_fails_beside_others_is_tried_again_alone_and_named(tmp_path: Path) -> None:
    done = run_of(tmp_path, {"test_once.py": FAILS_ONCE, "test_b.py": PASSES.format(number=1)})
    assert done.returncode == 0, done.stdout
    assert "== failed beside other tests, now alone:\ntest_once.py::test_that_fails_once\n" in done.stdout
    assert done.stdout.endswith("!! failed beside other tests and passed alone:\ntest_once.py::test_that_fails_once\n")


def test_what_fails_twice_fails_the_suite_and_too_much_is_not_tried_again(tmp_path: Path) -> None:
    name = "test_a.py::test_that_fails\n"
    done = run_of(tmp_path, {"test_a.py": FAILS + FAILS_ONCE})
    assert done.returncode == 1
    beside = f"{name}test_a.py::test_that_fails_once\n"
    assert done.stdout.endswith(f"!! failed beside other tests:\n{beside}!! and alone:\n{name}")
    done = run_of(tmp_path, {f"test_{letter}.py": FAILS for letter in "abcde"})
    assert done.returncode == 1
    assert "!! too much for a second round:\ntest_" in done.stdout and "now alone" not in done.stdout


def test_tests_that_hang_end_their_process_and_take_no_others_along(tmp_path: Path) -> None:
    """One with others behind it in its file, and the very last one."""
    files = {
        "test_first.py": HANGS + FAILS + "".join(PASSES.format(number=number) for number in range(6)),
        **{f"test_{letter}.py": "".join(PASSES.format(number=number) for number in range(2)) for letter in "abcd"},
        "test_last.py": HANGS,
    }
    for name, content in {"conftest.py": CONFTEST, "pytest.ini": INI, **files}.items():
        (tmp_path / name).write_text(content)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        env=ENVIRONMENT,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1, done.stdout
    told, _, failures = done.stdout.partition("= FAILURES =")
    for name in ("test_first", "test_last"):
        assert f"!! {name}.py::test_that_cannot_be_interrupted failed" in told
        # Where it stood, in its process's own words: on a busy machine they come later than the others'.
        assert f'{name}.py", line 11 in test_that_cannot_be_interrupted' in done.stdout
    assert "!! test_first.py::test_that_fails failed in call" in told and "as it should" in told
    assert "3 failed, 14 passed" in failures


SESSION = """
import subprocess, sys, time
from tests.leftovers import watch_over

watching = watch_over()
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
left = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE, start_new_session=True)
left.stdout.readline()
print(left.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_session_leaves_nothing_running() -> None:
    """Not even a process in a session of its own that is deaf to SIGTERM."""
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert session.stdout is not None and session.stderr is not None
    left = psutil.Process(int(session.stdout.readline()))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        session.send_signal(signal.SIGKILL)
        session.wait()
        left.wait(60)  # TimeoutExpired: it lives
        assert b"ended 1 processes" in session.stderr.read()
        assert bystander.poll() is None
    finally:
        for process in (left, bystander):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        bystander.wait()
        session.stdout.close()
        session.stderr.close()
