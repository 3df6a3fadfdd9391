"""Download a run's dataset from a URI into the store: decompressed, within the limits of size, and hashed.

`find_sources` lists the files behind a URI: on this machine, in an S3 bucket, or on a web server. If a folder has the
files of several splits, one split's files are taken (`chosen`).
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from pydantic import Field
from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.formats.rows import listed
from activities.heartbeats import host_is_leaving, on_thread, stop_if_cancelled
from activities.host_context import HostContext, locked, remove_abandoned
from activities.sources.http import Allowance, Broken, HttpSource, Piece, compression_of, fetch, parse_http_uri, unpack
from longshore.accounts import Room
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact, Frozen, Reason
from longshore.runs import RunId, Tenant
from shared.errors import DiskFull, InvalidInput, StoreUnavailable
from shared.settings import Settings
from shared.storage.artifacts import find_artifact, open_artifact
from shared.storage.files import open_regular
from shared.storage.paths import LEFT, MANIFEST, RunKeys, content_key, tenant_folder
from shared.storage.places import OpenPlaces, path_of, with_query
from shared.storage.store import (
    LocalStore,
    ObjectInfo,
    ObjectStore,
    S3Store,
    disk_errors,
    open_store,
    open_uri,
    uri_of,
)
from shared.storage.stored_bytes import check_room

_MAX_FILES = 10_000
_RANGE_BYTES = 8 << 20
_MAX_NAME = 48  # characters of a URL, each at most 4 bytes of the 255 that a name may have
_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
# The library `datasets` recognizes splits by these words in names of files and folders.
_SPLITS = ("train training", "validation valid val dev", "test testing eval evaluation")
_SPLIT_OF = {word: words.split()[0] for words in _SPLITS for word in words.split()}
_NO_DATA = re.compile(r"(.*/)?(README.*|LICENSE.*|[^/]*\.md|dataset_(infos?|dict)\.json|state\.json)")
_BY_PATTERN = "a URI names others by a pattern, such as file:///rows/data/validation-*.parquet"
_FORGET_AFTER_S = 3 * 3600


@dataclass(frozen=True)
class LocalSource:
    """A file of this machine that the tenant may read: `path` has no links in it."""

    path: Path

    @property
    def place(self) -> str:
        return f"file://{self.path}"

    @contextmanager
    def unchanged(self) -> Iterator[BinaryIO]:
        """Open the file. Raises InvalidInput if it was replaced by a link, or has changed by the end of the block."""
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
        """Yield the object in ranges. Raises Broken if the object changes meanwhile."""
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

    A `*` in the path of a file:// or s3:// URI matches any characters: such a pattern names files of a folder.

    Raises InvalidInput: an unsupported scheme, a place that this tenant may not read, or nothing there.
    """
    match urlsplit(uri).scheme:
        case "http" | "https":
            uri = with_query(open_store(settings.store, settings.s3), uri)
            path = unquote(parse_http_uri(uri).path)
            name = "".join(letter if letter.isprintable() else "_" for letter in path).rpartition("/")[2]
            return _named({name[-_MAX_NAME:] or "dataset": HttpSource(uri, settings.download)}, uri)
        case "file":
            return _named(_matching(uri, partial(_local_sources, tenant=tenant, settings=settings)), uri)
        case "s3":
            return _named(_matching(uri, partial(_store_sources, tenant=tenant, settings=settings)), uri)
        case _:
            raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", uri)


def _matching(uri: str, find: Callable[[str], dict[str, Source]]) -> dict[str, Source]:
    if "*" not in uri:
        return find(uri)
    folder, _, pattern = uri.partition("*")
    folder, _, begin = folder.rpartition("/")
    return {name: source for name, source in find(folder).items() if fnmatchcase(name, unquote(f"{begin}*{pattern}"))}


