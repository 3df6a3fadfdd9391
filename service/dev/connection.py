"""`dev.json`: how to reach the stack of a root. Written by the supervisor, read by the command line."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.storage.paths import write_atomically


@dataclass(frozen=True)
class Connection:
    """How to reach the stack, for this user alone. `pid` is the supervisor that serves it; absent while none does."""

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

    @classmethod
    def read(cls, root: Path) -> "Connection | None":
        """None where no stack ever ran, or another user's did."""
        path = _path(root)
        return cls(**json.loads(path.read_bytes())) if os.access(path, os.R_OK) else None


def _path(root: Path) -> Path:
    return root / "dev.json"
