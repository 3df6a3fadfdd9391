"""Making an artifact of files that a user keeps elsewhere, without copying what need not be copied."""

from activities.sources.models import Location
from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.artifacts import FileEntry, Manifest, find, refer, remember_checked, sha256_object, upload_files
from shared.storage.paths import HostPaths, content_key, model_import
from shared.storage.store import LocalStore, open_store
from shared.storage.stored_bytes import Room

_MODELS = "models"  # in the place of a run: they stay for others


def import_files(location: Location, names: list[str], settings: Settings, tenant: str) -> Artifact:
    """The named files as an artifact, hashed once for each state (size and times, or ETag) that they are found in.

    Where every host can read the files at their place, the artifact refers to them: S3, and folders of this machine
    while the store is on this machine too. A folder of this machine with a store elsewhere is uploaded, and counts as
    this tenant's bytes.

    Raises:
        InvalidInput: a file changed while it was being hashed, or there is no room for them.
    """
    if location.artifact is not None:
        return location.artifact
    store = open_store(settings.store, settings.s3)
    key = model_import(content_key(location.store.uri, *(_state(location, name) for name in sorted(names))))
    found = find(store, key)
    if found is not None:
        return found
    manifest = _hash(location, sorted(names))
    folder = location.store.root if isinstance(location.store, LocalStore) else None
    if folder is not None and not isinstance(store, LocalStore):
        room = Room(store, tenant, settings.quotas)
        with room.reserving(manifest.num_bytes, location.store.uri):
            artifact = upload_files(store, key, folder, manifest)
            room.ledger.bring(_MODELS, key.rpartition("/")[2], manifest.num_bytes)
        return artifact
    if folder is not None:
        remember_checked(folder, manifest, HostPaths(settings.root_path).cache)
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
