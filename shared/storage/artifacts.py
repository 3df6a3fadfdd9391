"""Artifacts: folders of files with a manifest, published whole; and the checkpoints among them."""

import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from stat import S_ISREG
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from longshore.commands import CHECKPOINT_NAME
from longshore.fields import Artifact, Frozen
from longshore.views import FileEntry
from shared.errors import CorruptArtifact, NotFound, StoreUnavailable
from shared.field_rules import first_rule
from shared.settings import S3Settings
from shared.storage.files import fsync_folder, go_on, write_atomically
from shared.storage.paths import MANIFEST, RunKeys, content_key
from shared.storage.store import Check, LocalStore, ObjectStore, disk_errors, open_store, open_uri, uri_of

# --- Downloads objects of a store into files: in ranges, several at a time, hashed as they arrive ---
#
# A range is written to its place in the file and hashed from there, in order, while later ones are being downloaded.
# Memory holds only the ranges that are fetched at once, whatever the files' size.

RANGE_BYTES = 8 << 20
_LOOK_EVERY_S = 0.2
_PAUSES_S = (0.1, 0.4, 1.0)  # a connection that breaks within a range; the store's client repeats requests by itself


@dataclass(frozen=True)
class Fetched:
    """An object of a known size, and the file that is to hold it."""

    key: str
    size: int
    path: Path


def fetch(store: ObjectStore, wanted: Sequence[Fetched], at_once: int, check: Check) -> Iterator[str]:
    """Download objects into new files. Yields the SHA-256 of each, in order.

    `at_once`: ranges downloaded at a time. `check`: called before and after each, and while one is awaited, from any
    thread; its errors propagate.

    Raises:
        CorruptArtifact: an object is missing, or of another size.
        DiskFull, StoreUnavailable
    """
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="range")
    try:
        begun = [(file, _begin(store, file, threads, check)) for file in wanted]
        buffer = memoryview(bytearray(RANGE_BYTES))
        for file, ranges in begun:
            digest = hashlib.sha256()
            with file.path.open("rb", buffering=0) as made:
                for start, arrived in zip(_starts(file), ranges, strict=True):
                    while not wait((arrived,), _LOOK_EVERY_S).done:
                        check()
                    arrived.result()
                    digest.update(buffer[: made.readinto(buffer[: file.size - start])])
            yield digest.hexdigest()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # a stalled range may take a minute to fail


def _begin(store: ObjectStore, file: Fetched, threads: ThreadPoolExecutor, check: Check) -> list["Future[None]"]:
    with disk_errors(file.path):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.touch(exist_ok=False)

    def bring(start: int) -> None:
        check()
        # The last range asks for one byte too many, to detect an object that is too long.
        end = min(start + RANGE_BYTES, file.size)
        data = _read(store, file.key, start, end - start + (end == file.size))
        check()
        if len(data) != end - start:
            found = store.head(file.key)
            told = f"the file has {found.size if found else 0} bytes, the manifest says {file.size}"
            raise CorruptArtifact(told, uri_of(store, file.key))
        with disk_errors(file.path), file.path.open("r+b") as made:
            made.seek(start)
            made.write(data)

    return [threads.submit(bring, start) for start in _starts(file)]


def _starts(file: Fetched) -> range:
    return range(0, max(1, file.size), RANGE_BYTES)


def _read(store: ObjectStore, key: str, start: int, length: int) -> bytes:
    for pause_s in (*_PAUSES_S, None):
        try:
            return store.read_range(key, start, length)
        except NotFound as error:
            raise CorruptArtifact("the file is missing", uri_of(store, key)) from error
        except StoreUnavailable:
            if pause_s is None:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")


# --- Artifacts: folders in a store, committed by a manifest that is written last and names every file's hash ---

_CHUNK_BYTES = 8 << 20
_SMALL_BYTES = 1 << 20
_PUT_AT_ONCE = 8

Record = TypeVar("Record", bound=BaseModel)


class Manifest(Frozen):
    """The content of `manifest.json`: files sorted by path, without dates, so that equal contents have equal manifests.

    With `root` the artifact is a reference: its files lie below that URI, which Longshore does not own. So a model of
    many gigabytes need not be copied; the hashes detect changes.
    """

    schema_version: Literal[1] = 1
    files: tuple[FileEntry, ...]
    root: str | None = None

    def encoded(self) -> bytes:
        return self.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"

    @property
    def contents_sha256(self) -> str:
        """The SHA-256 of the list of files: the same wherever they lie."""
        return hashlib.sha256(self.model_copy(update={"root": None}).encoded()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files)


