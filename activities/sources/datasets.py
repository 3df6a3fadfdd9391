"""Find the files behind a dataset's URI."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from activities.sources.http import HttpSource, checked
from activities.sources.transfer import Broken, Piece
from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.paths import MANIFEST
from shared.storage.places import Places, path_of
from shared.storage.store import (
    LocalStore,
    ObjectInfo,
    ObjectStore,
    S3Store,
    open_regular,
    open_store,
    open_uri,
    uri_of,
)
from shared.uri_queries import with_query

_MAX_FILES = 10_000
_RANGE_BYTES = 8 << 20
_MAX_NAME = 48  # characters of a URL, each at most 4 bytes of the 255 that a name may have
_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")


@dataclass(frozen=True)
class LocalSource:
    """A file of this machine that the tenant may read: `path` has no links in it."""

    path: Path

    @property
    def place(self) -> str:
        return f"file://{self.path}"

    @contextmanager
    def unchanged(self) -> Iterator[BinaryIO]:
        """The open file. Raises InvalidInput when it is no longer that one, or is another at the end of the block."""
        try:
            file = open_regular(self.path)
        except OSError as error:
            raise InvalidInput(f"the file cannot be read: {error.strerror}", self.place) from error
        with file:
            before = _state(os.fstat(file.fileno()))
            if path_of(file) != self.path:
                raise InvalidInput("the file was replaced by a link while it was looked at", self.place)
            yield file
            if self._state() != before:
                raise InvalidInput(
                    "the file changed while it was being read; start again when it is finished", self.place
                )

    def _state(self) -> tuple[int, ...] | None:
        try:
            return _state(self.path.stat())
        except OSError:
            return None


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


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
        yield Piece(self._ranges(first, info), first, info.size, info.etag)

    def _ranges(self, start: int, begun: ObjectInfo) -> Iterator[bytes]:
        """The object in ranges; after each it must still be the one that was begun."""
        while start < begun.size:
            data = self.store.read_range(self.key, start, min(_RANGE_BYTES, begun.size - start))
            info = self.store.head(self.key)
            if info is None or info.etag != begun.etag:
                raise Broken(f"{self.place}: the object changed while it was being read")
            yield data
            start += len(data)


Source = LocalSource | StoreSource | HttpSource


def find_sources(uri: str, tenant: str, settings: Settings) -> dict[str, Source]:
    """The files behind a URI, each under the name that it will have in the dataset.

    Raises:
        InvalidInput: a scheme we do not read, a place that is not this tenant's to read, or nothing there.
    """
    match urlsplit(uri).scheme:
        case "http" | "https":
            uri = with_query(open_store(settings.store, settings.s3), uri)
            parts = checked(uri)
            return _named({_file_name(parts.path): HttpSource(uri, settings.download)}, uri)
        case "file":
            return _named(_local_sources(uri, tenant, settings), uri)
        case "s3":
            return _named(_store_sources(uri, tenant, settings), uri)
        case _:
            raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", uri)


def _file_name(path: str) -> str:
    """The last segment of a URL's path, as a name that every file system takes."""
    name = "".join(letter if letter.isprintable() else "_" for letter in unquote(path))
    return name.rpartition("/")[2][-_MAX_NAME:] or "dataset"


def _local_sources(uri: str, tenant: str, settings: Settings) -> dict[str, Source]:
    places = Places(settings)
    _, key = open_uri(uri, settings.s3)
    path = places.check_file(tenant, Path("/") / key, uri)
    if path.is_file():
        return {_as_real(Path(key).name, path): LocalSource(path)}
    if not path.is_dir():
        raise InvalidInput("there is no such file or folder", uri)
    try:
        keys = _visible(info.key for info in LocalStore(path).list(""))
    except PermissionError as error:
        raise InvalidInput("this folder may not be read", uri) from error
    found = {key: places.check_file(tenant, path / key, uri) for key in keys}
    return {_as_real(key, real): LocalSource(real) for key, real in found.items()}


def _as_real(name: str, real: Path) -> str:
    """A link makes no text of what is none: the file's own name says its kind, but in the hub's cache the link's."""
    is_blob = real.parent.name == "blobs" and "--" in real.parent.parent.name
    if is_blob or Path(_without_suffix(name)).suffix == Path(_without_suffix(real.name)).suffix:
        return name
    return Path(name).with_name(real.name).as_posix()


def _store_sources(uri: str, tenant: str, settings: Settings) -> dict[str, Source]:
    store, key = open_uri(uri, settings.s3)
    assert isinstance(store, S3Store)
    Places(settings).check_object(tenant, store, key, uri)
    if key and not key.endswith("/") and store.head(key):
        return {key.rpartition("/")[2]: StoreSource(store, key)}
    prefix = f"{key.rstrip('/')}/" if key else ""
    names = _visible(info.key.removeprefix(prefix) for info in store.list(prefix))
    return {name: StoreSource(store, prefix + name) for name in names}


def _visible(names: Iterable[str]) -> list[str]:
    """One more than a dataset may have at most: a folder may hold anything, and is not read to its end."""
    return list(islice((name for name in names if not _is_hidden(name)), _MAX_FILES + 1))


def _is_hidden(name: str) -> bool:
    """Names such as `.cache/x` and `_SUCCESS`, and S3's markers of folders."""
    return name == "" or name.endswith("/") or any(part.startswith((".", "_")) for part in name.split("/"))


def _named(sources: dict[str, Source], uri: str) -> dict[str, Source]:
    """The same, without the suffixes of compression."""
    place = next(iter(sources.values())).place if len(sources) == 1 else uri.partition("?")[0]
    if not sources:
        raise InvalidInput("there is nothing here", place)
    if len(sources) > _MAX_FILES:
        raise InvalidInput(f"more than {_MAX_FILES:,} files: a dataset has no more", place)
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
