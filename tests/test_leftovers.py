"""What a test session leaves behind is ended, however the session ends."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

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
