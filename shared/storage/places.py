"""The rule on the files that a tenant may read, applied to every path, URI, link and manifest.

In the installation's store a tenant may read `tenants/<tenant>/` only. On this machine it may read files below
`download.file_roots`; within the installation's root only below a file root that itself lies in that root, and never in
the folders of the service and the hosts. Links are resolved before a path is judged.
"""

import hashlib
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from longshore.fields import Frozen
from shared.errors import InvalidInput, NotFound
from shared.settings import Settings
from shared.storage.artifacts import Manifest
from shared.storage.paths import HostPaths, RunKeys, checkpoint_adapter_run, is_published, query_record, tenant_folder
from shared.storage.store import LocalStore, ObjectStore, S3Store, open_store, open_uri, uri_of

# --- Uri queries ---
# Keeps the query strings of users' http(s) URIs secret, since presigned signatures and tokens are in them.
#
# A query is stored in one record. Run records, Temporal, the database, schedules and W&B only hold
# `https://host/path?longshore-query=ID`. The activity that downloads the file reads the query from the store.

_NAME = "longshore-query="
_LONGEST = 2048
_FIELDS = ("uri", "groups", "training_file", "validation_file")
F = TypeVar("F", bound=Frozen)


def without_queries(request: F) -> tuple[F, Mapping[str, bytes]]:
    """Return a request with each URI's query replaced by an id, and the records of the queries by their ids.

    The records are to be put at `query_record`.

    Raises InvalidInput: a URI would be too long.
    """
    records: dict[str, bytes] = {}
    changed: F = _cut(records, request, "")
    return changed, records


def _cut(records: dict[str, bytes], value: Any, name: str) -> Any:
    match value:
        case str() if name in _FIELDS:
            return _named(records, value, name)
        case Frozen():
            found = {field: getattr(value, field) for field in type(value).model_fields}
            changes = {field: new for field, old in found.items() if (new := _cut(records, old, field)) is not old}
            return value.model_copy(update=changes) if changes else value
        case dict():
            cut = {key: _cut(records, old, str(key)) for key, old in value.items()}
            return cut if any(cut[key] is not value[key] for key in value) else value
        case tuple() | list():
            items = [_cut(records, item, name) for item in value]
            return type(value)(items) if any(map(operator.is_not, items, value)) else value
        case _:
            return value


def _named(records: dict[str, bytes], uri: str, place: str) -> str:
    """Replace a URI's query by an id: a hash of the whole URI, so only whoever knows the URI can name it."""
    if "?" not in uri:
        return uri
    try:
        scheme = urlsplit(uri).scheme.lower()
    except ValueError as error:
        raise InvalidInput("this is no URI", place) from error
    if scheme not in ("http", "https"):
        return uri
    address, _, query = uri.partition("?")
    if query.startswith(_NAME):
        return uri
    query_id = hashlib.sha256(uri.encode(errors="replace")).hexdigest()[:32]
    named = f"{address}?{_NAME}{query_id}"
    if len(named) > _LONGEST:
        raise InvalidInput(f"a URI with a query has at most {_LONGEST - len(named) + len(address)} characters", place)
    records[query_id] = uri.encode(errors="replace")
    return named


def with_query(store: ObjectStore, uri: str) -> str:
    """The URI that a user sent. A query is only ever sent to the address that it came with.

    Raises InvalidInput: it is not on record.
    """
    address, _, query = uri.partition("?")
    if not query.startswith(_NAME):
        return uri
    try:
        kept = store.get_bytes(query_record(query.removeprefix(_NAME))).decode()
    except (NotFound, ValueError):
        kept = ""
    if kept.partition("?")[0] != address:
        parts = urlsplit(uri)
        raise InvalidInput("this URI's query is not known here: give it again", f"{parts.scheme}://{parts.netloc}")
    return kept


