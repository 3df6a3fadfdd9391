"""Reads a run's events from the store: pieces of the log while a job runs, the whole log afterwards.

Ordered by job, then fence, then `seq`. A worker that continues from a checkpoint repeats the steps after it under a
later fence: the last event of a step counts.
"""

import re
from dataclasses import dataclass, field

from pydantic import ValidationError

from longshore.fields import Frozen
from shared.errors import InvalidInput, NotFound
from shared.fence import Fence
from shared.jobs.events import Event, parse_event
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectInfo, ObjectStore

_READ_BYTES = 4 << 20
_OFFSET = re.compile(r"[0-9]{1,18}")


class EventCursor(Frozen):
    """A position between two events: the attempt, and how many bytes of its log were read. Default: the beginning."""

    job_id: str = ""
    fence_label: str = ""
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.job_id}/{self.fence_label}/{self.offset}"

    @classmethod
    def parse(cls, text: str | None) -> "EventCursor":
        """Parse a cursor's text; None means the beginning.

        Raises:
            InvalidInput: the text is no cursor.
        """
        match text.split("/") if text else ["", "", "0"]:
            case [job_id, fence_label, offset] if _OFFSET.fullmatch(offset):
                return cls(job_id=job_id, fence_label=fence_label, offset=int(offset))
            case _:
                raise _no_cursor()


def _no_cursor() -> InvalidInput:
    return InvalidInput("not a cursor that this service gave", "cursor")


BEGINNING = EventCursor()


class RunEvent(Frozen):
    """An event of one attempt at a job, and the cursor after it."""

    cursor: str
    job_id: str
    fence: Fence
    event: Event


def read_run_events(
    store: ObjectStore, run_id: str, cursor: EventCursor = BEGINNING, limit: int | None = None
) -> tuple[list[RunEvent], EventCursor]:
    """Return at most `limit` events in the store after a cursor, and the cursor after the last one.

    Raises:
        InvalidInput: the cursor points into a line.
    """
    found: list[RunEvent] = []
    given = cursor
    attempts = _attempts(store, run_id)
    while limit is None or len(found) < limit:
        try:
            piece = _next_piece(store, attempts, cursor)
        except _Stale:
            attempts = _attempts(store, run_id)
            continue
        if piece is None:
            break
        for line in piece.data.splitlines(keepends=True)[: None if limit is None else limit - len(found)]:
            try:
                event = parse_event(line)
            except ValidationError:
                if cursor.offset and cursor == given:
                    raise _no_cursor() from None
                raise
            cursor = piece.cursor_behind(len(line), cursor)
            fence = Fence.from_label(piece.fence_label)
            found.append(RunEvent(cursor=str(cursor), job_id=piece.job_id, fence=fence, event=event))
    return found, cursor


@dataclass(frozen=True)
class _Piece:
    """Whole lines of an attempt's log."""

    job_id: str
    fence_label: str
    data: bytes

    def cursor_behind(self, num_bytes: int, cursor: EventCursor) -> EventCursor:
        is_same = (self.job_id, self.fence_label) == (cursor.job_id, cursor.fence_label)
        offset = (cursor.offset if is_same else 0) + num_bytes
        return EventCursor(job_id=self.job_id, fence_label=self.fence_label, offset=offset)


class _Stale(Exception):
    """Pieces of a log were replaced by the whole log during or after their listing."""


@dataclass
class _Attempt:
    """The objects that hold one attempt's log: `whole` if it exists, else the pieces in `parts`.

    `is_complete`: it is known that none of the pieces had been deleted when they were listed.
    """

    key: str
    whole: ObjectInfo | None = None
    parts: list[ObjectInfo] = field(default_factory=list)
    is_complete: bool = False


def _next_piece(store: ObjectStore, attempts: dict[tuple[str, str], _Attempt], cursor: EventCursor) -> _Piece | None:
    """Raises _Stale."""
    for (job_id, fence_label), attempt in attempts.items():
        if (job_id, fence_label) < (cursor.job_id, cursor.fence_label):
            continue
        offset = cursor.offset if (job_id, fence_label) == (cursor.job_id, cursor.fence_label) else 0
        if data := _read(store, attempt, offset):
            return _Piece(job_id, fence_label, data)
        if (job_id, fence_label) != next(reversed(attempts)):
            _check_is_complete(store, attempt)
    return None


def _attempts(store: ObjectStore, run_id: str) -> dict[tuple[str, str], _Attempt]:
    """Attempts by job and fence label, in order."""
    logs = f"{RunKeys(run_id).logs}/"
    found: dict[tuple[str, str], _Attempt] = {}
    for info in store.list(logs):
        match info.key.removeprefix(logs).split("/"):
            case [job_id, label, "log.jsonl"]:
                found.setdefault((job_id, label), _Attempt(info.key)).whole = info
            case [job_id, label, "parts", _]:
                found.setdefault((job_id, label), _Attempt(f"{logs}{job_id}/{label}/log.jsonl")).parts.append(info)
    return dict(sorted(found.items()))


def _check_is_complete(store: ObjectStore, attempt: _Attempt) -> None:
    """Raise _Stale unless all pieces of a log were listed: they are deleted after the whole log is uploaded."""
    if attempt.whole is None and not attempt.is_complete:
        if store.head(attempt.key) is not None:
            raise _Stale
        attempt.is_complete = True


def _read(store: ObjectStore, attempt: _Attempt, offset: int) -> bytes:
    """Whole lines from an offset on: a few megabytes of the whole log, or the rest of one piece."""
    if attempt.whole is not None:
        return _read_lines(store, attempt.whole, offset)
    for part in attempt.parts:
        if offset < part.size:
            _check_is_complete(store, attempt)
            try:
                return store.get_bytes(part.key)[offset:]
            except NotFound:
                raise _Stale from None
        offset -= part.size
    return b""


def _read_lines(store: ObjectStore, info: ObjectInfo, offset: int) -> bytes:
    length = _READ_BYTES
    while offset < info.size:
        data = store.read_range(info.key, offset, min(length, info.size - offset))
        if whole := data[: data.rfind(b"\n") + 1]:
            return whole
        if offset + length >= info.size:
            break
        length *= 4
    return b""
