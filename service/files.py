"""Files in and out: uploads into the store, and what a run published out of it. Both are streamed."""

import asyncio
import hashlib
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from service.problems import Conflict
from shared import artifacts, paths
from shared.artifacts import FileEntry, Manifest
from shared.errors import InvalidInput, NotFound
from shared.models import Frozen
from shared.runs import RunStatus
from shared.settings import S3Settings
from shared.store import ObjectStore, open_uri, uri_of

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")


class Uploaded(Frozen):
    """A file in the store. The same bytes under the same name have the same URI."""

    uri: str
    sha256: str
    size: int


def uploads_folder(root: Path) -> Path:
    """Where a service of this root keeps bodies that it is receiving."""
    return root / "service" / "uploads"


async def receive(store: ObjectStore, scratch: Path, name: str, chunks: AsyncIterator[bytes]) -> Uploaded:
    """Stream a body into the store, by way of a temporary file that is hashed as it grows.

    Raises:
        InvalidInput: the name is no plain file name, or the body is empty.
    """
    if not _NAME.match(name):
        raise InvalidInput("a file name has letters, digits, dots, dashes and underscores: at most 128", "name")
    await asyncio.to_thread(scratch.mkdir, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=scratch) as file:
        async for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            await asyncio.to_thread(file.write, chunk)
        if not size:
            raise InvalidInput("the file is empty", name)
        file.flush()
        key = paths.upload(digest.hexdigest(), name)
        if await asyncio.to_thread(store.head, key) is None:
            await asyncio.to_thread(store.put_file, key, Path(file.name))
    return Uploaded(uri=uri_of(store, key), sha256=digest.hexdigest(), size=size)


@dataclass(frozen=True)
class PublishedFiles:
    """What a run published: only names in its manifest can be read. Blocking: call it from a thread."""

    store: ObjectStore
    key: str
    manifest_data: bytes
    manifest: Manifest

    @classmethod
    def of(cls, status: RunStatus, s3: S3Settings) -> Self:
        """Raises Conflict when the run has published nothing."""
        if status.adapter is None or status.adapter_sha256 is None:
            raise Conflict(f"{status.run_id} has published nothing: it is {status.state}, {status.phase}")
        store, key = open_uri(status.adapter, s3)
        key = key.rstrip("/")
        manifest = artifacts.read_manifest(store, key, status.adapter_sha256)
        return cls(store, key, store.get_bytes(f"{key}/{paths.MANIFEST}"), manifest)

    def entry(self, path: str) -> FileEntry:
        """Raises NotFound for a file that the manifest does not list."""
        for entry in self.entries:
            if entry.path == path:
                return entry
        raise NotFound(f"there is no file {path} in what the run published")

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The manifest's files, and the manifest."""
        itself = FileEntry(
            path=paths.MANIFEST, size=len(self.manifest_data), sha256=hashlib.sha256(self.manifest_data).hexdigest()
        )
        return (*self.manifest.files, itself)

    def content(self, entry: FileEntry) -> Iterator[bytes]:
        for start in range(0, entry.size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, entry.size - start)
            piece = self.store.read_range(f"{self.key}/{entry.path}", start, length)
            if len(piece) != length:  # the answer's length is promised: break it off rather than pad it
                raise NotFound(f"{entry.path} ends early")
            yield piece

    def tar(self, folder: str) -> Iterator[bytes]:
        """The files as an uncompressed tar, below one folder; equal contents give equal bytes."""
        for entry in self.entries:
            header = tarfile.TarInfo(f"{folder}/{entry.path}")
            header.size = entry.size
            yield header.tobuf(tarfile.PAX_FORMAT)
            yield from self.content(entry)
            yield b"\0" * (-entry.size % tarfile.BLOCKSIZE)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)