_PLACES_LONGEST = 4096
_NOT_OPEN = (
    "files of this machine are open only below the folders that its operator names, with `longshore dev --open DIR` "
    "or as download.file_roots; `longshore files upload PATH` brings a file to the service instead"
)
_NOT_YOURS = "this leads into the service's own store, and to nothing of yours"
# Never data, even if a file root includes it: a process's environment, devices that never end.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")
_ALIASES = ("-s3alias", "--ol-s3", ".mrap")
_NEVER = tuple(map(Path, ("/proc", "/sys", "/dev")))


class OpenPlaces:
    """Checks whether a tenant may read a path or URI, by the rule above. Blocking: paths are resolved."""

    def __init__(self, settings: Settings, store: ObjectStore | None = None) -> None:
        self._s3 = settings.s3
        self._store = open_store(settings.store, settings.s3) if store is None else store
        self._roots = [root.expanduser().resolve() for root in settings.download.file_roots]
        self._store_root = self._store.root.resolve() if isinstance(self._store, LocalStore) else None
        self._root = settings.root_path
        self._own_folders = [folder.resolve() for folder in _own_folders(self._root)]
        # Only file roots strictly within the root count: otherwise everything that the service writes there were open.
        self._opened = [root for root in self._roots if self._root in root.parents]

    def check_named(self, tenant: str, text: str, place: str) -> None:
        """Check a path or URI of a request, before any host opens it.

        Raises InvalidInput: it leads to files of the installation or of another tenant, whether they exist or not.
        """
        if text[:5].lower() == "s3://":
            with suppress(ValueError):  # validation of its field reports the error
                parts = urlsplit(text)
                _check_object_name(parts.netloc, unquote(parts.path).lstrip("/"), place)
        key = self._key_of(text)
        if key is not None and not _is_of(tenant, key):
            raise InvalidInput(_NOT_YOURS, place)

    def check_file(self, tenant: str, path: Path, place: str) -> Path:
        """Check a path and return it with all links resolved.

        Raises InvalidInput: the tenant may not read there, whether it exists or not.
        """
        real = Path(os.path.realpath(path))
        key = self._file_key(real, with_parents=False)
        if key is not None:
            if not _is_of(tenant, key):
                raise InvalidInput(_NOT_YOURS, place)
        elif not any(map(real.is_relative_to, self._roots)) or any(map(real.is_relative_to, _NEVER)):
            raise InvalidInput(_NOT_OPEN, place)
        return real

    def check_object(self, tenant: str, store: S3Store, key: str, place: str) -> None:
        """Raise InvalidInput if an S3 object or prefix is in the installation's store, outside this tenant's part."""
        _check_object_name(store.bucket, key, place)
        ours = self._object_key(store, key)
        if ours is not None and not _is_of(tenant, ours):
            raise InvalidInput(_NOT_YOURS, place)

    def own_key(self, uri: str) -> str | None:
        """Return the key that a URI has in the installation's store; None if it lies elsewhere."""
        store, key = open_uri(uri, self._s3)
        if isinstance(store, S3Store):
            return self._object_key(store, key) or None
        return self._store_key(Path(os.path.realpath(Path("/") / key)))

    def holds_artifact(self, tenant: str, key: str) -> bool:
        """Return True if a manifest below this key must be Longshore's own, as users cannot upload there."""
        return is_published(tenant, key) or checkpoint_adapter_run(tenant, key) is not None

    def check_root(self, tenant: str, key: str, manifest: Manifest, place: str) -> None:
        """Raise InvalidInput for a wrong `root` in a manifest of Longshore's own.

        The manifest of a checkpoint's adapter leads to the checkpoints of its run; a published one has no root.
        """
        run_id = checkpoint_adapter_run(tenant, key)
        if run_id is None:
            is_right = manifest.root is None
        else:
            checkpoints = f"{uri_of(self._store, RunKeys(run_id).checkpoints)}/"
            is_right = manifest.root is not None and manifest.root.startswith(checkpoints) and ".." not in manifest.root
        if not is_right:
            raise InvalidInput(_NOT_YOURS, place)

    def _key_of(self, text: str) -> str | None:
        """Return the key in the installation's store that a path or URI names; None if none, "" if more than one."""
        if text.startswith("/") and len(text) <= _PLACES_LONGEST and "\0" not in text:
            return self._real_key(Path(text), with_parents=False)  # a folder that only contains the store is not read
        try:
            if urlsplit(text).scheme not in ("file", "s3"):
                return None
            store, key = open_uri(text, self._s3)
        except (InvalidInput, ValueError):
            return None  # validation of its field reports the error
        if isinstance(store, S3Store):
            return self._object_key(store, key)
        return self._real_key(Path("/") / key, with_parents=True)

    def _real_key(self, path: Path, with_parents: bool) -> str | None:
        try:
            return self._file_key(path.resolve(), with_parents)
        except (OSError, RuntimeError, ValueError):
            return None

    def _file_key(self, real: Path, with_parents: bool) -> str | None:
        key = self._store_key(real)
        if key is not None:
            return key
        own = [self._root, *self._own_folders, *([self._store_root] if self._store_root else [])]
        if with_parents and any(folder.is_relative_to(real) for folder in own):
            return ""
        is_own = real == self._store_root or any(map(real.is_relative_to, self._own_folders))
        is_opened = any(map(real.is_relative_to, self._opened))
        return "" if is_own or (real.is_relative_to(self._root) and not is_opened) else None

    def _store_key(self, real: Path) -> str | None:
        root = self._store_root
        is_inside = root is not None and real != root and real.is_relative_to(root)
        return real.relative_to(root).as_posix() if root is not None and is_inside else None

    def _object_key(self, store: S3Store, key: str) -> str | None:
        ours = self._store
        if not isinstance(ours, S3Store) or store.bucket.lower() != ours.bucket.lower():
            return None
        full = f"{store.prefix}{key}"
        folder = f"{full.rstrip('/')}/" if full else ""
        if folder.startswith(ours.prefix):
            return full.removeprefix(ours.prefix)
        return "" if ours.prefix.startswith(folder) else None  # a prefix that contains the whole store


