"""Files of tenants: uploads, listings, downloads."""

import asyncio
import hashlib
import re
import secrets
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar

from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from longshore.fields import Artifact, Frozen
from service.accounts import audit
from service.accounts.tenants import Quotas, WriteReservation
from service.database.engine import Database, FileRow, KeyedLocks, TenantRow
from service.errors import Conflict
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import Tenant
from shared.runs.status import RunStatus
from shared.settings import S3Settings
from shared.storage import artifacts, paths
from shared.storage.artifacts import FileEntry, Manifest
from shared.storage.store import ObjectStore, open_uri, uri_of

if TYPE_CHECKING:
    from hashlib import _Hash


# --- Receives request bodies into files: uploads, their parts, and the bodies that children read ---

_PIECE_BYTES, _PIECE_CHUNKS = 1 << 20, 256


@dataclass(frozen=True)
class Received:
    """A body in a file."""

    path: Path
    num_bytes: int


class Incoming:
    """Receives bodies into files of a folder, and lets each tenant's large ones take turns.

    The next piece of a body is read after the last one is written, and a tenant's full pieces are written one at a time
    (of those that come by one `Incoming`). So the event loop reads two or three large bodies of a tenant at once,
    however many it sends; a slow sender delays nobody else, and a body of less than a piece waits for nobody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turns = KeyedLocks()

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """Yield an empty file, which is deleted at the end of the block."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(dir=self._folder)  # noqa: SIM115 (closed below, on a thread)
        try:
            yield Path(file.name)
        finally:
            await asyncio.to_thread(file.close)  # freeing the pages of a large file takes long

    @asynccontextmanager
    async def received(
        self,
        tenant: str,
        chunks: AsyncIterator[bytes],
        admit: Callable[[int], Awaitable[None]],
        digest: "_Hash | None" = None,
    ) -> AsyncIterator[Received]:
        """Receive a body into a file, which is deleted at the end of the block.

        Args:
            admit: called with the size so far, and raises if that is too large.
            digest: of the bytes.
        """
        async with self.scratch() as path:
            with path.open("wb") as file:

                def keep(piece: list[bytes]) -> None:
                    file.writelines(piece)
                    if digest is not None:
                        for chunk in piece:
                            digest.update(chunk)

                size, written, piece = 0, 0, list[bytes]()
                async for chunk in chunks:
                    size += len(chunk)
                    await admit(size)
                    piece.append(chunk)
                    if size - written >= _PIECE_BYTES or len(piece) >= _PIECE_CHUNKS:
                        async with self._turns.of(tenant):
                            await asyncio.to_thread(keep, piece)
                        written, piece = size, []
                await asyncio.to_thread(keep, piece)
            yield Received(path, size)


def uploads_folder(root: Path) -> Path:
    """The folder of bodies that a service of this root is receiving."""
    return root / "service" / "uploads"


# --- Streams files in and out: uploads into the store, and published models out of it ---

_CHUNK_BYTES = 1 << 20
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
_NAME = re.compile(FILE_NAME[:-1])  # without `$`, which in Python also matches before a final newline
_TRANSFERS_AT_ONCE = 8
_PATIENCE_S, _POLL_S = 60.0, 0.1
_DELETED_WITHIN_S = 600.0  # after that, whoever was deleting a file has died
_threads = ThreadPoolExecutor(_TRANSFERS_AT_ONCE, "transfers")
P = ParamSpec("P")
T = TypeVar("T")


class FileRecord(Frozen):
    """A file in the store, as its record there has it. The same bytes under the same name have the same URI."""

    file_id: str
    tenant: Tenant
    name: str
    purpose: str = "dataset"
    size: int
    sha256: str
    uri: str
    created_at: float

    def row(self) -> FileRow:
        return FileRow(**self.model_dump())


class FilePage(Frozen):
    """Files, newest first. `next` is the `after` of the following page."""

    files: tuple[FileRecord, ...]
    has_more: bool
    next: str | None = None


