"""What stands in the files of a folder that others write to meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Paths relative to `folder`, and bytes. A file or a folder that goes while it is looked at is passed over."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            try:
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(folder).as_posix(), path.read_bytes()
            except FileNotFoundError:
                continue
