"""The phases of a sync as the trainer sees them, and their trace in a file that chrome://tracing and Perfetto read."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_worker.weight_sync.messages import Announcement

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class _Phase:
    name: str
    began: float  # seconds since 1970
    duration_s: float

    def line(self, whose: dict[str, object]) -> str:
        """Return it as an event of Chrome's trace format, whose times are in microseconds."""
        name, _, bucket = self.name.partition(" ")
        arguments = whose | ({"bucket": int(bucket)} if bucket else {})
        times = {"ts": round(self.began * 1e6), "dur": round(self.duration_s * 1e6)}
        return json.dumps({"name": name, "ph": "X", "pid": os.getpid(), "tid": 0, **times, "args": arguments}) + ",\n"


class SyncProfile:
    """Appends the phases of one sync to a file: a JSON array with an event a line, never closed, as the format allows.

    Without a path nothing is kept or written.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._phases: list[_Phase] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter a phase: prepare, connect; for each bucket settle, fill and send; settle, commit, finalize."""
        began = time.time()
        try:
            yield
        finally:
            if self._path is not None:
                self._phases.append(_Phase(name, began, time.time() - began))

    def end(self, announcement: Announcement) -> str | None:
        """End a sync. Returns why its trace could not be written."""
        if self._path is None:
            return None
        whose = {"run": announcement.run_id, "version": announcement.version, "transport": announcement.transport}
        lines = "".join(phase.line(whose) for phase in self._phases)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags, 0o600), "w") as file:
                size = os.fstat(file.fileno()).st_size
                if size + len(lines) > _MAX_BYTES:
                    return f"the profile has {size} bytes, of {_MAX_BYTES} that it may have"
                file.write(("" if size else "[\n") + lines)
        except OSError as error:
            return f"the profile cannot be written: {error.strerror}"
        return None
