"""Notifications of sessions' commands and results on a host, instead of polling the store.

The web service notifies the host of a command in the store; the host announces which results are in the store. Small
commands and results are sent along, so that nobody needs to read them there. Notifications may be lost: both sides also
look into the store every few seconds.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.runs.sessions import MOST_TOLD_BYTES

_MOST_HELD = 64
Tell = Callable[[int | None, bytes | None], object]
"""Takes the number of the next command without a result, or None when this host no longer serves the session; and the
result before that number, if it is small and new."""


class Attended:
    """A session whose commands this host gives to a worker. `rung`: set when the store may have something new."""

    def __init__(self, next: int) -> None:
        self.rung = threading.Event()
        self._next = next
        self._lock = threading.Lock()
        self._listeners: list[Tell] = []
        self._commands: dict[int, bytes] = {}

    def bring(self, number: int, command: bytes) -> None:
        """Take a command that is in the store, unless there are many already."""
        with self._lock:
            if number >= self._next and len(self._commands) < _MOST_HELD:
                self._commands[number] = command

    def command(self, number: int) -> bytes | None:
        """Return a command that was brought, once."""
        with self._lock:
            return self._commands.pop(number, None)

    def stored(self, next: int, result: bytes) -> None:
        """Announce that the store has the results of all commands before `next`; `result` is the last of them."""
        with self._lock:
            self._next, listeners = next, list(self._listeners)
            self._commands = {number: each for number, each in self._commands.items() if number >= next}
        for tell in listeners:
            tell(next, result if len(result) <= MOST_TOLD_BYTES else None)

    def listen(self, tell: Tell) -> Callable[[], None]:
        """Call `tell` now and on each notification. Returns a function that ends this."""
        with self._lock:
            self._listeners.append(tell)
            tell(self._next, None)

        def end() -> None:
            with self._lock:
                self._listeners.remove(tell)

        return end

    def leave(self) -> None:
        """Tell listeners that this host no longer serves the session."""
        with self._lock:
            listeners = list(self._listeners)
        for tell in listeners:
            tell(None, None)


class Bells:
    """Sessions whose commands this host passes on. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Attended] = {}

    @contextmanager
    def attended(self, run_id: str, next: int) -> Iterator[Attended]:
        """Attend to a session for a `with` block. `next`: the number of the next command without a result."""
        session = Attended(next)
        with self._lock:
            self._sessions[run_id] = session
        try:
            yield session
        finally:
            with self._lock:
                if self._sessions.get(run_id) is session:
                    del self._sessions[run_id]
            session.leave()

    def find(self, run_id: str) -> Attended | None:
        """Return a session, if it is attended to here."""
        with self._lock:
            return self._sessions.get(run_id)
