"""What a stack under attack may take of the machine, so that an attack that succeeds does not take it along."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.end_to_end.stack import Stack

PROCESS_BYTES = 8 << 30  # of addresses: torch maps about 4 GiB of them, and a control host 0.3
STACK_BYTES = 6 << 30  # of memory, all processes together
CONFINED_BYTES = 1 << 30  # of one that reads what a tenant gave
NUM_PROCESSES = 40
_LOOK_EVERY_S = 0.25


class Bounds:
    """Ends what attacks have made of a stack when it grows beyond measure, and says so."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._left = threading.Event()
        self.broken: str | None = None

    def set_limits(self) -> None:
        """Processes that these start, or that the supervisor starts again, inherit them."""
        for process in self._stack.processes():
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))

    def watch(self) -> None:
        while not self._left.wait(_LOOK_EVERY_S):
            processes = self._stack.processes()
            num_bytes = sum(_memory(process) for process in processes)
            if len(processes) > NUM_PROCESSES or num_bytes > STACK_BYTES:
                self.broken = f"the stack had {len(processes)} processes and {num_bytes:,} bytes of memory"
                self._end(processes)

    def leave(self) -> None:
        self._left.set()

    def _end(self, processes: list[psutil.Process]) -> None:
        """All but the supervisor, which starts its own again."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if "service.dev" not in process.cmdline():
                    process.kill()


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@contextmanager
def bounded(stack: Stack) -> Iterator[Bounds]:
    bounds = Bounds(stack)
    bounds.set_limits()
    watcher = threading.Thread(target=bounds.watch, daemon=True)
    watcher.start()
    try:
        yield bounds
    finally:
        bounds.leave()
        watcher.join(10)
