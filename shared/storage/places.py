"""The rule for what a tenant may read: every path, URI, link and manifest, whoever named it.

Of our own store a tenant has `tenants/<tenant>/` and nothing else. Of this machine's other files it has those below
`download.file_roots`: of the root of this installation only those below a file root that itself lies in the root, and
nothing in the service's own folders there. Paths are judged by where they really lead.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidInput, NotFound
from shared.settings import Settings
from shared.storage.artifacts import Manifest
from shared.storage.paths import HostPaths, RunKeys, checkpoint_adapter_run, is_published, tenant_folder
from shared.storage.store import LocalStore, ObjectStore, S3Store, open_store, open_uri, uri_of

_LONGEST = 4096
_NOT_YOURS = "this leads into the service's own store, and to nothing of yours"
# What lies here is no data, whatever the roots say: a process's environment, devices that never end.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")
_ALIASES = ("-s3alias", "--ol-s3", ".mrap")
_NEVER = tuple(map(Path, ("/proc", "/sys", "/dev")))


class Places:
    """Needs settings for the store, this installation's folders and the file roots. Blocking: paths are resolved."""

    def __init__(self, settings: Settings, store: ObjectStore | None = None) -> None:
        self._s3 = settings.s3
        self._store = open_store(settings.store, settings.s3) if store is None else store
        self._roots = [root.expanduser().resolve() for root in settings.download.file_roots]
        self._store_root = self._store.root.resolve() if isinstance(self._store, LocalStore) else None
        self._root = settings.root_path
        self._own_folders = [folder.resolve() for folder in _own_folders(self._root)]
        # The root itself is no such file root: what the service adds there later would be open too.
        self._opened = [root for root in self._roots if self._root in root.parents]

    def check_named(self, tenant: str, text: str, place: str) -> None:
        """Check a path or URI in a request, without the hosts' files: it may name nothing of ours, and nobody else's.

        Raises:
            InvalidInput: the text is a path or URI of what is ours or another tenant's, whether that exists or not.
        """
        if text[:5].lower() == "s3://":
            with suppress(ValueError):  # its field says what is wrong with it
                parts = urlsplit(text)
                _check_object_name(parts.netloc, unquote(parts.path).lstrip("/"), place)
        key = self._key_of(text)
        if key is not None and not _is_of(tenant, key):
            raise InvalidInput(_NOT_YOURS, place)

    def check_file(self, tenant: str, path: Path, place: str) -> Path:
        """The path without links in it.

        Raises:
            InvalidInput: the tenant may not read there, whether it exists or not.
        """
        real = Path(os.path.realpath(path))
        key = self._file_key(real, with_parents=False)
        if key is not None:
            if not _is_of(tenant, key):
                raise InvalidInput(_NOT_YOURS, place)
        elif not any(real.is_relative_to(root) for root in self._roots) or _is_never_data(real):
            raise InvalidInput("files of this machine are open only below the folders of download.file_roots", place)
        return real

    def check_object(self, tenant: str, store: S3Store, key: str, place: str) -> None:
        """Raises InvalidInput when an object or a prefix of S3 holds what is ours, and not this tenant's."""
        _check_object_name(store.bucket, key, place)
        ours = self._object_key(store, key)
        if ours is not None and not _is_of(tenant, ours):
            raise InvalidInput(_NOT_YOURS, place)

    def own_key(self, uri: str) -> str | None:
        """Return the key of our store that a store's URI means; None for one that lies elsewhere."""
        store, key = open_uri(uri, self._s3)
        if isinstance(store, S3Store):
            return self._object_key(store, key) or None
        return self._store_key(Path(os.path.realpath(Path("/") / key)))

    def holds_artifact(self, tenant: str, key: str) -> bool:
        """Return True where a manifest under a key was written by us for this tenant: nobody uploads there."""
        return is_published(tenant, key) or checkpoint_adapter_run(tenant, key) is not None

    def check_root(self, tenant: str, key: str, manifest: Manifest, place: str) -> None:
        """Raises InvalidInput when the `root` of such a manifest leads where one of its kind never does."""
        run_id = checkpoint_adapter_run(tenant, key)
        if run_id is None:
            is_right = manifest.root is None
        else:
            checkpoints = f"{uri_of(self._store, RunKeys(run_id).checkpoints)}/"
            is_right = manifest.root is not None and manifest.root.startswith(checkpoints) and ".." not in manifest.root
        if not is_right:
            raise InvalidInput(_NOT_YOURS, place)

    def _key_of(self, text: str) -> str | None:
        """The key in our store that a text names, however it does; None for anything else. "" is more than one key."""
        if text.startswith("/") and len(text) <= _LONGEST and "\0" not in text:
            return self._real_key(Path(text), with_parents=False)  # of such folders none below them are read
        try:
            if urlsplit(text).scheme not in ("file", "s3"):
                return None
            store, key = open_uri(text, self._s3)
        except (InvalidInput, ValueError):
            return None  # its field says what is wrong with it
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
        return "" if self._is_own(real) else None

    def _store_key(self, real: Path) -> str | None:
        root = self._store_root
        is_inside = root is not None and real != root and real.is_relative_to(root)
        return real.relative_to(root).as_posix() if root is not None and is_inside else None

    def _is_own(self, real: Path) -> bool:
        if real == self._store_root or any(real.is_relative_to(folder) for folder in self._own_folders):
            return True
        return real.is_relative_to(self._root) and not any(real.is_relative_to(folder) for folder in self._opened)

    def _object_key(self, store: S3Store, key: str) -> str | None:
        ours = self._store
        if not isinstance(ours, S3Store) or store.bucket.lower() != ours.bucket.lower():
            return None
        full = f"{store.prefix}{key}"
        folder = f"{full.rstrip('/')}/" if full else ""
        if folder.startswith(ours.prefix):
            return full.removeprefix(ours.prefix)
        return "" if ours.prefix.startswith(folder) else None  # a folder's objects are those below it


