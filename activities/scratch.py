"""A folder for one attempt at something."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW_S = 10.0  # between its making and its lock, a folder looks abandoned


@contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A new folder below `parent`, gone afterwards, and so are those whose processes were killed."""
    _remove_abandoned(parent, purpose)
    folder = parent / f"{purpose}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, purpose: str) -> None:
    for folder in parent.glob(f"{purpose}-*"):
        with suppress(BlockingIOError, FileNotFoundError):  # in use, or just gone
            if folder.stat().st_mtime < time.time() - _NEW_S:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The kernel lets go of the lock when the process dies. Raises BlockingIOError while another holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
