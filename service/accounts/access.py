"""Where a tenant's URIs may lead: of our own store into the tenant's own folder, and nowhere else."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, JsonValue

from shared.errors import InvalidInput
from shared.paths import HostPaths, tenant_folder
from shared.settings import Settings
from shared.store import LocalStore, ObjectStore, S3Store, open_uri

_LONGEST = 4096
_MODEL_FIELDS = ("model", "model_uri", "initial_adapter", "reference")


class Access:
    """Looks at every string of a request, whatever its field: a field that is added later is not forgotten."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._s3 = settings.s3
        self._store = store
        self._roots = _roots(settings, store)

    def check(self, tenant: str, request: BaseModel) -> None:
        """Blocking: paths are resolved.

        Raises:
            InvalidInput: a URI or a path leads to what is ours or another tenant's, whether that exists or not, or
                has a scheme that is not read.
        """
        for place, text in _strings(request.model_dump(mode="json")):
            _check_scheme(text, place)
            key = self._key(text)
            if key is not None and not key.startswith(f"{tenant_folder(tenant)}/"):
                raise InvalidInput("this leads into the service's own store, and to nothing of yours", place)

    def _key(self, text: str) -> str | None:
        """The key in our store that a text names, however it does; None for anything else. "" is more than one key."""
        if text.startswith("/") and len(text) <= _LONGEST and "\0" not in text:
            return self._file_key(Path(text), with_parents=False)  # of such folders none below them are read
        try:
            scheme = urlsplit(text).scheme
            if scheme not in ("file", "s3"):
                return None
            store, key = open_uri(text, self._s3)
        except (InvalidInput, ValueError):
            return None  # its field says what is wrong with it
        if isinstance(store, S3Store):
            return _s3_key(self._store, store.bucket, key) if isinstance(self._store, S3Store) else None
        return self._file_key(Path("/") / key, with_parents=True)

    def _file_key(self, path: Path, with_parents: bool) -> str | None:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        for root in self._roots:
            if resolved != root and resolved.is_relative_to(root):
                is_store = isinstance(self._store, LocalStore) and root == self._roots[0]
                return resolved.relative_to(root).as_posix() if is_store else ""
            if with_parents and root.is_relative_to(resolved):
                return ""
        return None


def _check_scheme(text: str, place: str) -> None:
    """What no host could read is refused before a run waits for one."""
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    field = place.rpartition(".")[2]
    if field == "uri" and scheme not in ("file", "http", "https", "s3"):
        raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", place)
    if field in _MODEL_FIELDS and scheme not in ("", "file", "s3"):
        raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", place)


def _roots(settings: Settings, store: ObjectStore) -> list[Path]:
    """The store's folder first, where it is one; then the service's and the hosts' own, also beside an S3 store."""
    hosts = HostPaths(settings.root_path)
    ours = [settings.root_path / "service", hosts.cache, hosts.workers, hosts.scratch]
    return [store.root.resolve(), *ours] if isinstance(store, LocalStore) else ours


def _s3_key(ours: S3Store, bucket: str, key: str) -> str | None:
    folder = f"{key.rstrip('/')}/" if key else ""
    if bucket != ours.bucket:
        return None
    if folder.startswith(ours.prefix):
        return key.removeprefix(ours.prefix)
    return "" if ours.prefix.startswith(folder) else None  # a folder's objects are those below it


def _strings(value: JsonValue, place: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a document with its place in it."""
    match value:
        case str():
            yield place, value
        case list():
            for number, item in enumerate(value):
                yield from _strings(item, f"{place}.{number}" if place else str(number))
        case dict():
            for name, item in value.items():
                yield from _strings(item, f"{place}.{name}" if place else name)
