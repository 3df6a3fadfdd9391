"""What a program does first: imports that take long, and a watch over the process that started it."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from shared.jobs.job import WorkerRecord

# --- Imports of slow modules: PyTorch, Megatron ---


@contextmanager
def slow_imports() -> Iterator[None]:
    """Make imports within the block without garbage collections, which take a quarter of their time.

    If a module was new, all objects at the end are frozen: modules live for ever, and later collections, including
    that at the process's end, need not look at their objects.
    """
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if len(sys.modules) > num_modules:
            gc.freeze()


# --- A watchdog ---
# A thread that ends this process when its parent, or the host that launched the worker, is gone.
#
# It exits at once: a rank that waits in a collective cannot be asked to end, and no process has state worth keeping.
# A process that can be asked to end is asked by a signal.

PERIOD_S = 0.2
_START_TIME_TOLERANCE_S = 1.0


def start_watchdog(record: Path | None) -> None:
    """Start the thread. `record` is `worker.json`, which may not exist yet, and names another host once adopted."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent, record), name="watchdog", daemon=True).start()


def _watch(parent: int, record: Path | None) -> None:
    while True:
        if os.getppid() != parent:
            _leave("its parent process")
        if record is not None and host_is_gone(record):
            _leave("its host")
        time.sleep(PERIOD_S)


def host_is_gone(record: Path) -> bool:
    try:
        worker = WorkerRecord.model_validate_json(record.read_bytes())
    except FileNotFoundError:
        return False
    return not is_alive(worker.host_pid, worker.host_started_at)


def is_alive(pid: int, started_at: float) -> bool:
    """Return True if the process of this pid started then (seconds since 1970), and has not ended."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started_at) < _START_TIME_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leave(who: str) -> None:
    print(f"worker {os.getpid()} ends: {who} is gone", file=sys.stderr, flush=True)
    os._exit(70)


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` once, in a separate thread, at SIGTERM or SIGINT. To be called by the main thread.

    Python runs its handlers in the main thread alone, and a main thread that sleeps in a lock or a queue is not woken
    by a signal that another thread took. Whichever thread takes the signal writes to the descriptor.
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