def sha256_file(path: Path, check: Check = go_on) -> str:
    """Hash a file. `check`: called for each piece. Its errors end it."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            check()
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def sha256_object(store: ObjectStore, key: str, size: int, check: Check = go_on) -> str:
    """Hash an object in the store, one piece at a time, with a `check` for each."""
    digest = hashlib.sha256()
    for start in range(0, size, _CHUNK_BYTES):
        check()
        digest.update(store.read_range(key, start, min(_CHUNK_BYTES, size - start)))
    return digest.hexdigest()


def manifest_of(folder: Path, check: Check = go_on) -> Manifest:
    """Hash every file below a folder; its own manifest and names that start with a dot are left out."""
    found = sorted((path.relative_to(folder).as_posix(), path) for path in _files(folder))
    entries = (FileEntry(path=n, size=path.stat().st_size, sha256=sha256_file(path, check)) for n, path in found)
    return Manifest(files=tuple(entries))


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path != folder / MANIFEST:
            yield path


def seal(folder: Path) -> str:
    """Commit a local folder: make its files durable, then write its manifest. Returns the manifest's SHA-256."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for parent in {path.parent for path in _files(folder)}:
        fsync_folder(parent)
    data = manifest_of(folder).encoded()
    write_atomically(folder / MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def upload_artifact(store: ObjectStore, key: str, folder: Path) -> Artifact:
    """Copy a sealed folder into the store. Repeating it is harmless.

    Raises CorruptArtifact: a file's length has changed since it was sealed, or the file is missing.
    """
    return upload_files(store, key, folder, Manifest.model_validate_json((folder / MANIFEST).read_bytes()))


def upload_files(store: ObjectStore, key: str, folder: Path, manifest: Manifest, check: Check = go_on) -> Artifact:
    """Copy the files that a manifest names into the store, and then the manifest, which need not be in the folder.

    `check`: as of the store's `put_file`.
    """
    artifact = Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(manifest.encoded()).hexdigest())
    if find_artifact(store, key) == artifact:
        return artifact

    def put(entry: FileEntry) -> None:
        check()
        _check_size(folder, entry)
        store.put_file(f"{key}/{entry.path}", folder / entry.path, check)

    # Small files are put in parallel, as each mostly waits; large ones one by one, as boto3 uses threads for each.
    small = [entry for entry in manifest.files if entry.size <= _SMALL_BYTES]
    with ThreadPoolExecutor(_PUT_AT_ONCE, thread_name_prefix="put") as threads:
        list(threads.map(put, small))
    for entry in manifest.files:
        if entry.size > _SMALL_BYTES:
            put(entry)
    store.put_bytes(f"{key}/{MANIFEST}", manifest.encoded())
    return artifact


def refer(store: ObjectStore, key: str, manifest: Manifest) -> Artifact:
    """Commit a reference: a manifest in the store whose files lie below its `root`."""
    assert manifest.root is not None
    data = manifest.encoded()
    store.put_bytes(f"{key}/{MANIFEST}", data)
    return Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(data).hexdigest())


def find_artifact(store: ObjectStore, key: str) -> Artifact | None:
    """Return the artifact under a key, if its manifest is there."""
    try:
        data = store.get_bytes(f"{key}/{MANIFEST}")
    except NotFound:
        return None
    return Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(data).hexdigest())


def read_manifest(store: ObjectStore, key: str, sha256: str) -> Manifest:
    """Read an artifact's manifest. Raises CorruptArtifact when it is missing or has another SHA-256."""
    return _manifest_and_bytes(store, key, sha256)[0]


def _manifest_and_bytes(store: ObjectStore, key: str, sha256: str) -> tuple[Manifest, bytes]:
    place = uri_of(store, f"{key}/{MANIFEST}")
    try:
        data = store.get_bytes(f"{key}/{MANIFEST}")
    except NotFound as error:
        raise CorruptArtifact("the artifact is missing or was never completed", place) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptArtifact("the manifest's SHA-256 is not the one that was asked for", place)
    try:
        return Manifest.model_validate_json(data), data
    except ValidationError as error:
        raise CorruptArtifact(f"not a manifest: {first_rule(error)}", place) from error


