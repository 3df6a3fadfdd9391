"""`dev.json`: addresses and key of the stack of a root. Written by the supervisor, read by the command line."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shared.storage.files import write_atomically

# --- The folders of this machine that a stack's users may read ---
# `opened.json` in its root, for its supervisor.


def read_folders(root: Path) -> list[str]:
    found: list[str] = json.loads((root / "opened.json").read_text())
    return found


def write_folders(root: Path, folders: Sequence[str]) -> None:
    write_atomically(root / "opened.json", json.dumps(folders).encode())


def add_folders(root: Path, supervisor: psutil.Process, folders: Sequence[Path]) -> list[str]:
    """Open more folders to a running stack; its web service restarts if one is new. Returns all open folders."""
    known = read_folders(root)
    added = [path for folder in folders if (path := str(folder.resolve())) not in known]
    if added:
        write_folders(root, known + added)
        supervisor.send_signal(signal.SIGUSR1)
    return known + added


_LINK_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Connection:
    """Addresses and key of a stack, for this user alone. `pid` is its supervisor's; absent while none runs."""

    root: str
    api_url: str
    api_key: str
    temporal_address: str
    temporal_ui: str | None
    pid: int | None = None

    def write(self) -> None:
        """Readable by its owner alone, from its first byte on."""
        previous = os.umask(0o077)
        try:
            write_atomically(_path(Path(self.root)), json.dumps(asdict(self), indent=1).encode() + b"\n")
        finally:
            os.umask(previous)

    def banner(self, link: str | None = None) -> str:
        """Return the lines of a stack that is up. `link`: one that signs a browser in once."""
        lines = [
            f"Longshore is up, its state in {self.root}",
            f"  API, page    {self.api_url}",
            f"  Temporal     {self.temporal_address}",
            f"  Temporal UI  {self.temporal_ui or '(off: `longshore dev --ui`)'}",
            f"  logs         {self.root}/logs",
        ]
        if link:
            lines.insert(2, f"  sign in      {link} (once, within ten minutes; another: `longshore dev --link`)")
        if Path(self.root) != Path("~/.longshore").expanduser().resolve():
            lines.append(f"  elsewhere    export LONGSHORE_ROOT={self.root}")
        return "\n".join(lines)

    def sign_in_link(self) -> str | None:
        """Return a link that signs a browser in once, as the holder of the stack's key; None if none is given."""
        import httpx

        headers = {"authorization": f"Bearer {self.api_key}"}
        try:
            with httpx.Client(headers=headers, timeout=_LINK_PATIENCE_S, trust_env=False) as client:
                answer = client.post(f"{self.api_url}/login/link")
            return f"{self.api_url}{answer.raise_for_status().json()['path']}"
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    @classmethod
    def read(cls, root: Path) -> "Connection | None":
        """Read the file of a root; None if no stack ever ran there, or another user's did."""
        path = _path(root)
        return cls(**json.loads(path.read_bytes())) if os.access(path, os.R_OK) else None


def _path(root: Path) -> Path:
    return root / "dev.json"
