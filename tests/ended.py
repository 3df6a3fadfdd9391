"""The end of a server that a test has started."""

import signal
import subprocess

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