def read_record(store: ObjectStore, key: str, kind: type[Record]) -> Record:
    """Read a JSON object of the store as a model of this kind.

    Raises:
        NotFound: there is no such object.
        CorruptArtifact: its bytes are not a model of this kind.
    """
    try:
        return kind.model_validate_json(store.get_bytes(key))
    except ValidationError as error:
        problem = f"the file is damaged, it holds no {kind.__name__}: {first_rule(error)}"
        raise CorruptArtifact(problem, uri_of(store, key)) from error


def open_artifact(artifact: Artifact, s3: S3Settings) -> tuple[ObjectStore, Manifest]:
    """Return the store of an artifact's files, references followed, and its manifest: `entry.path` is a file's key."""
    store, key = open_uri(artifact.uri, s3)
    manifest = read_manifest(store, key, artifact.sha256)
    return open_store(manifest.root or artifact.uri, s3), manifest


def stage(artifact: Artifact, cache: Path, s3: S3Settings, only: tuple[str, ...] = (), check: Check = go_on) -> Path:
    """An artifact as a local folder, every file's hash checked.

    Files on this machine are used in place; others are copied into `cache`, under the artifact's hash.
    Files that were checked once on this machine are not read again while their size and times stay the same.

    Args:
        only: patterns such as `tokenizer*`, to stage only those files.
        check: called from any thread, for each piece of a file. Its errors end the staging.

    Raises:
        CorruptArtifact: a file is missing, of another size, or of another hash.
    """
    holder, key = open_uri(artifact.uri, s3)
    whole, data = _manifest_and_bytes(holder, key, artifact.sha256)
    manifest = Manifest(files=tuple(e for e in whole.files if not only or any(fnmatch(e.path, p) for p in only)))
    store, folder = _place(artifact, whole, cache, s3, only)
    try:
        _check(folder, manifest, cache, check)
    except CorruptArtifact:
        if isinstance(store, LocalStore):
            raise
        _fetch(store, manifest, folder, cache, s3.ranges, check)  # it is not here yet, or was damaged since
        _check(folder, manifest, cache, check)
    if not isinstance(holder, LocalStore):
        write_atomically(_manifests(cache) / artifact.sha256 / MANIFEST, data, is_durable=False)
    return folder


def staged(artifact: Artifact, cache: Path, check: Check = go_on) -> tuple[Path, Manifest] | None:
    """Return the folder and manifest of an artifact that is on this machine: for processes without credentials.

    Returns None if it lies in another machine's store, and has not been staged whole in this cache.

    Raises:
        CorruptArtifact: it is an artifact of this machine, and a file is missing, of another size, or of another hash.
    """
    holder, key = open_uri(artifact.uri, S3Settings())
    store: ObjectStore = holder
    try:
        if not isinstance(holder, LocalStore):
            holder, key = LocalStore(_manifests(cache)), artifact.sha256
        manifest = read_manifest(holder, key, artifact.sha256)
        store, folder = _place(artifact, manifest, cache, S3Settings())
        _check(folder, manifest, cache, check)
    except CorruptArtifact:
        if isinstance(store, LocalStore):
            raise
        return None
    return folder, manifest


def _place(
    artifact: Artifact, manifest: Manifest, cache: Path, s3: S3Settings, only: tuple[str, ...] = ()
) -> tuple[ObjectStore, Path]:
    """Return the store of an artifact's files, and their folder on this machine, which may not exist yet."""
    store = open_store(manifest.root or artifact.uri, s3)
    if isinstance(store, LocalStore):
        return store, store.root
    return store, cache / "artifacts" / (content_key(artifact.sha256, *only) if only else artifact.sha256)


def _manifests(cache: Path) -> Path:
    """The folder of downloaded artifacts' manifests, written by `stage` and read by `staged`."""
    return cache / "manifests"


def _fetch(store: ObjectStore, manifest: Manifest, target: Path, cache: Path, at_once: int, check: Check) -> None:
    """Copy files into a temporary folder, check their hashes, and rename the folder. `target` is never incomplete."""
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    wanted = [Fetched(entry.path, entry.size, temporary / entry.path) for entry in manifest.files]
    try:
        for entry, found in zip(manifest.files, fetch(store, wanted, at_once, check), strict=True):
            if found != entry.sha256:
                raise CorruptArtifact("the file's SHA-256 is not the manifest's", uri_of(store, entry.path))
        with disk_errors(temporary):
            write_atomically(temporary / MANIFEST, manifest.encoded())
        _take_place(temporary, target, manifest, cache, check)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(new: Path, target: Path, manifest: Manifest, cache: Path, check: Check) -> None:
    """Rename a complete folder to `target`. An intact folder that is already there stays, as it may be in use."""
    try:
        new.rename(target)
    except OSError:
        if not target.exists():
            raise
    else:
        return remember_checked(target, manifest, cache)
    try:
        _check(target, manifest, cache, check)
    except CorruptArtifact:
        target.rename(new / "spoilt")
        new.rename(target)
        shutil.rmtree(target / "spoilt", ignore_errors=True)


