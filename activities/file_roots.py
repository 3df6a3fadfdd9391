"""Which folders of a control host a user's paths and file:// URIs may lead to."""

import os
from collections.abc import Sequence
from pathlib import Path

from shared.errors import InvalidInput
from shared.paths import tenant_folder
from shared.settings import Settings
from shared.store import LocalStore, open_store


def allowed_roots(settings: Settings, store_folder: str = tenant_folder()) -> list[Path]:
    """The settings' own; and of the store, where it is on this machine, a folder: what tenants have."""
    roots = [root.expanduser().resolve() for root in settings.download.file_roots]
    store = open_store(settings.store, settings.s3)
    if isinstance(store, LocalStore):
        roots.append((store.root / store_folder).resolve())
    return roots


def allowed(path: Path, roots: Sequence[Path], place: str) -> Path:
    """The path without links in it. Raises InvalidInput, whether it exists or not, when it is below none of `roots`."""
    resolved = Path(os.path.realpath(path))
    if not any(resolved.is_relative_to(root) for root in roots):
        raise InvalidInput("files of this machine are open only below the folders of download.file_roots", place)
    return resolved
