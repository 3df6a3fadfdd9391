"""Find the files of a model or an adapter: in a folder here, an S3 prefix, the Hugging Face hub, or our own store."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from activities.sources.hub_snapshot import HubId, snapshot
from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.settings import Settings
from shared.storage.artifacts import files_of, find
from shared.storage.places import Places, UserFolder
from shared.storage.store import LocalStore, ObjectInfo, ObjectStore, S3Store, open_store, open_uri

# A tokenizer of a quarter of a million tokens has 35 MB; nothing else that is read whole comes near.
_MAX_CONFIG_BYTES = 4 << 20
_MAX_BYTES = {"tokenizer.json": 128 << 20, "model.safetensors.index.json": 16 << 20}
_MAX_FILES = 10_000
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
        """Raises InvalidInput when the file is missing, larger than such files are, or no JSON object."""
        return json_object(self.read_whole(name), self.place(name))

    def read_whole(self, name: str) -> bytes:
        """Raises InvalidInput when the file is missing, or larger than such files are."""
        if name not in self.files:
            raise InvalidInput(f"the folder has no {name}", self.store.uri)
        most = max_bytes_of(name)
        data = self.store.read_range(name, 0, most + 1)
        if len(data) > most:
            raise InvalidInput(f"too large: more than {most:,} bytes", self.place(name))
        return data

    def listed_again(self) -> "Location":
        return Location(self.store, _listed(self.store, self.files))


def json_object(data: bytes | str, place: str) -> dict[str, Any]:
    """Raises InvalidInput for anything else."""
    try:
        return _object.validate_json(data)
    except ValidationError as error:
        raise InvalidInput(f"not valid: {first_rule(error)}", place) from error


def max_bytes_of(name: str) -> int:
    """The largest size of a file of this name that is read whole."""
    return _MAX_BYTES.get(name, _MAX_CONFIG_BYTES)


Check = Callable[[Location], object]


def locate(uri: str, tenant: str, settings: Settings, patterns: tuple[str, ...], check: Check) -> Location:
    """Find the files of a model or an adapter that this tenant may read.

    Args:
        uri: an absolute path, `file://`, `s3://`, or a hub id such as `org/name` or `org/name@revision`.
        patterns: which files are read, and fetched from the hub.
        check: what can be said against it before its weights are fetched, by its small files.

    Raises:
        InvalidInput: nothing is there, it is not this tenant's to read, or the hub cannot be reached.
    """
    places = Places(settings)
    if uri.startswith("/"):
        return _in_folder(Path(uri), tenant, places, settings, patterns)
    if uri.startswith(("file://", "s3://")):
        store, key = open_uri(uri, settings.s3)
        if not isinstance(store, S3Store):
            return _in_folder(Path("/") / key, tenant, places, settings, patterns)
        places.check_object(tenant, store, key, uri)
        return _in_store(open_store(uri, settings.s3), tenant, places, settings)
    if (hub_id := HubId.parse(uri)) is not None:
        small = tuple(pattern for pattern in patterns if not pattern.endswith(".safetensors"))
        check(_of_user(snapshot(hub_id, small, settings.download.max_bytes), patterns))
        return _of_user(snapshot(hub_id, patterns, settings.download.max_bytes), patterns)
    raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", uri)


def _in_folder(path: Path, tenant: str, places: Places, settings: Settings, patterns: tuple[str, ...]) -> Location:
    """A folder of this machine, without links in it, so that one folder has one name."""
    real = places.check_file(tenant, path, str(path))
    if places.own_key(LocalStore(real).uri) is not None:
        return _in_store(LocalStore(real), tenant, places, settings)
    if not real.is_dir():
        raise InvalidInput("there is no such folder", str(path))
    return _of_user(UserFolder(real), patterns)


def _of_user(folder: UserFolder, patterns: tuple[str, ...]) -> Location:
    with os.scandir(folder.root) as scan:
        names = [entry.name for entry in islice(scan, _MAX_FILES) if not entry.is_dir()]
    for name in names:
        if any(fnmatch(name, pattern) for pattern in patterns) and not folder.holds(name):
            raise InvalidInput("this is a link that leads out of its folder", f"{folder.uri}/{name}")
    files = _listed(folder, [name for name in names if folder.holds(name)])
    if not files:
        raise InvalidInput("there is no such folder, or it is empty", str(folder.root))
    return Location(folder, files)


def _in_store(store: ObjectStore, tenant: str, places: Places, settings: Settings) -> Location:
    """An artifact of our own store, or the objects below a user's prefix of S3."""
    key = places.own_key(store.uri)
    if key is None:
        files = {info.key: info for info in islice(store.list(""), _MAX_FILES) if "/" not in info.key}
        if not files:
            raise InvalidInput("there is no such folder, or it is empty", store.uri)
        return Location(store, files)
    artifact = find(open_store(settings.store, settings.s3), key) if places.holds_artifact(tenant, key) else None
    if artifact is None:
        raise InvalidInput("this is in Longshore's own store, but nothing was completed there", store.uri)
    files_at, manifest = files_of(artifact, settings.s3)
    places.check_root(tenant, key, manifest, store.uri)
    return Location(files_at, _listed(files_at, [entry.path for entry in manifest.files]), artifact)


def _listed(store: ObjectStore, names: Iterable[str]) -> dict[str, ObjectInfo]:
    found = {name: store.head(name) for name in names}
    return {name: info for name, info in found.items() if info is not None}