def _check(folder: Path, manifest: Manifest, cache: Path, check: Check) -> None:
    stamp = _stamp(folder, manifest)
    mark = _mark(folder, manifest, cache)
    if mark.exists() and mark.read_bytes() == stamp:
        return
    for entry in manifest.files:
        if sha256_file(folder / entry.path, check) != entry.sha256:
            raise CorruptArtifact("the file's SHA-256 is not the manifest's", str(folder / entry.path))
    write_atomically(mark, stamp, is_durable=False)  # without it the files are hashed once more


def remember_checked(folder: Path, manifest: Manifest, cache: Path) -> None:
    """Record that a folder's files have just been hashed, so that the next `stage` here does not hash them again."""
    write_atomically(_mark(folder, manifest, cache), _stamp(folder, manifest), is_durable=False)


def _mark(folder: Path, manifest: Manifest, cache: Path) -> Path:
    return cache / "checked" / content_key(str(folder), *(entry.sha256 + entry.path for entry in manifest.files))


def _check_size(folder: Path, entry: FileEntry) -> os.stat_result:
    path = folder / entry.path
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptArtifact("the file is missing", str(path)) from error
    if not S_ISREG(status.st_mode):
        raise CorruptArtifact("this is no regular file", str(path))
    if status.st_size != entry.size:
        raise CorruptArtifact(f"the file has {status.st_size} bytes, the manifest says {entry.size}", str(path))
    return status


def _stamp(folder: Path, manifest: Manifest) -> bytes:
    """Return the files' inodes, sizes and times, to detect changes. Raises CorruptArtifact if a size is wrong."""
    checked = ((entry.sha256, _check_size(folder, entry)) for entry in manifest.files)
    return "\n".join(f"{h} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for h, s in checked).encode()


# --- Names of runs' results ---
# `<name>` and `<name>:v<n>` of published weights, `<run>:step-<n>` of checkpoints.
#
# A checkpoint is the state of a run after step n, or of a session after command n.

PUBLISHED_NAME = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,62})(:v(?P<version>[1-9][0-9]{0,5}))?")


def is_name(text: str) -> bool:
    """True if a text can only name a checkpoint or something published: hub ids, paths and URIs have a /."""
    return PUBLISHED_NAME.fullmatch(text) is not None or CheckpointName.parse(text) is not None


@dataclass(frozen=True)
class CheckpointName:
    run_id: str
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}:step-{self.step}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        if not re.fullmatch(CHECKPOINT_NAME, text):
            return None
        run_id, _, step = text.partition(":step-")
        return cls(run_id, int(step))


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint that has a manifest. Ordered by step, then by fence: a later lease's replaces an earlier one's."""

    step: int
    fence_label: str
    key: str


def is_job(key: str) -> bool:
    """True for the key of a job's file below a run's logs."""
    return key.endswith("/job.json")


def stored_checkpoints(store: ObjectStore, run_id: str) -> list[StoredCheckpoint]:
    """List a run's checkpoints that have a manifest, the newest last."""
    return checkpoints_among(run_id, (info.key for info in store.list(f"{RunKeys(run_id).checkpoints}/")))


def checkpoints_among(run_id: str, keys: Iterable[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints whose manifests are among a run's keys, the newest last."""
    found = []
    for key in keys:
        if (place := RunKeys(run_id).checkpoint_of(key)) is not None:
            fence, step = place
            found.append(StoredCheckpoint(step, fence.label, key.removesuffix(f"/{MANIFEST}")))
    return sorted(found)


def checkpoint_of_step(store: ObjectStore, name: CheckpointName) -> tuple[str, Artifact] | None:
    """Return the key and the artifact of a checkpoint, of the newest lease that saved it; None if there is none."""
    found = [each.key for each in stored_checkpoints(store, name.run_id) if each.step == name.step]
    artifact = find_artifact(store, found[-1]) if found else None
    return None if artifact is None else (found[-1], artifact)
