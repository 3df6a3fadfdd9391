"""Where a model's or an adapter's files are: a folder here, an S3 prefix, the Hugging Face hub, or our own store."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from activities.file_roots import allowed, allowed_roots
from shared.artifacts import files_of, find
from shared.errors import InvalidInput
from shared.jobs import Artifact
from shared.paths import tenant_folder
from shared.settings import Settings
from shared.store import LocalStore, ObjectInfo, ObjectStore, open_store

_HUB_ID = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_MAX_JSON_BYTES = 256 << 20
_OUR_FOLDERS = ("runs/", f"{tenant_folder()}")
_object: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class Location:
    """A folder of files in some store, by name. `artifact`: what it is already, if it lies in our own store."""

    store: ObjectStore
    files: dict[str, ObjectInfo]
    artifact: Artifact | None = None

    def place(self, name: str) -> str:
        return f"{self.store.uri}/{name}"

    def read_json(self, name: str) -> dict[str, Any]:
        """Raises InvalidInput when the file is missing or is no JSON object."""
        if name not in self.files:
            raise InvalidInput(f"the folder has no {name}", self.store.uri)
        if self.files[name].size > _MAX_JSON_BYTES:
            raise InvalidInput(f"too large: {self.files[name].size:,} bytes", self.place(name))
        try:
            return _object.validate_json(self.store.get_bytes(name))
        except ValidationError as error:
            raise InvalidInput(f"not valid: {error.errors()[0]['msg']}", self.place(name)) from error

    def listed_again(self) -> "Location":
        return Location(self.store, _listed(self.store, self.files))


def locate(uri: str, settings: Settings, patterns: tuple[str, ...]) -> Location:
    """Find the files of a model or an adapter.

    Args:
        uri: an absolute path, `file://`, `s3://`, or a hub id such as `org/name` or `org/name@revision`.
        patterns: which files to fetch from the hub.

    Raises:
        InvalidInput: nothing is there, it may not be named (download.file_roots), or the hub cannot be reached.
    """
    store = _store_of(uri, settings, patterns)
    own = _own(store.uri, settings)
    if own is not None:
        return own
    files = {info.key: info for info in store.list("") if "/" not in info.key}
    if not files:
        raise InvalidInput("there is no such folder, or it is empty", uri)
    return Location(store, files)


def _store_of(uri: str, settings: Settings, patterns: tuple[str, ...]) -> ObjectStore:
    if uri.startswith("/"):
        return _folder(Path(uri), settings)
    if uri.startswith(("file://", "s3://")):
        store = open_store(uri, settings.s3)
        return _folder(store.root, settings) if isinstance(store, LocalStore) else store
    if match := _HUB_ID.fullmatch(uri):
        return LocalStore(_from_hub(match["repository"], match["revision"], patterns))
    raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", uri)


def _folder(path: Path, settings: Settings) -> LocalStore:
    """Without links in it, so that one folder has one name. Who may name what of our own store, the service checks."""
    resolved = allowed(path, allowed_roots(settings, store_folder=""), str(path))
    if not resolved.is_dir():
        raise InvalidInput("there is no such folder", str(path))
    return LocalStore(resolved)


def _own(uri: str, settings: Settings) -> Location | None:
    """An artifact of our own store. Which of them a tenant may name, the service has checked."""
    ours = open_store(settings.store, settings.s3)
    if not uri.startswith(f"{ours.uri}/"):
        return None
    key = unquote(uri.removeprefix(f"{ours.uri}/"))
    artifact = find(ours, key)
    if artifact is None and key.startswith(_OUR_FOLDERS):
        raise InvalidInput("this is in Longshore's own store, but nothing was completed there", uri)
    if artifact is None:
        return None
    store, manifest = files_of(artifact, settings.s3)
    return Location(store, _listed(store, [entry.path for entry in manifest.files]), artifact)


def _listed(store: ObjectStore, names: Iterable[str]) -> dict[str, ObjectInfo]:
    found = {name: store.head(name) for name in names}
    return {name: info for name, info in found.items() if info is not None}


def _from_hub(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """A snapshot in the hub's own cache. Data only: no code of a repository is fetched, let alone run."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    place = f"hub id {repository}" + (f"@{revision}" if revision else "")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns), etag_timeout=10))
    except GatedRepoError as error:
        raise InvalidInput("its owner has not granted access to this host's token", place) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InvalidInput("there is no such repository or revision, or it is private", place) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        # LocalEntryNotFoundError and OfflineModeIsEnabled are OSErrors; the library has tried more than once by now
        raise InvalidInput(
            f"the hub cannot be reached from this host ({type(error).__name__}): "
            "give a folder or an s3:// URI, or bring it into the hub's cache first",
            place,
        ) from error