class Files:
    """A tenant's files: taken in, listed, read and deleted. Those of another are not found."""

    def __init__(self, store: ObjectStore, database: Database, quotas: Quotas, scratch: Path) -> None:
        """`scratch`: a folder for bodies that are coming in."""
        self._store = store
        self._database = database
        self._quotas = quotas
        self._incoming = Incoming(scratch)

    async def receive(
        self,
        tenant: str,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        num_bytes: int = 0,
        purpose: str | Callable[[], str] = "dataset",
        file_id: str | None = None,
    ) -> FileRecord:
        """Stream a body into the store, by way of a temporary file that is hashed as it grows.

        Args:
            num_bytes: the body's size, if the sender has announced it.
            purpose: the purpose, or a function that is called after the last chunk, when it may be known.
            file_id: the file's id; by default one that follows from content and name.

        Raises:
            InvalidInput: the name is no plain file name, or the body is empty.
            QuotaExceeded
        """
        if not _NAME.fullmatch(name):
            raise InvalidInput("a file name has letters, digits, dots, dashes and underscores: at most 128", "name")
        digest = hashlib.sha256()
        async with self._quotas.reservation(tenant) as reserved:
            await reserved.hold(num_bytes)
            async with self._incoming.received(tenant, chunks, partial(reserved.hold, grows=True), digest) as body:
                if not body.num_bytes:
                    raise InvalidInput("the file is empty", name)
                purpose = purpose if isinstance(purpose, str) else purpose()
                sha256 = digest.hexdigest()
                record = FileRecord(
                    file_id=file_id or _content_id(sha256, name, purpose),
                    tenant=tenant,
                    name=name,
                    purpose=purpose,
                    size=body.num_bytes,
                    sha256=sha256,
                    uri=uri_of(self._store, paths.upload(tenant, sha256, name)),
                    created_at=time.time(),
                )
                return await self._keep(record, body.path, reserved)

    async def _keep(self, record: FileRecord, file: Path, reserved: WriteReservation) -> FileRecord:
        key, data = _bytes_of(record), _json(record)
        of_record = paths.file_record(record.tenant, record.file_id)
        await reserved.hold(record.size + len(data))
        audit.touched(record.file_id)
        while True:
            is_there = await asyncio.to_thread(self._store.head, key) is not None
            if not is_there:
                await transferred(self._store.put_file, key, file)
            await reserved.settle(len(data) + (0 if is_there else record.size))
            await self._claim(record)
            # Bytes that were in the store may have been deleted with another file before: then they are put again.
            if await asyncio.to_thread(self._store.head, key) is None:
                continue
            is_new = await asyncio.to_thread(self._store.put_if_absent, of_record, data)
            known = record
            if not is_new:
                with suppress(NotFound):
                    known = FileRecord.model_validate_json(await asyncio.to_thread(self._store.get_bytes, of_record))
            if await self._database.writing(partial(_settled, known)):
                return known

    async def _claim(self, record: FileRecord) -> None:
        """Add a file's row, so that nobody deletes its bytes with another file. Waits for whoever is deleting them.

        Raises Conflict: that takes too long.
        """
        until = time.monotonic() + _PATIENCE_S
        while not await self._database.writing(partial(_claimed, record)):
            if time.monotonic() > until:
                raise Conflict("these bytes are being deleted with another file: ask again later")
            await asyncio.sleep(_POLL_S)

    async def show(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a tenant's file. Raises NotFound."""
        row = await self._database.reading(lambda session: session.get(FileRow, (file_id, tenant)))
        if row is None:
            raise NotFound(f"there is no file {file_id}")
        return _record(row)

    async def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> FilePage:
        """Files, newest first by default: those behind `after`, another page's `next` or a file's id.

        Raises NotFound: `after` is neither.
        """

        def work(session: Session) -> list[FileRow]:
            query = select(FileRow).where(FileRow.tenant == tenant)
            if purpose is not None:
                query = query.where(FileRow.purpose == purpose)
            if after is not None:
                place, at = tuple_(FileRow.created_at, FileRow.file_id), _place(session, tenant, after)
                query = query.where(place > at if oldest_first else place < at)
            columns = (FileRow.created_at, FileRow.file_id)
            order = columns if oldest_first else tuple(column.desc() for column in columns)
            return list(session.scalars(query.order_by(*order).limit(limit + 1)))

        rows = await self._database.reading(work)
        files = tuple(_record(row) for row in rows[:limit])
        has_more = len(rows) > limit
        # The cursor is a position, not a file, so that it stays valid when the last file is deleted.
        cursor = f"{files[-1].created_at!r}/{files[-1].file_id}" if has_more else None
        return FilePage(files=files, has_more=has_more, next=cursor)

    async def delete(self, tenant: str, file_id: str) -> FileRecord:
        """Delete a file, and its bytes with the last file that has them; a run that reads them then fails.

        During the deletion its row has a mark, since the store is never used within a transaction: a request may take
        seconds, and other tenants' writes would wait.
        """
        record = await self.show(tenant, file_id)
        audit.touched(file_id)

        def mark(session: Session) -> bool:
            _lock_tenant(session, tenant)
            same = select(FileRow).where(FileRow.tenant == tenant, FileRow.uri == record.uri)
            rows = session.scalars(same).all()
            for row in rows:
                if row.file_id == file_id:
                    row.deleted_at = time.time()
            return all(row.deleted_at for row in rows)

        was_last = await self._database.writing(mark)
        await asyncio.to_thread(self._store.delete, paths.file_record(tenant, file_id))
        if was_last:
            await asyncio.to_thread(self._store.delete, _bytes_of(record))
        gone = delete(FileRow).where(
            FileRow.tenant == tenant, FileRow.file_id == file_id, FileRow.deleted_at.is_not(None)
        )
        await self._database.writing(lambda session: session.execute(gone))
        self._quotas.remove_bytes(tenant, len(_json(record)) + (record.size if was_last else 0))
        return record

    def content(self, record: FileRecord) -> Iterator[bytes]:
        """Read a file's bytes, in pieces. Blocking."""
        key = _bytes_of(record)
        for start in range(0, record.size, _CHUNK_BYTES):
            yield self._store.read_range(key, start, min(_CHUNK_BYTES, record.size - start))


def _content_id(sha256: str, name: str, purpose: str) -> str:
    return f"file-{hashlib.sha256(f'{sha256}/{name}/{purpose}'.encode()).hexdigest()[:24]}"


def _json(record: FileRecord) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _bytes_of(record: FileRecord) -> str:
    return paths.upload(record.tenant, record.sha256, record.name)


def _claimed(record: FileRecord, session: Session) -> bool:
    """Add a file's row unless it is there; False while its bytes are being deleted."""
    _lock_tenant(session, record.tenant)
    same = select(FileRow).where(FileRow.tenant == record.tenant, FileRow.uri == record.uri)
    rows = session.scalars(same).all()
    if any(row.deleted_at and row.deleted_at > time.time() - _DELETED_WITHIN_S for row in rows):
        return False
    mine = next((row for row in rows if row.file_id == record.file_id), None)
    if mine is None:
        session.add(record.row())
    else:
        mine.deleted_at = None  # whoever began to delete it has died
    return True


def _settled(known: FileRecord, session: Session) -> bool:
    """Make a file's row equal to its record; False if it was deleted meanwhile."""
    _lock_tenant(session, known.tenant)
    row = session.get(FileRow, (known.file_id, known.tenant))
    if row is None or row.deleted_at:
        return False
    session.merge(known.row())
    return True


def _lock_tenant(session: Session, tenant: str) -> None:
    """Lock a tenant's row in a writing transaction, so that its files are kept and deleted one at a time.

    Several files may share their bytes, and the store has no transactions. (SQLite has one writer anyway.)
    """
    session.execute(select(TenantRow.tenant).where(TenantRow.tenant == tenant).with_for_update()).all()


def _place(session: Session, tenant: str, after: str) -> tuple[float, str]:
    created_at, _, file_id = after.rpartition("/")
    with suppress(ValueError):
        return float(created_at), file_id
    row = session.get(FileRow, (after, tenant))
    if row is None:
        raise NotFound(f"there is no file {after}")
    return row.created_at, row.file_id


def _record(row: FileRow) -> FileRecord:
    return FileRecord.model_validate(row, from_attributes=True)


@dataclass(frozen=True)
class PublishedFiles:
    """The files that a run published: only names in its manifest can be read. Blocking: call it from a thread."""

    store: ObjectStore
    key: str
    manifest_data: bytes
    manifest: Manifest

    @classmethod
    def of(cls, status: RunStatus, s3: S3Settings) -> Self:
        """Open a run's published model. Raises Conflict if it has published nothing."""
        if status.adapter is None or status.adapter_sha256 is None:
            raise Conflict(f"{status.run_id} has published nothing: it is {status.state}, {status.phase}")
        store, key = open_uri(status.adapter, s3)
        key = key.rstrip("/")
        manifest = artifacts.read_manifest(store, key, status.adapter_sha256)
        return cls(store, key, store.get_bytes(f"{key}/{paths.MANIFEST}"), manifest)

    @classmethod
    def of_artifact(cls, artifact: Artifact, s3: S3Settings) -> Self:
        """Open an artifact's files at the places in its manifest. Raises CorruptArtifact."""
        store, key = open_uri(artifact.uri, s3)
        manifest = artifacts.read_manifest(store, key.rstrip("/"), artifact.sha256)
        store, key = open_uri(manifest.root or artifact.uri, s3)
        return cls(store, key.rstrip("/"), b"", manifest)

    def entry(self, path: str) -> FileEntry:
        """Return a file's path, size and hash. Raises NotFound for a file that the manifest does not list."""
        for entry in self.entries:
            if entry.path == path:
                return entry
        raise NotFound(f"there is no file {path} in what the run published")

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """Return the manifest's files, and the manifest itself if it is stored with them."""
        if not self.manifest_data:
            return self.manifest.files
        itself = FileEntry(
            path=paths.MANIFEST, size=len(self.manifest_data), sha256=hashlib.sha256(self.manifest_data).hexdigest()
        )
        return (*self.manifest.files, itself)

    def content(self, entry: FileEntry) -> Iterator[bytes]:
        for start in range(0, entry.size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, entry.size - start)
            piece = self.store.read_range(f"{self.key}/{entry.path}", start, length)
            if len(piece) != length:  # the answer's length has been sent: break it off
                raise NotFound(f"{entry.path} ends early")
            yield piece

    def tar(self, folder: str) -> Iterator[bytes]:
        """The files as an uncompressed tar, below one folder; equal contents give equal bytes."""
        for entry in self.entries:
            yield _tar_header(folder, entry)
            yield from self.content(entry)
            yield b"\0" * (-entry.size % tarfile.BLOCKSIZE)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)

    def tar_bytes(self, folder: str) -> int:
        """Return the size of that tar in bytes."""
        sizes = (len(_tar_header(folder, e)) + e.size + -e.size % tarfile.BLOCKSIZE for e in self.entries)
        return sum(sizes) + 2 * tarfile.BLOCKSIZE


