"""Published files, fetched to this machine and delivered elsewhere."""

import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.connection import read_settings
from service.cli.render import USAGE, Stop, say

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from shared.storage.artifacts import FileEntry


# --- Downloads of folders: complete and checked, or absent ---


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


# --- Delivering ---
# Copies files from the service to S3 or the Hugging Face hub, with this machine's credentials, one at a time.
#
# boto3 and huggingface_hub find the credentials themselves. These are never sent to the service, nor passed as process
# arguments.

Put = Callable[[Path, str], object]
"""Takes a file here, and its path at the destination."""


def destination(to: str | None, push: str | None) -> Put | None:
    """Return the function that uploads files to the destination of `--to` or `--push`; None without either.

    Raises Stop: it is none, or there is no token for it.
    """
    with _told():
        if to is not None:
            return _s3(to)
        return None if push is None else _hub(push)


def deliver(client: "CliClient", path: str, put: Put) -> "tuple[FileEntry, ...]":
    """Pass on the files that `path/files` lists, each checked against its hash. One file at a time is on this disk."""
    from shared.storage.artifacts import FileEntry

    entries = client.get(f"{path}/files", tuple[FileEntry, ...])
    for entry in entries:
        with tempfile.TemporaryDirectory(prefix="longshore-export-") as folder:
            file = Path(folder) / entry.path
            file.parent.mkdir(parents=True, exist_ok=True)
            client.save(f"{path}/files/{entry.path}", file)
            check_files(Path(folder), (entry,))
            with _told():
                put(file, entry.path)
        say(f"{entry.path} is there")
    return entries


def _s3(uri: str) -> Put:
    from shared.storage.store import S3Store, open_store

    store = open_store(uri, read_settings().s3)
    if not isinstance(store, S3Store):
        raise Stop(f"--to: {uri} is no s3:// URI; a folder is named with --into", USAGE)
    return lambda file, path: store.put_file(path, file)


def _hub(repository: str) -> Put:
    from huggingface_hub import HfApi, get_token

    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repository, re.ASCII):
        raise Stop("--push: a repository of the hub is ORG/NAME: letters, digits, dots, dashes, underscores", USAGE)
    if (token := get_token()) is None:
        raise Stop("--push: there is no token for the hub", USAGE, "set HF_TOKEN, or sign in with `hf auth login`")
    api = HfApi(token=token)
    api.create_repo(repository, private=True, exist_ok=True)
    return lambda file, path: api.upload_file(path_or_fileobj=file, path_in_repo=path, repo_id=repository)


@contextmanager
def _told() -> Iterator[None]:
    """Raise the errors of S3 and of the hub as Stop, without the content of their requests."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    from shared.errors import LongshoreError

    try:
        yield
    except LongshoreError as error:
        raise Stop(f"--to: {error}") from None
    except HfHubHTTPError as error:
        problem = f"the hub answers {error.response.status_code} to {error.response.url.path}"
        raise Stop(f"--push: {problem}") from None
    except (HTTPError, ValueError) as error:
        raise Stop(f"--push: {type(error).__name__} from the hub's library") from None
