"""What a sync takes of memory, in the thread of a rank that sends and in the samplers' threads of the same process."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_worker.memory import CpuMeter
from megatron_worker.weight_sync.buckets import Announcement


@dataclass
class Taken:
    """Most bytes at once. `mapped`: of the buffers that processes share, at all ends of a sync in this process."""

    sent: int = 0
    received: int = 0
    mapped: int = 0
    buffer: int = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """As a sync's phases: at the commit both ends still have their buffers."""
        if name == "commit":
            self.mapped = _mapped_bytes()
        yield

    def end(self, announcement: Announcement) -> None:
        self.buffer = announcement.buffer_bytes


class SyncMemory:
    """Counts what operations make in all threads that begin from now on."""

    def __init__(self) -> None:
        self._meters: list[tuple[str, CpuMeter]] = []
        threading.setprofile(self._begin)

    def _begin(self, *_: object) -> None:
        """Meter a thread: called at the first event in each."""
        sys.setprofile(None)
        self._meters.append((threading.current_thread().name, CpuMeter()))
        self._meters[-1][1].start()

    @contextmanager
    def taken(self) -> Iterator[Taken]:
        """Count in a `with` block in which a sync begins and ends. Storages of before do not count."""
        marks, found = [meter.mark() for _, meter in self._meters], Taken()
        try:
            yield found
        finally:
            marks += [0] * (len(self._meters) - len(marks))
            for (name, meter), before in zip(self._meters, marks, strict=True):
                if name == "background":  # as BackgroundCall names the thread of a rank
                    found.sent += meter.peak() - before
                else:
                    found.received += meter.peak() - before


def _mapped_bytes() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "/memfd:longshore-weights" in line)
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)
