"""Find the files of a model or an adapter: in a folder here, an S3 prefix, the Hugging Face hub, or our own store.

From the hub only data files are fetched, no code of a repository. Hub ids come from tenants, and the library makes
paths of them: so ids and revisions may only have allowed characters, and the folder that the library returns is checked
to be in the cache.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from activities.heartbeats import cancellation_check, in_parallel
from longshore.fields import Artifact
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.settings import Settings
from shared.storage.artifacts import Manifest, find_artifact, open_artifact
from shared.storage.places import OpenPlaces, UserFolder
from shared.storage.store import LocalStore, ObjectInfo, ObjectStore, S3Store, open_store, open_uri

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
# Branches, tags, refs such as refs/pr/1, and commits. No part is empty or begins with a dot.
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,3}"
_HUB_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(@(?P<revision>{_REVISION}))?")
_SMALL_BYTES = 128 << 20
# Limits of files that are read into memory. A tokenizer.json of a quarter of a million tokens has 35 MB.
_MAX_CONFIG_BYTES = 4 << 20
_MAX_BYTES = {"tokenizer.json": 128 << 20, "model.safetensors.index.json": 16 << 20}
_MAX_FILES = 10_000
_object: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class HubId:
    """`org/name`, or `org/name@revision`."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """Parse a hub id; None if it is not one."""
        match = _HUB_ID.fullmatch(text)
        if match is None or ".." in text or "--" in match["repository"]:
            return None
        return cls(match["repository"], match["revision"])

    @property
    def place(self) -> str:
        return f"hub id {self.repository}" + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> str:
        """The name of the repository's folder in the hub's cache."""
        return f"models--{self.repository.replace('/', '--')}"


def snapshot(hub_id: HubId, patterns: tuple[str, ...], max_bytes: int) -> UserFolder:
    """Return the folder of a revision's files of these patterns. Files that are not in the cache are downloaded.

    Raises InvalidInput: there is no such revision, it may not be read, it is larger than `max_bytes`; or the hub cannot
    be reached and the cache does not have it.
    """
    from httpx import TransportError
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import DryRunError, OfflineModeIsEnabled

    try:
        listed = _asked(hub_id, max_bytes, revision=hub_id.revision, allow_patterns=list(patterns), dry_run=True)
    except (DryRunError, OfflineModeIsEnabled, TransportError) as error:
        found = _cached(hub_id, patterns, error)
    else:
        for file in listed:
            if not file.filename.endswith(".safetensors") and (file.file_size or 0) > _SMALL_BYTES:
                rule = f"{file.filename} has {file.file_size:,} bytes: more than such a file has"
                raise InvalidInput(rule, hub_id.place)
        missing = sum(file.file_size or 0 for file in listed if file.will_download)
        if missing > max_bytes:
            rule = f"{missing:,} bytes to transfer; the limit is {max_bytes:,}: download.max_bytes"
            raise InvalidInput(rule, hub_id.place)
        commit = listed[0].commit_hash if listed else hub_id.revision
        found = _asked(hub_id, max_bytes, revision=commit, allow_patterns=list(patterns))
    repository = (Path(HF_HUB_CACHE).expanduser() / hub_id.folder).resolve()
    folder = Path(found).resolve()
    if folder.parent != repository / "snapshots":
        raise InvalidInput("the hub's cache has no such revision", hub_id.place)
    return UserFolder(folder, repository)


def _cached(hub_id: HubId, patterns: tuple[str, ...], away: Exception) -> str:
    """Return a snapshot from the cache, when the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            hub_id.repository, revision=hub_id.revision, allow_patterns=list(patterns), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise _refusal(away.__cause__ or error, hub_id.place) from error


def _asked(hub_id: HubId, max_bytes: int, **options: Any) -> Any:
    """Download a snapshot. Raises InvalidInput; in a dry run, errors of an unreachable hub are left to the caller."""
    from httpx import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        options |= {"etag_timeout": 10, "tqdm_class": _counting(max_bytes)}
        # On another thread: while no bytes come, nothing there looks for a cancellation.
        [found] = in_parallel(lambda asked: snapshot_download(hub_id.repository, **asked), [options], 1)
        return found
    except (DryRunError, OfflineModeIsEnabled, TransportError) as error:
        if options.get("dry_run"):
            raise
        raise _refusal(error, hub_id.place) from error
    except _TooLarge as error:
        rule = f"more than {max_bytes:,} bytes came; the limit is download.max_bytes"
        raise InvalidInput(rule, hub_id.place) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _refusal(error, hub_id.place) from error


def _refusal(error: BaseException, place: str) -> InvalidInput:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            return InvalidInput("its owner has not granted access to this host's token", place)
        case RepositoryNotFoundError() | RevisionNotFoundError():
            return InvalidInput("there is no such repository or revision, or it is private", place)
        case _:
            # LocalEntryNotFoundError and OfflineModeIsEnabled are OSErrors; the library has tried more than once by now
            return InvalidInput(
                f"the hub cannot be reached from this host ({type(error).__name__}): "
                "give a folder or an s3:// URI, or bring it into the hub's cache first",
                place,
            )


class _TooLarge(Exception):
    """More bytes arrived than the limit."""


def _counting(max_bytes: int) -> type:
    """Return a class of invisible progress bars that raise _TooLarge or CancelledError to end a download."""
    from huggingface_hub.utils import tqdm

    check = cancellation_check()

    class Counting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            self._num_bytes = 0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            check()
            self._num_bytes += int(n or 0) if self._counts_bytes else 0
            if self._num_bytes > max_bytes:
                raise _TooLarge
            shown: bool | None = super().update(n)
            return shown

    return Counting


