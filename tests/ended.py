"""Processes that tests have started: which live, and the end of a server."""

import signal
import subprocess
from pathlib import Path

import psutil

# For those that are started with it in their environment: where it stood, if it does not leave.
TELLS_WHERE_IT_STANDS = {"PYTHONFAULTHANDLER": "1"}


def end(process: subprocess.Popen, patience_s: float = 40) -> None:
    """Ask it to leave; abort one that does not."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        print(f"{process.args} did not leave within {patience_s:g} s; aborted")
        process.send_signal(signal.SIGABRT)
        process.wait()


def living(root: Path, mark: str, *words: str) -> list[psutil.Process]:
    """Processes of a stack whose command line holds all of the words. This variable of theirs names its root."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if not all(word in command for word in words) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if f"{root}/" in command or process.environ().get(mark) == str(root):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