def chosen(sources: dict[str, Source], split: str, uri: str) -> tuple[dict[str, Source], str]:
    """Choose one split's files from a folder, and describe which files were read and which were left out.

    As in the library `datasets`, a word in the name of a file or of a folder around it is its split; if some files have
    one, files without are left out. `train` takes the split train; `eval`, a run's held-out data, takes validation,
    else test. Files of a single split, or named by a pattern, are all taken.

    Raises InvalidInput: the files are of other splits, or of several configurations.
    """
    data = {name: source for name, source in sources.items() if not _NO_DATA.fullmatch(name)} or sources
    found = {name: _split_of(name) for name in data}
    splits = sorted({split for _, split in found.values()})
    if "*" not in uri and splits != [""]:
        order = splits if len(splits) == 1 else ["train"] if split == "train" else ["validation", "test"]
        wanted = next((each for each in order if each in splits), None)
        data = {name: source for name, source in data.items() if found[name][1] == wanted}
        if len(folders := sorted({found[name][0] for name in data})) != 1:
            others = f"splits {', '.join(each or '(none)' for each in splits)}, and not {split}"
            has = f"configurations {listed(folders)}" if folders else others
            raise InvalidInput(f"the folder has the {has}: {_BY_PATTERN}", uri)
    left = sorted(sources.keys() - data.keys())
    words = f"of the dataset's files {listed(sorted(data))} were read, and {listed(left)} left: {_BY_PATTERN}"
    return data, words if left else ""


def _split_of(name: str) -> tuple[str, str]:
    """Return the folder that contains a file's split, and the split; empty if no part of the name has a split."""
    parts = name.split("/")
    for k in reversed(range(len(parts))):
        if words := [word for word in re.split(r"[-._ 0-9]+", parts[k].lower()) if word in _SPLIT_OF]:
            shard = re.match(r"(.+)-\d{5}-of-\d{5}", parts[k])  # the hub's, whose splits may have longer names
            return "/".join(parts[:k]), shard[1] if shard and shard[1] not in _SPLIT_OF else _SPLIT_OF[words[0]]
    return "", ""


def _local_sources(uri: str, tenant: str, settings: Settings) -> dict[str, Source]:
    places = OpenPlaces(settings)
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
    """Return a file's name in the dataset: that of the real file if a link to it has another suffix.

    So a link cannot make a file of another kind seem to be text. Links of the Hugging Face cache are exempt: its blobs
    have no suffixes.
    """
    is_blob = real.parent.name == "blobs" and "--" in real.parent.parent.name
    if is_blob or Path(_without_suffix(name)).suffix == Path(_without_suffix(real.name)).suffix:
        return name
    return Path(name).with_name(real.name).as_posix()


def _store_sources(uri: str, tenant: str, settings: Settings) -> dict[str, Source]:
    store, key = open_uri(uri, settings.s3)
    assert isinstance(store, S3Store)
    OpenPlaces(settings).check_object(tenant, store, key, uri)
    if key and not key.endswith("/") and store.head(key):
        return {key.rpartition("/")[2]: StoreSource(store, key)}
    prefix = f"{key.rstrip('/')}/" if key else ""
    names = _visible(info.key.removeprefix(prefix) for info in store.list(prefix))
    return {name: StoreSource(store, prefix + name) for name in names}


def _visible(names: Iterable[str]) -> list[str]:
    """Return names, without those such as `.cache/x` and `_SUCCESS`, and S3's markers of folders.

    They are at most one more than allowed, so that huge folders are not read to the end.
    """
    shown = (name for name in names if not re.search(r"(^|/)([._]|\Z)", name))
    return list(islice(shown, _MAX_FILES + 1))


def _named(sources: dict[str, Source], uri: str) -> dict[str, Source]:
    """Name sources without suffixes of compression. Raises InvalidInput for none, too many, or a name used twice."""
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


class DownloadRequest(Frozen):
    """The dataset of a run's split, and the tenant who may read it."""

    run_id: RunId
    tenant: Tenant
    split: str = Field(pattern=r"^((train|eval|prompts)(-[a-z0-9-]{1,32})?|groups-[0-9a-f]{32})$")
    source: DatasetSource
    room: Room = Room()


class Downloaded(Frozen):
    """The dataset's files, decompressed, under their own names without .gz and .zst.

    `notices`: which files of a folder were left.
    """

    dataset: Artifact
    num_files: int
    num_bytes: int
    notices: tuple[Reason, ...] = ()


