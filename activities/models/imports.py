"""Models and adapters that users keep elsewhere, as artifacts, and what a run began with.

Files that every host can read where they lie are not copied.
"""

from typing import Literal

from activities.host_context import HostContext
from activities.sources.models import Location
from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.runs.requests import RunId
from shared.storage.artifacts import (
    FileEntry,
    Manifest,
    files_of,
    find,
    read_record,
    refer,
    remember_checked,
    sha256_object,
    upload_files,
)
from shared.storage.paths import RunKeys, content_key, model_import
from shared.storage.store import LocalStore
from shared.storage.stored_bytes import Room

What = Literal["model", "initial_adapter", "reference"]
_MOST_NAMES = 4
_MODELS = "models"  # in the place of a run: they stay for others


def import_files(location: Location, names: list[str], host: HostContext, tenant: str) -> Artifact:
    """The named files as an artifact, hashed once for each state (size and times, or ETag) that they are found in.

    Where every host can read the files at their place, the artifact refers to them: S3, and folders of this machine
    while the store is on this machine too. A folder of this machine with a store elsewhere is uploaded, and counts as
    this tenant's bytes.

    Raises:
        InvalidInput: a file changed while it was being hashed, or there is no room for them.
    """
    if location.artifact is not None:
        return location.artifact
    store = host.store
    key = model_import(content_key(location.store.uri, *(_state(location, name) for name in sorted(names))))
    found = find(store, key)
    if found is not None:
        return found
    manifest = _hash(location, sorted(names))
    folder = location.store.root if isinstance(location.store, LocalStore) else None
    if folder is not None and not isinstance(store, LocalStore):
        room = Room(store, tenant, host.settings.quotas)
        with room.reserving(manifest.num_bytes, location.store.uri):
            artifact = upload_files(store, key, folder, manifest)
            room.ledger.bring(_MODELS, key.rpartition("/")[2], manifest.num_bytes)
        return artifact
    if folder is not None:
        remember_checked(folder, manifest, host.paths.cache)
    return refer(store, key, manifest.model_copy(update={"root": location.store.uri}))


def _state(location: Location, name: str) -> str:
    info = location.files[name]
    return f"{name} {info.size} {info.etag}"


def _hash(location: Location, names: list[str]) -> Manifest:
    entries = []
    for name in names:
        size = location.files[name].size
        entries.append(FileEntry(path=name, size=size, sha256=sha256_object(location.store, name, size)))
    again = location.listed_again()
    for name in names:
        if name not in again.files or _state(again, name) != _state(location, name):
            raise InvalidInput("the file changed while it was being read", location.place(name))
    return Manifest(files=tuple(entries))


def check_began_with(what: What, found: Artifact, place: str, run_id: RunId, host: HostContext) -> None:
    """Put on record what a run's first execution found at a place, and hold every later execution to it.

    Files are compared by hash. Where they lie does not matter: a cache may have moved.

    Raises:
        InvalidInput: other files are there now; names them.
        CorruptArtifact: the record is damaged.
    """
    key = RunKeys(run_id).began_with(what)
    _, now = files_of(found, host.settings.s3)
    if host.store.put_if_absent(key, now.encoded()):
        return
    if names := _different(read_record(host.store, key, Manifest), now):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise InvalidInput(
            f"this {what.replace('_', ' ')} is not the one that the run began with: {', '.join(names[:_MOST_NAMES])}"
            f"{more} changed since; put the former files back and resume, or start a new run",
            place,
        )


def _different(before: Manifest, now: Manifest) -> list[str]:
    """Names of files that differ, are missing, or are new."""
    theirs, ours = ({entry.path: entry.sha256 for entry in manifest.files} for manifest in (before, now))
    return sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))