def _tar_header(folder: str, entry: FileEntry) -> bytes:
    header = tarfile.TarInfo(f"{folder}/{entry.path}")
    header.size = entry.size
    return header.tobuf(tarfile.PAX_FORMAT)


async def transferred(move: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `move` on a thread for transfers, so that these, which may take minutes, do not use up the other threads."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(move, *args, **kwargs))


# --- Files uploaded in parts, one request each. The parts are joined when the client lists them in order ---

MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000
EXPIRES_S = 3600.0
_KEPT_S = 86_400.0

_UPLOAD_ID = re.compile(r"upload_[0-9a-f]{24}")
_PART_ID = re.compile(r"part_[0-9a-f]{24}")

State = Literal["pending", "completed", "cancelled", "expired"]


class UploadRecord(Frozen):
    """An upload, as the store keeps it. `size`: of the file, as its sender announced it."""

    upload_id: str
    tenant: Tenant
    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float
    state: State = "pending"
    file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state == "pending" and self.expires_at <= time.time()


class UploadPart(Frozen):
    """A part in the store."""

    part_id: str
    upload_id: str
    created_at: float


class Uploads:
    """Uploads in parts. Those of other tenants are not found. They have no rows in the database: nothing lists them."""

    def __init__(self, store: ObjectStore, files: Files, quotas: Quotas, scratch: Path) -> None:
        """`scratch`: a folder for parts that are coming in."""
        self._store = store
        self._files = files
        self._quotas = quotas
        self._incoming = Incoming(scratch)
        self._locks = KeyedLocks()  # held while an upload is completed or cancelled

    async def create(self, tenant: str, *, name: str, purpose: str, size: int) -> UploadRecord:
        """Begin an upload of `size` bytes. Raises QuotaExceeded when the file would have no room."""
        await self._quotas.admit_bytes(tenant, size)
        now = time.time()
        record = UploadRecord(
            upload_id=f"upload_{secrets.token_hex(12)}",
            tenant=tenant,
            name=name,
            purpose=purpose,
            size=size,
            created_at=now,
            expires_at=now + EXPIRES_S,
        )
        await self._put(record)
        return record

    async def show(self, tenant: str, upload_id: str) -> UploadRecord:
        """Return a tenant's upload and its state. Raises NotFound."""
        if _UPLOAD_ID.fullmatch(upload_id):
            with suppress(NotFound):
                data = await asyncio.to_thread(self._store.get_bytes, paths.chunked_upload(tenant, upload_id))
                record = UploadRecord.model_validate_json(data)
                return record.model_copy(update={"state": "expired"}) if record.is_over else record
        raise NotFound(f"there is no upload {upload_id[:64]}")

    async def add_part(self, tenant: str, upload_id: str, chunks: AsyncIterator[bytes]) -> UploadPart:
        """Store a part. Raises InvalidInput if it is empty or too large, Conflict if the upload has ended."""
        await self._pending(tenant, upload_id)
        part = UploadPart(part_id=f"part_{secrets.token_hex(12)}", upload_id=upload_id, created_at=time.time())
        async with self._quotas.reservation(tenant) as reserved:

            async def admit(size: int) -> None:
                if size > MAX_PART_BYTES:
                    raise InvalidInput(f"a part has at most {MAX_PART_BYTES} bytes", "data")
                await reserved.hold(size, grows=True)

            async with self._incoming.received(tenant, chunks, admit) as body:
                if not body.num_bytes:
                    raise InvalidInput("the part is empty", "data")
                key = paths.upload_part(tenant, upload_id, part.part_id)
                await transferred(self._store.put_file, key, body.path)
            await reserved.settle(body.num_bytes)
        return part

    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[UploadRecord, FileRecord]:
        """Make a file of the parts, in this order. A repeated call returns the same file.

        Raises:
            InvalidInput: a part is missing, or the number or hash of the bytes is not the announced one.
            Conflict: the upload was cancelled, or has expired.
        """
        async with self._locks.of(upload_id):
            record = await self.show(tenant, upload_id)
            if record.state == "completed" and record.file_id is not None:
                return record, await self._files.show(tenant, record.file_id)
            record = await self._pending(tenant, upload_id)
            try:
                file = await self._join(record, part_ids, md5)
            except (InvalidInput, NotFound):
                # Another process may have completed it since, and dropped the parts.
                with suppress(NotFound):
                    return await self._end(record, await self._files.show(tenant, _file_id(upload_id)))
                raise
            return await self._end(record, file)

    async def _join(self, record: UploadRecord, part_ids: Sequence[str], md5: str | None) -> FileRecord:
        sizes = await asyncio.to_thread(self._sizes, record.tenant, record.upload_id, part_ids)
        if sum(sizes) != record.size:
            raise InvalidInput(f"the parts have {sum(sizes)} bytes, and {record.size} were announced", "part_ids")
        # The expiry is put off, so that no process prunes the parts while they are joined.
        await self._put(record.model_copy(update={"expires_at": time.time() + EXPIRES_S}))
        keys = [paths.upload_part(record.tenant, record.upload_id, part_id) for part_id in part_ids]
        chunks, file_id = self._joined(keys, sizes, md5), _file_id(record.upload_id)
        return await self._files.receive(
            record.tenant, record.name, chunks, num_bytes=record.size, purpose=record.purpose, file_id=file_id
        )

    async def _end(self, record: UploadRecord, file: FileRecord) -> tuple[UploadRecord, FileRecord]:
        record = record.model_copy(update={"state": "completed", "file_id": file.file_id})
        await self._put(record)
        await self._drop_parts(record.tenant, record.upload_id)
        return record, file

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        """Cancel an upload. Raises Conflict when it is complete, or has expired."""
        async with self._locks.of(upload_id):
            record = await self.show(tenant, upload_id)
            if record.state != "cancelled":
                record = (await self._pending(tenant, upload_id)).model_copy(update={"state": "cancelled"})
                await self._put(record)
                await self._drop_parts(tenant, upload_id)
            return record

    async def _pending(self, tenant: str, upload_id: str) -> UploadRecord:
        record = await self.show(tenant, upload_id)
        if record.state != "pending":
            raise Conflict(f"{upload_id} is {record.state}")
        return record

    async def _put(self, record: UploadRecord) -> None:
        audit.touched(record.upload_id)
        key, data = paths.chunked_upload(record.tenant, record.upload_id), record.model_dump_json(indent=1).encode()
        await self._quotas.put_record(record.tenant, key, data)

    def _sizes(self, tenant: str, upload_id: str, part_ids: Sequence[str]) -> list[int]:
        sizes = []
        for number, part_id in enumerate(part_ids):
            known = _PART_ID.fullmatch(part_id) is not None
            info = self._store.head(paths.upload_part(tenant, upload_id, part_id)) if known else None
            if info is None:
                raise InvalidInput(f"{upload_id} has no part {part_id[:64]}", f"part_ids.{number}")
            sizes.append(info.size)
        return sizes

    async def _joined(self, keys: Sequence[str], sizes: Sequence[int], md5: str | None) -> AsyncIterator[bytes]:
        digest = hashlib.md5(usedforsecurity=False)

        def read(key: str, start: int, length: int) -> bytes:
            chunk = self._store.read_range(key, start, length)
            digest.update(chunk)
            return chunk

        for key, size in zip(keys, sizes, strict=True):
            for start in range(0, size, _CHUNK_BYTES):
                yield await asyncio.to_thread(read, key, start, min(_CHUNK_BYTES, size - start))
        if md5 is not None and digest.hexdigest() != md5.lower():
            raise InvalidInput(f"the bytes that came have the MD5 sum {digest.hexdigest()}", "md5")

    async def _drop_parts(self, tenant: str, upload_id: str) -> None:
        freed = await asyncio.to_thread(self._delete_all, paths.upload_part(tenant, upload_id))
        self._quotas.remove_bytes(tenant, freed)

    def _delete_all(self, prefix: str) -> int:
        freed = 0
        for item in list(self._store.list(prefix)):
            self._store.delete(item.key)
            freed += item.size
        return freed

    def prune(self) -> None:
        """Drop the parts of uploads that ended or have expired, and after a day their records. Blocking."""
        for item in list(self._store.list(paths.chunked_upload(""))):
            record = UploadRecord.model_validate_json(self._store.get_bytes(item.key))
            if record.state != "pending" or record.is_over:
                # Also if the upload ended: a part may have come late, or a service may have died before deleting them.
                self._delete_all(paths.upload_part(record.tenant, record.upload_id))
                if record.expires_at + _KEPT_S <= time.time():
                    self._store.delete(item.key)


def _file_id(upload_id: str) -> str:
    """Return the id of an upload's file, the same however often it is completed."""
    return f"file-{upload_id.removeprefix('upload_')}"
