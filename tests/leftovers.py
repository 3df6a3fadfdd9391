"""Ends whatever a test session has started and left behind, however it ended: a failed fixture, Ctrl-C, a SIGKILL.

The session puts a mark of its own into its environment, which everything that it starts inherits, and starts this
program with a pipe as its stdin. When the session is gone the pipe ends, and so does whoever still carries the mark.
"""

import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "LONGSHORE_TEST_SESSION"
_GRACE_S = 2.0
# So long may those take that leave by themselves when the session is gone.
_LEAVING_S = 1.0


def watch_over() -> "subprocess.Popen[bytes]":
    """From now on what this process starts does not outlive it for long, nor the end of the answer's stdin."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    # In a session of its own, so that Ctrl-C does not reach it; without the mark, for it is not to end itself.
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-m", "tests.leftovers", mark]
    repository = Path(__file__).parents[1]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_all(mark: str) -> int:
    """End every process that carries the mark. Returns how many there were."""
    left = [process for process in psutil.process_iter() if _carries(process, mark)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=_GRACE_S)
    for process in stubborn:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=_GRACE_S)
    return len(left)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def main() -> None:
    sys.stdin.buffer.read()
    time.sleep(_LEAVING_S)
    mark, num_ended = sys.argv[1], 0
    while num_left := end_all(mark):  # again: a supervisor may have started another child meanwhile
        num_ended += num_left
    if num_ended:
        print(f"tests.leftovers: ended {num_ended} processes that tests had left behind", file=sys.stderr)


if __name__ == "__main__":
    main()
