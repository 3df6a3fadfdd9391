"""Artifacts: folders in a store, committed by a manifest that is written last and names every file's hash."""

import hashlib
import os
import shutil
import uuid
from pathlib import Path, PurePosixPath
from typing import Literal

from shared.errors import CorruptArtifact, InvalidInput, NotFound
from shared.jobs import Artifact
from shared.models import Frozen
from shared.paths import MANIFEST, write_atomically
from shared.settings import S3Settings
from shared.store import LocalStore, ObjectStore, open_uri, uri_of

_CHUNK = 1 << 20


class FileEntry(Frozen):
    """A file of an artifact: its path below the artifact, size in bytes, SHA-256."""

    path: str
    size: int
    sha256: str


class Manifest(Frozen):
    """`manifest.json`: sorted by path and free of dates, so that equal contents have equal manifests."""

    schema_version: Literal[1] = 1
    files: tuple[FileEntry, ...]

    def encoded(self) -> bytes:
        return self.model_dump_json(indent=1).encode() + b"\n"


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(folder: Path) -> Manifest:
    """Hash every file below a folder, the manifest itself and dot-files left out."""
    paths = sorted(
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.is_file() and p.name != MANIFEST and not p.name.startswith(".")
    )
    entries = (FileEntry(path=p, size=(folder / p).stat().st_size, sha256=sha256_file(folder / p)) for p in paths)
    return Manifest(files=tuple(entries))


def seal(folder: Path) -> str:
    """Commit a local folder: write its manifest last. Returns the manifest's SHA-256."""
    data = manifest_of(folder).encoded()
    write_atomically(folder / MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def upload(store: ObjectStore, key: str, folder: Path) -> Artifact:
    """Copy a sealed folder into the store, its manifest last. Repeating it is harmless."""
    data = (folder / MANIFEST).read_bytes()
    for entry in Manifest.model_validate_json(data).files:
        store.put_file(f"{key}/{entry.path}", folder / entry.path)
    store.put_bytes(f"{key}/{MANIFEST}", data)
    return Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(data).hexdigest())


def find(store: ObjectStore, key: str) -> Artifact | None:
    """The artifact under a key, if its manifest stands."""
    try:
        data = store.get_bytes(f"{key}/{MANIFEST}")
    except NotFound:
        return None
    return Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(data).hexdigest())


def read_manifest(store: ObjectStore, key: str, sha256: str) -> Manifest:
    """Raises CorruptArtifact when the manifest is missing or is not the one that was asked for."""
    place = uri_of(store, f"{key}/{MANIFEST}")
    try:
        data = store.get_bytes(f"{key}/{MANIFEST}")
    except NotFound as error:
        raise CorruptArtifact("the artifact is missing or was never completed", place) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptArtifact("the manifest's SHA-256 is not the one that the job names", place)
    return Manifest.model_validate_json(data)


def stage(artifact: Artifact, cache: Path, s3: S3Settings) -> Path:
    """An artifact as a local folder, every file's hash checked.

    Files of a local store are used where they lie; others are copied into `cache`, under the artifact's hash. Files that
    were checked once on this machine are not read again while their size and modification time stay the same.

    Raises:
        CorruptArtifact: a file is missing, of another size, or of another hash.
    """
    store, key = open_uri(artifact.uri, s3)
    manifest = read_manifest(store, key, artifact.sha256)
    for entry in manifest.files:
        if PurePosixPath(entry.path).is_absolute() or ".." in PurePosixPath(entry.path).parts:
            raise InvalidInput("a manifest may not name files outside its artifact", entry.path)
    if isinstance(store, LocalStore):
        local = store.local_path(key)
        _check(local, manifest, cache / "checked" / artifact.sha256)
        return local
    target = cache / "artifacts" / artifact.sha256
    if not (target / MANIFEST).exists():
        _fetch(store, key, manifest, target)
    _check(target, manifest, cache / "checked" / artifact.sha256)
    return target


def _fetch(store: ObjectStore, key: str, manifest: Manifest, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    for entry in manifest.files:
        store.get_file(f"{key}/{entry.path}", temporary / entry.path)
    write_atomically(temporary / MANIFEST, manifest.encoded())
    try:
        temporary.rename(target)
    except OSError:  # another process staged it first
        shutil.rmtree(temporary)


def _check(folder: Path, manifest: Manifest, mark: Path) -> None:
    stamp = "\n".join(_stamp(folder, entry) for entry in manifest.files).encode()
    if mark.exists() and mark.read_bytes() == stamp:
        return
    for entry in manifest.files:
        if sha256_file(folder / entry.path) != entry.sha256:
            raise CorruptArtifact("the file's SHA-256 is not the manifest's", str(folder / entry.path))
    write_atomically(mark, stamp)


def _stamp(folder: Path, entry: FileEntry) -> str:
    path = folder / entry.path
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise CorruptArtifact("the file is missing", str(path)) from error
    if status.st_size != entry.size:
        raise CorruptArtifact(f"the file has {status.st_size} bytes, the manifest says {entry.size}", str(path))
    return f"{path} {status.st_size} {status.st_mtime_ns}"
