"""Requests to end, which reach a main thread that waits for something else."""

import os
import signal
import threading
from collections.abc import Callable


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` once, in a thread of its own, at SIGTERM or SIGINT. To be called by the main thread.

    Python runs its handlers in the main thread alone, and one that has just gone to sleep in a lock or a queue is not
    woken by a signal that another thread of the process took. The descriptor is written to by whichever thread took it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        os.read(reader, 1)
        stop()

    threading.Thread(target=wait, name="signals", daemon=True).start()
