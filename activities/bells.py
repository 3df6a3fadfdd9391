"""News of sessions' commands on a host, so that nobody has to ask the store again and again.

The web service rings when a command is in the store; the host tells how far results are in the store. Either may be
missed: both sides look by themselves every few seconds, too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int | None], object]
"""Is given the number of the next command without a result; None when nobody attends to the session here any more."""


class _Session:
    def __init__(self, next: int) -> None:
        self.next = next
        self.rung = threading.Event()
        self.listeners: list[Tell] = []


class Bells:
    """Sessions whose commands this host passes on. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    @contextmanager
    def attended(self, run_id: str, next: int) -> Iterator[threading.Event]:
        """Attend to a session for a `with` block; yields an event that is set by `ring`.

        Args:
            next: the number of the next command without a result.
        """
        session = _Session(next)
        with self._lock:
            self._sessions[run_id] = session
        try:
            yield session.rung
        finally:
            with self._lock:
                if self._sessions.get(run_id) is session:
                    del self._sessions[run_id]
                listeners = list(session.listeners)
            for tell in listeners:
                tell(None)

    def ring(self, run_id: str) -> bool:
        """Say that there is something new for a session in the store. Returns False if it is not attended to here."""
        with self._lock:
            session = self._sessions.get(run_id)
        if session is not None:
            session.rung.set()
        return session is not None

    def stored(self, run_id: str, next: int) -> None:
        """Tell that all commands before `next` have their results in the store."""
        with self._lock:
            session = self._sessions[run_id]
            session.next, listeners = next, list(session.listeners)
        for tell in listeners:
            tell(next)

    def listen(self, run_id: str, tell: Tell) -> Callable[[], None] | None:
        """Have `tell` called now and at each news. Returns what ends that; None if nobody attends to the session."""
        with self._lock:
            if (session := self._sessions.get(run_id)) is None:
                return None
            session.listeners.append(tell)
            tell(session.next)

        def end() -> None:
            with self._lock:
                session.listeners.remove(tell)

        return end
