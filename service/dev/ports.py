"""Ports of stacks: each of several on one machine keeps its own, even while a server restarts."""

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from service.errors import DevError

# How many ports after the wanted one are tried. (With the default ports, none is one that the kernel assigns itself.)
_NEXT = 100


class Ports:
    """The ports of one supervisor, until it leaves the block or dies.

    A port without a listener may still belong to another stack, whose server was killed and is being restarted. So a
    supervisor also locks its ports: each is a byte of a file that all stacks of a user share. The kernel frees these
    locks when the process ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of the file of locks; the system's folder for temporary files if none is named."""
        path = (folder or Path(tempfile.gettempdir())) / f"longshore-ports-{os.getuid()}"
        self._mine: set[int] = set()
        self._file: int | None = None
        with suppress(OSError):  # another user's file: then only listeners are noticed
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock all ports."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self._mine.clear()

    def take(self, wanted: int) -> int:
        """Lock and return a port of 127.0.0.1: the wanted one, or else the next free one; any free one for 0.

        Raises DevError: every port that was tried is taken.
        """
        nearby = range(wanted, min(wanted + _NEXT, 65536)) if wanted else ()
        for port in (*nearby, *[0] * _NEXT):
            free = _free(port)
            if free is not None and free not in self._mine and self._locked(free):
                self._mine.add(free)
                return free
        raise DevError("no port is free on 127.0.0.1")

    def _locked(self, port: int) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        return True


def _free(port: int) -> int | None:
    """Return the port if nobody listens on it, else None; for 0 return any free port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(listener.getsockname()[1])
