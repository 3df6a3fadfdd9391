"""A folder for one attempt at something."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A new folder below `parent`, gone afterwards."""
    folder = parent / f"{purpose}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