class UserFolder(LocalStore):
    """A folder that a user named, read through no link that leads out of it, also where one is put in meanwhile.

    `bounds` is the folder that links may stay in: itself; of a snapshot in the hub's cache, its repository.
    """

    def __init__(self, real: Path, bounds: Path | None = None) -> None:
        super().__init__(real)
        self._bounds = bounds or _bounds_of(real)

    def holds(self, name: str) -> bool:
        """Return True for a file that is where its name says."""
        return Path(os.path.realpath(self.root / name)).is_relative_to(self._bounds)

    def _open(self, key: str) -> BinaryIO:
        file = super()._open(key)
        if not path_of(file).is_relative_to(self._bounds):
            file.close()
            raise NotFound(f"{key} of {self.uri} is a link that leads elsewhere")
        return file


def path_of(file: BinaryIO) -> Path:
    """Return the real path of an open file: its name may lead elsewhere since."""
    held = Path(f"/proc/self/fd/{file.fileno()}")
    return held.readlink() if held.is_symlink() else Path(os.path.realpath(file.name))


def _own_folders(root: Path) -> list[Path]:
    """The service's and the hosts' own, which may be links to other disks, and which no file root opens."""
    hosts = HostPaths(root)
    own = [hosts.hosts, hosts.cache, hosts.workers, hosts.scratch, hosts.compiled]
    return own + [root / name for name in ("service", "logs", "wandb")]


def _bounds_of(real: Path) -> Path:
    """Files of the hub's snapshots are links to its blobs: …/models--org--name/snapshots/<commit>/."""
    is_snapshot = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if is_snapshot else real


def _check_object_name(bucket: str, key: str, place: str) -> None:
    """Refuses other spellings of one object: gateways tidy keys, and access points and their aliases are buckets."""
    if not _BUCKET.fullmatch(bucket) or bucket.lower().endswith(_ALIASES):
        raise InvalidInput("name the bucket itself: no access point, and none of its aliases", place)
    *inner, last = unquote(key).split("/")
    if "" in inner or {".", ".."} & {*inner, last}:
        raise InvalidInput("a key of S3 has no parts that are empty, . or ..", place)


def _is_of(tenant: str, key: str) -> bool:
    return key.startswith(f"{tenant_folder(tenant)}/")


def _is_never_data(real: Path) -> bool:
    return any(real.is_relative_to(folder) for folder in _NEVER)
