"""The records that a run leaves: its events, and the results of a session's commands."""

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pydantic import ValidationError

from longshore.commands import CommandResult
from longshore.events import RunEvent, parse_event
from longshore.fields import Fence, Frozen
from shared.errors import InvalidInput, NotFound
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectInfo, ObjectStore

# --- Reads a run's events from the store: pieces of the log while a job runs, the whole log afterwards ---
#
# Ordered by job, then fence, then `seq`. A worker that continues from a checkpoint repeats the steps after it under a
# later fence: the last event of a step counts.

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
        job_id, fence_label, data = piece
        for line in data.splitlines(keepends=True)[: None if limit is None else limit - len(found)]:
            try:
                event = parse_event(line)
            except ValidationError:
                if cursor.offset and cursor == given:
                    raise _no_cursor() from None
                raise
            is_same = (job_id, fence_label) == (cursor.job_id, cursor.fence_label)
            offset = (cursor.offset if is_same else 0) + len(line)
            cursor = EventCursor(job_id=job_id, fence_label=fence_label, offset=offset)
            fence = Fence.from_label(fence_label)
            found.append(RunEvent(cursor=str(cursor), job_id=job_id, fence=fence, event=event))
    return found, cursor


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


def _next_piece(
    store: ObjectStore, attempts: dict[tuple[str, str], _Attempt], cursor: EventCursor
) -> tuple[str, str, bytes] | None:
    """Return the job, the fence's label and whole lines of an attempt's log behind a cursor. Raises _Stale."""
    for (job_id, fence_label), attempt in attempts.items():
        if (job_id, fence_label) < (cursor.job_id, cursor.fence_label):
            continue
        offset = cursor.offset if (job_id, fence_label) == (cursor.job_id, cursor.fence_label) else 0
        if data := _read(store, attempt, offset):
            return job_id, fence_label, data
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


# --- The results of a session's commands in the store. Old scores are deleted; the results stay ---

# A session's newest results keep their scores: this many, and this many bytes. That is more than the results of all
# commands that may wait (`MAX_WAITING`), so a client that reads results as they come loses none.
MOST_SCORED, MOST_SCORED_BYTES = 4096, 5 << 30
_SMALL_BYTES = 2048  # smaller results are not rewritten: that saves too little


class SessionResults:
    """Stores the results of a session's commands. Blocking."""

    def __init__(
        self, store: ObjectStore, run_id: str, most: int = MOST_SCORED, most_bytes: int = MOST_SCORED_BYTES
    ) -> None:
        """`most`, `most_bytes`: the newest results that keep their scores."""
        self._store = store
        self._keys = RunKeys(run_id)
        self._most, self._most_bytes = most, most_bytes
        self._scored: deque[tuple[int, int]] | None = None  # numbers and bytes, the oldest first

    def has(self, number: int) -> bool:
        return self._store.head(self._keys.command_result(number)) is not None

    def put(self, number: int, data: bytes) -> None:
        """Store a result, which tells its client that the command is done. Then delete the scores of old ones, if the
        session has too many.
        """
        self._store.put_bytes(self._keys.command_result(number), data)
        if len(data) > _SMALL_BYTES:
            self._bound(number, len(data))

    def _bound(self, number: int, num_bytes: int) -> None:
        if self._scored is None:
            self._scored = deque((int(PurePosixPath(info.key).stem), info.size) for info in self._large())
        else:
            self._scored.append((number, num_bytes))
        while len(self._scored) > self._most or sum(size for _, size in self._scored) > self._most_bytes:
            old, _ = self._scored.popleft()
            self._delete_scores(self._keys.command_result(old))

    def delete_scores(self) -> bool:
        """Delete the scores of all results. The results themselves stay, since they record which commands were done.

        Returns whether there were large results.
        """
        large = self._large()
        for info in large:
            self._delete_scores(info.key)
        return bool(large)

    def _large(self) -> list[ObjectInfo]:
        return [info for info in self._store.list(self._keys.command_result()) if info.size > _SMALL_BYTES]

    def _delete_scores(self, key: str) -> None:
        with suppress(NotFound):
            result = CommandResult.model_validate_json(self._store.get_bytes(key))
            if result.data is not None:
                left = result.model_copy(update={"data": None, "expired": True})
                self._store.put_bytes(key, left.model_dump_json().encode())