class UserFolder(LocalStore):
    """A folder that a user named. Links out of `bounds` are not followed, even if one is made while it is read.

    `bounds` is the folder itself or, for a snapshot in the Hugging Face cache, the folder of its repository.
    """

    def __init__(self, real: Path, bounds: Path | None = None) -> None:
        super().__init__(real)
        # Files of a Hugging Face snapshot link to blobs of their repository.
        is_snapshot = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
        self._bounds = bounds or (real.parent.parent if is_snapshot else real)

    def holds(self, name: str) -> bool:
        """Return True if a name, with links resolved, lies within `bounds`."""
        return Path(os.path.realpath(self.root / name)).is_relative_to(self._bounds)

    def _open(self, key: str) -> BinaryIO:
        file = super()._open(key)
        if not path_of(file).is_relative_to(self._bounds):
            file.close()
            raise NotFound(f"{key} of {self.uri} is a link that leads elsewhere")
        return file


def path_of(file: BinaryIO) -> Path:
    """Return the real path of an open file, even if its name links elsewhere by now."""
    held = Path(f"/proc/self/fd/{file.fileno()}")
    return held.readlink() if held.is_symlink() else Path(os.path.realpath(file.name))


def _own_folders(root: Path) -> list[Path]:
    """Return the folders of the service and the hosts, which no file root opens. Some may be links to other disks."""
    hosts = HostPaths(root)
    own = [hosts.hosts, hosts.cache, hosts.workers, hosts.scratch, hosts.compiled]
    return own + [root / name for name in ("service", "logs", "wandb")]


def _check_object_name(bucket: str, key: str, place: str) -> None:
    """Refuses other spellings of one object: gateways tidy keys, and access points and their aliases are buckets."""
    if not _BUCKET.fullmatch(bucket) or bucket.lower().endswith(_ALIASES):
        raise InvalidInput("name the bucket itself: no access point, and none of its aliases", place)
    *inner, last = unquote(key).split("/")
    if "" in inner or {".", ".."} & {*inner, last}:
        raise InvalidInput("a key of S3 has no parts that are empty, . or ..", place)


def _is_of(tenant: str, key: str) -> bool:
    return key.startswith(f"{tenant_folder(tenant)}/")