class Download:
    """Brings a run's dataset into the store. `keeps_parts`: keep a partial download for another attempt."""

    def __init__(self, host: HostContext, *, keeps_parts: bool = True) -> None:
        self._host = host
        self._keeps_parts = keeps_parts

    @on_thread("download")
    def download(self, request: DownloadRequest) -> Downloaded:
        """The dataset as an artifact. A run that has one already keeps it.

        Raises:
            InvalidInput: the URI leads nowhere or may not be read; the data is empty, damaged, too large or changing.
            StoreUnavailable: the source or the store cannot be reached; the partial download is kept for the next try.
        """
        store = self._host.store
        key = RunKeys(request.run_id).dataset(request.split)
        dataset = find_artifact(store, key) or self._bring(request, store, key)
        _, manifest = open_artifact(dataset, self._host.settings.s3)
        left = any(file.path == LEFT for file in manifest.files)
        notices = (store.get_bytes(f"{key}/{LEFT}").decode(),) if left else ()
        num_files = len(manifest.files) - left
        return Downloaded(dataset=dataset, num_files=num_files, num_bytes=manifest.num_bytes, notices=notices)

    def _bring(self, request: DownloadRequest, store: ObjectStore, key: str) -> Artifact:
        downloads = self._host.paths.scratch / "downloads"
        # Folders that no further attempt will use: their runs were cancelled, or their hosts died.
        remove_abandoned(downloads, "*", _FORGET_AFTER_S)
        uri = request.source.uri
        sources, words = find_sources(uri, request.tenant, self._host.settings), ""
        if (split := request.split.partition("-")[0]) in ("train", "eval"):
            sources, words = chosen(sources, split, uri)
        keeps_parts = self._keeps_parts and not _is_last_attempt()
        with (
            _scratch(downloads / content_key(request.model_copy(update={"room": Room()})), keeps_parts) as scratch,
            disk_errors(scratch),
        ):
            folder = scratch / "dataset"
            shutil.rmtree(folder, ignore_errors=True)
            own, left = _own_bytes(sources, store, request.tenant), request.room.left
            limits = Allowance(self._host.settings.download, None if left is None else left + own)
            num_bytes = _bring_files(sources, scratch, folder, limits)
            if words:
                (folder / LEFT).write_text(words)
            own = min(own, num_bytes)
            check_room(request.room, request.tenant, num_bytes - own, uri)
            keys = RunKeys(request.run_id)
            for info in list(store.list(keys.own_bytes(request.split, ""))):  # of an attempt that was killed
                store.delete(info.key)
            if own:
                store.put_bytes(keys.own_bytes(request.split, own), b"")
            return self._host.keep(key, folder)


def _own_bytes(sources: dict[str, Source], store: ObjectStore, tenant: str) -> int:
    """Return the bytes of sources in the tenant's own folder, which are counted there and not for each run's copy."""
    num_bytes, folder = 0, tenant_folder(tenant)
    for source in sources.values():
        stop_if_cancelled()
        match source:
            case LocalSource(path) if isinstance(store, LocalStore):
                if path.is_relative_to((store.root / folder).resolve()):
                    num_bytes += path.stat().st_size
            case StoreSource(place=place) if place.startswith(f"{uri_of(store, folder)}/"):
                info = source.store.head(source.key)
                num_bytes += info.size if info else 0
            case _:
                pass
    return num_bytes


def _bring_files(sources: dict[str, Source], scratch: Path, folder: Path, left: Allowance) -> int:
    """Bring all files of a dataset. Returns their bytes."""
    before = left.decompressed
    for name, source in sources.items():
        size = _bring_file(source, scratch / "parts" / content_key(name), folder / name, left)
        if size == 0:
            raise InvalidInput("the file is empty", source.place)
    return before - left.decompressed


def _bring_file(source: Source, parts: Path, target: Path, left: Allowance) -> int:
    match source:
        case LocalSource():
            with source.unchanged() as file:
                size = os.fstat(file.fileno()).st_size
                left.check(size, source.place)
                left.transferred -= size
                size = unpack(file, target, left, source.place)
        case _:
            path = fetch(source, parts, left)
            with path.open("rb") as file:
                size = path.stat().st_size
                if compression_of(file) or size > left.decompressed:
                    size = unpack(file, target, left, source.place)
                else:  # it is ours, and needs no copy
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, target)
    left.decompressed -= size
    return size


@contextmanager
def _scratch(folder: Path, keeps_parts: bool) -> Iterator[Path]:
    """Yield a folder that one attempt at a time can use. It is kept only after a failure that can be resumed from."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError as error:
            raise StoreUnavailable("an earlier attempt at this download is still going on") from error
        try:
            yield folder
        except BaseException as error:
            is_left = isinstance(error, CancelledError) and host_is_leaving()
            is_away = isinstance(error, StoreUnavailable) and not isinstance(error, DiskFull)
            if keeps_parts and (is_left or is_away):
                os.utime(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _is_last_attempt() -> bool:
    """Return True if the current activity will not be retried; False outside an activity."""
    if not activity.in_activity():
        return False
    info = activity.info()
    most = info.retry_policy.maximum_attempts if info.retry_policy else 0  # 0: as many as it takes
    return 0 < most <= info.attempt
