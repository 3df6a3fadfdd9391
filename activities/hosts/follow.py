"""The log reader: whole lines from a byte offset, in order, until the terminal event."""

from dataclasses import dataclass
from pathlib import Path

from shared.jobs.events import Event, parse_event


@dataclass(frozen=True)
class LogLine:
    """One event, with the very bytes it stood in (newline included)."""

    data: bytes
    event: Event


class LogReader:
    """Follows one job's log. `offset` counts the bytes read so far; a line without its newline waits for the rest."""

    def __init__(self, path: Path, offset: int = 0, seq: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.seq = seq

    def read(self) -> list[LogLine]:
        """The whole lines that were appended since the last call.

        Raises:
            ValueError: a line is no event, or `seq` has a gap.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        return [self._line(line) for line in whole.splitlines(keepends=True)]

    def _line(self, data: bytes) -> LogLine:
        event = parse_event(data)
        if event.seq != self.seq + 1:
            raise ValueError(f"{self.path}: event {event.seq} follows event {self.seq}")
        self.seq = event.seq
        self.offset += len(data)
        return LogLine(data, event)
