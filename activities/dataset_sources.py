"""Where the files behind a dataset's URI are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from activities.file_roots import allowed, allowed_roots
from activities.http_source import HttpSource, checked
from activities.transfer import Broken, Piece
from shared.errors import InvalidInput
from shared.paths import MANIFEST
from shared.settings import Settings
from shared.store import LocalStore, ObjectStore, open_uri, uri_of

_MAX_FILES = 10_000
_MAX_NAME = 48  # characters of a URL, each at most 4 bytes of the 255 that a name may have
_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")


@dataclass(frozen=True)
class LocalSource:
    """A file of this machine that the user may name."""

    path: Path

    @property
    def place(self) -> str:
        return f"file://{self.path}"

    @contextmanager
    def unchanged(self) -> Iterator[Path]:
        """Raises InvalidInput when the file is another at the end of the block."""
        before = self._state()
        yield self.path
        if self._state() != before:
            raise InvalidInput("the file changed while it was being read; start again when it is finished", self.place)

    def _state(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
            self.path.open("rb").close()
        except OSError as error:
            raise InvalidInput(f"the file cannot be read: {error.strerror}", self.place) from error
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class StoreSource:
    """An object of an S3 bucket."""

    store: ObjectStore
    key: str

    @property
    def place(self) -> str:
        return uri_of(self.store, self.key)

    @contextmanager
    def open(self, start: int, validator: str | None) -> Iterator[Piece]:
        info = self.store.head(self.key)
        if info is None:
            raise InvalidInput("the object has gone", self.place)
        first = start if validator is not None and info.etag == validator else 0
        yield Piece(_Ranges(self, first, info.size, info.etag), first, info.size, info.etag)


class _Ranges:
    """An object read in ranges; at its end it must still be the one that was begun."""

    _RANGE_BYTES = 8 << 20

    def __init__(self, source: StoreSource, start: int, size: int, etag: str | None) -> None:
        self._source, self._position, self._size, self._etag = source, start, size, etag
        self._buffer = b""

    def read(self, num_bytes: int, /) -> bytes:
        if not self._buffer and self._position < self._size:
            self._buffer = self._next_range()
        data, self._buffer = self._buffer[:num_bytes], self._buffer[num_bytes:]
        return data

    def _next_range(self) -> bytes:
        length = min(self._RANGE_BYTES, self._size - self._position)
        data = self._source.store.read_range(self._source.key, self._position, length)
        info = self._source.store.head(self._source.key)
        if info is None or info.etag != self._etag:
            raise Broken(f"{self._source.place}: the object changed while it was being read")
        self._position += len(data)
        return data


Source = LocalSource | StoreSource | HttpSource


def find_sources(uri: str, settings: Settings) -> dict[str, Source]:
    """The files behind a URI, each under the name that it will have in the dataset.

    Raises:
        InvalidInput: a scheme we do not read, a place the user may not name, or nothing there.
    """
    match urlsplit(uri).scheme:
        case "http" | "https":
            parts = checked(uri)
            return _named({_file_name(parts.path): HttpSource(uri, settings.download)}, uri)
        case "file":
            return _named(_local_sources(uri, settings), uri)
        case "s3":
            return _named(_store_sources(uri, settings), uri)
        case _:
            raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", uri)


def _file_name(path: str) -> str:
    """The last segment of a URL's path, as a name that every file system takes."""
    name = "".join(letter if letter.isprintable() else "_" for letter in unquote(path))
    return name.rpartition("/")[2][-_MAX_NAME:] or "dataset"


def _local_sources(uri: str, settings: Settings) -> dict[str, Source]:
    _, key = open_uri(uri, settings.s3)
    roots = allowed_roots(settings)
    path = allowed(Path("/") / key, roots, uri)
    if path.is_file():
        return {Path(key).name: LocalSource(path)}
    if not path.is_dir():
        raise InvalidInput("there is no such file or folder", uri)
    try:
        keys = [info.key for info in LocalStore(path).list("")]
    except PermissionError as error:
        raise InvalidInput("this folder may not be read", uri) from error
    return {key: LocalSource(allowed(path / key, roots, uri)) for key in keys if not _is_hidden(key)}


def _store_sources(uri: str, settings: Settings) -> dict[str, Source]:
    store, key = open_uri(uri, settings.s3)
    if key and not key.endswith("/") and store.head(key):
        return {key.rpartition("/")[2]: StoreSource(store, key)}
    prefix = f"{key.rstrip('/')}/" if key else ""
    names = [info.key.removeprefix(prefix) for info in store.list(prefix)]
    return {name: StoreSource(store, prefix + name) for name in names if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    """Names such as `.cache/x` and `_SUCCESS`, and S3's markers of folders."""
    return name == "" or name.endswith("/") or any(part.startswith((".", "_")) for part in name.split("/"))


def _named(sources: dict[str, Source], uri: str) -> dict[str, Source]:
    """The same, without the suffixes of compression."""
    place = next(iter(sources.values())).place if len(sources) == 1 else uri.partition("?")[0]
    if not sources:
        raise InvalidInput("there is nothing here", place)
    if len(sources) > _MAX_FILES:
        raise InvalidInput(f"{len(sources):,} files; a dataset has at most {_MAX_FILES:,}", place)
    named: dict[str, Source] = {}
    for name, source in sources.items():
        final = _without_suffix(name)
        if final in named or final == MANIFEST:
            raise InvalidInput(f"the name {final!r} is taken: rename or move {source.place}", place)
        named[final] = source
    return named


def _without_suffix(name: str) -> str:
    for suffix in _SUFFIXES:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)]
    return name.lstrip(".") or "dataset"
