"""The event writer: whole lines, gapless numbers, nothing after the terminal event."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import InvalidInput
from shared.jobs.events import Cancelled, Event, Failed, Succeeded

TERMINAL = (Succeeded, Failed, Cancelled)


class EventLog:
    """Appends a job's events to its log. Ranks other than 0 have one without a path, which writes nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidInput if the log already holds events: each attempt has a new log."""
        self._seq = 0
        self._file: int | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            raise InvalidInput("the log already holds events of another attempt; choose another folder", str(path))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, kind: Callable[..., Event], /, **fields: object) -> None:
        """Append one event; `seq` and `time` are filled in here. A terminal event is fsynced and closes the log.

        Raises OSError: the line does not fit on the disk; nothing of it is left, and `seq` is not used up.
        """
        if self._file is None:
            return
        event = kind(seq=self._seq + 1, time=time.time(), **fields)
        _append(self._file, event.model_dump_json().encode() + b"\n")
        self._seq += 1
        if isinstance(event, TERMINAL):
            os.fsync(self._file)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def _append(file: int, line: bytes) -> None:
    end = os.fstat(file).st_size
    written = os.write(file, line)
    if written < len(line):
        os.ftruncate(file, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