@dataclass(frozen=True)
class Location:
    """A folder in some store, and its files by name. `artifact`: the artifact that it is, if it is in our own store."""

    store: ObjectStore
    files: dict[str, ObjectInfo]
    artifact: Artifact | None = None

    def place(self, name: str) -> str:
        return f"{self.store.uri}/{name}"

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file. Raises InvalidInput when it is missing, larger than such files are, or no JSON object."""
        return json_object(self.read_whole(name), self.place(name))

    def read_whole(self, name: str) -> bytes:
        """Read a small file. Raises InvalidInput when it is missing, or larger than such files are."""
        if name not in self.files:
            raise InvalidInput(f"the folder has no {name}", self.store.uri)
        most = _MAX_BYTES.get(name, _MAX_CONFIG_BYTES)
        data = self.store.read_range(name, 0, most + 1)
        if len(data) > most:
            raise InvalidInput(f"too large: more than {most:,} bytes", self.place(name))
        return data

    def listed_again(self) -> "Location":
        return Location(self.store, _listed(self.store, self.files))


def json_object(data: bytes | str, place: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidInput, which names `place`, for anything else."""
    try:
        return _object.validate_json(data)
    except ValidationError as error:
        raise InvalidInput(f"not valid: {first_rule(error)}", place) from error


Check = Callable[[Location], object]


def locate(uri: str, tenant: str, settings: Settings, patterns: tuple[str, ...], check: Check) -> Location:
    """Find the files of a model or an adapter that this tenant may read.

    Args:
        uri: an absolute path, `file://`, `s3://`, or a hub id such as `org/name` or `org/name@revision`.
        patterns: which files are read, and fetched from the hub; of files in folders of it the whole paths.
        check: called with the small files before the weights are fetched; raises if they are unusable.

    Raises:
        InvalidInput: nothing is there, it is not this tenant's to read, or the hub cannot be reached.
    """
    places = OpenPlaces(settings)
    if uri.startswith("/"):
        return _in_folder(Path(uri), tenant, places, settings, patterns)
    if uri.startswith(("file://", "s3://")):
        store, key = open_uri(uri, settings.s3)
        if not isinstance(store, S3Store):
            return _in_folder(Path("/") / key, tenant, places, settings, patterns)
        places.check_object(tenant, store, key, uri)
        return _in_store(open_store(uri, settings.s3), tenant, places, settings, patterns)
    if (hub_id := HubId.parse(uri)) is not None:
        small = tuple(pattern for pattern in patterns if not pattern.endswith(".safetensors"))
        check(_of_user(snapshot(hub_id, small, settings.download.max_bytes), patterns))
        return _of_user(snapshot(hub_id, patterns, settings.download.max_bytes), patterns)
    raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", uri)


def _in_folder(path: Path, tenant: str, places: OpenPlaces, settings: Settings, patterns: tuple[str, ...]) -> Location:
    """Locate the files of a folder of this machine. Links in the path are resolved, so that a folder has one name."""
    real = places.check_file(tenant, path, str(path))
    if places.own_key(LocalStore(real).uri) is not None:
        return _in_store(LocalStore(real), tenant, places, settings, patterns)
    if not real.is_dir():
        raise InvalidInput("there is no such folder", str(path))
    return _of_user(UserFolder(real), patterns)


def _of_user(folder: UserFolder, patterns: tuple[str, ...]) -> Location:
    with os.scandir(folder.root) as scan:
        names = [entry.name for entry in islice(scan, _MAX_FILES) if not entry.is_dir()]
    names += [pattern for pattern in patterns if "/" in pattern and (folder.root / pattern).is_file()]
    for name in names:
        if any(fnmatch(name, pattern) for pattern in patterns) and not folder.holds(name):
            raise InvalidInput("this is a link that leads out of its folder", f"{folder.uri}/{name}")
    files = _listed(folder, [name for name in names if folder.holds(name)])
    if not files:
        raise InvalidInput("there is no such folder, or it is empty", str(folder.root))
    return Location(folder, files)


def _in_store(
    store: ObjectStore, tenant: str, places: OpenPlaces, settings: Settings, patterns: tuple[str, ...]
) -> Location:
    """An artifact of our own store, or the objects below a user's prefix of S3."""
    key = places.own_key(store.uri)
    if key is None:
        found = islice(store.list(""), _MAX_FILES)
        files = {info.key: info for info in found if "/" not in info.key or info.key in patterns}
        if not files:
            raise InvalidInput("there is no such folder, or it is empty", store.uri)
        return Location(store, files)
    artifact = (
        find_artifact(open_store(settings.store, settings.s3), key) if places.holds_artifact(tenant, key) else None
    )
    if artifact is None:
        raise InvalidInput("this is in Longshore's own store, but nothing was completed there", store.uri)
    files_at, manifest = open_artifact(artifact, settings.s3)
    places.check_root(tenant, key, manifest, store.uri)
    return located(files_at, manifest, artifact)


def located(store: ObjectStore, manifest: Manifest, artifact: Artifact | None = None) -> Location:
    """Return the files of a manifest, as they are in a store."""
    return Location(store, _listed(store, [entry.path for entry in manifest.files]), artifact)


def _listed(store: ObjectStore, names: Iterable[str]) -> dict[str, ObjectInfo]:
    found = {name: store.head(name) for name in names}
    return {name: info for name, info in found.items() if info is not None}
