"""News of sessions' commands on a host, so that nobody has to ask the store again and again.

The web service rings when a command is in the store; the host tells how far results are in the store. Either may be
missed: both sides look by themselves every few seconds, too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int | None], object]
"""Is given the number of the next command without a result; None when nobody attends to the session here any more."""


class Attended:
    """A session whose commands this host passes on. `rung`: is set when there may be something new in the store."""

    def __init__(self, next: int) -> None:
        self.rung = threading.Event()
        self._next = next
        self._lock = threading.Lock()
        self._listeners: list[Tell] = []

    def stored(self, next: int) -> None:
        """Tell that all commands before `next` have their results in the store."""
        with self._lock:
            self._next, listeners = next, list(self._listeners)
        for tell in listeners:
            tell(next)

    def listen(self, tell: Tell) -> Callable[[], None]:
        """Have `tell` called now and at each news. Returns what ends that."""
        with self._lock:
            self._listeners.append(tell)
            tell(self._next)

        def end() -> None:
            with self._lock:
                self._listeners.remove(tell)

        return end

    def leave(self) -> None:
        """Tell that nobody attends to it here any more."""
        with self._lock:
            listeners = list(self._listeners)
        for tell in listeners:
            tell(None)


class Bells:
    """Sessions whose commands this host passes on. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Attended] = {}

    @contextmanager
    def attended(self, run_id: str, next: int) -> Iterator[Attended]:
        """Attend to a session for a `with` block.

        Args:
            next: the number of the next command without a result.
        """
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
