"""The folders of this machine that a stack's users may read: `opened.json` in its root, for its supervisor."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from shared.storage.files import write_atomically


def read(root: Path) -> list[str]:
    found: list[str] = json.loads((root / "opened.json").read_text())
    return found


def write(root: Path, folders: Sequence[str]) -> None:
    write_atomically(root / "opened.json", json.dumps(folders).encode())


def add(root: Path, supervisor: psutil.Process, folders: Sequence[Path]) -> list[str]:
    """Open more folders to a running stack; its web service restarts if one is new. Returns all open folders."""
    known = read(root)
    added = [path for folder in folders if (path := str(folder.resolve())) not in known]
    if added:
        write(root, known + added)
        supervisor.send_signal(signal.SIGUSR1)
    return known + added
