"""Downloads of folders: complete and checked, or absent."""

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.exits import Stop

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from shared.storage.artifacts import FileEntry


@contextmanager
def fetched(target: Path) -> Iterator[Path]:
    """Yield the path of a folder to make next to `target`; it is renamed at the end, or removed after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary / "folder"
        (temporary / "folder").rename(target)
    finally:
        shutil.rmtree(temporary)


def fetch_files(client: "CliClient", path: str, files: str, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch the files that `path/files` lists, each from below it.

    Raises Stop: a file has another hash than in the list. Nothing is left behind.
    """
    from shared.storage.artifacts import FileEntry

    entries = client.get(f"{path}/{files}", tuple[FileEntry, ...])
    with fetched(target) as folder:
        folder.mkdir()
        for entry in entries:
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            client.save(f"{path}/{files}/{entry.path}", folder / entry.path)
        check_files(folder, entries)
    return entries


def fetch_tar(client: "CliClient", path: str, name: str, target: Path) -> "tuple[FileEntry, ...]":
    """Fetch and unpack a tar of one folder `name`, and check it against the manifest in it.

    Raises Stop: a file is missing, or has another hash than in the manifest. Nothing is left behind.
    """
    from shared.storage.artifacts import Manifest
    from shared.storage.paths import MANIFEST

    with fetched(target) as folder:
        try:
            tar = folder.with_name("download.tar")
            client.save(path, tar)
            with tarfile.open(tar) as archive:
                archive.extractall(folder.parent, filter="data")
            (folder.parent / name).rename(folder)
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            check_files(folder, manifest.files)
        except (tarfile.TarError, FileNotFoundError) as error:
            raise Stop(f"the download is incomplete: {error}", advice="try it again") from None
    return manifest.files


def check_files(folder: Path, entries: "tuple[FileEntry, ...]") -> None:
    """Raise Stop if a file has another hash than its entry."""
    from shared.storage.artifacts import sha256_file

    for entry in entries:
        if sha256_file(folder / entry.path) != entry.sha256:
            raise Stop(f"{entry.path}: the SHA-256 is not the manifest's", advice="try the download again")
