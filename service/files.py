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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar

from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from longshore.accounts import FilePage, FileView
from longshore.fields import Artifact, Frozen
from longshore.runs import Tenant
from longshore.views import FileEntry, RunStatus
from service.accounts import audit
from service.accounts.tenants import PARTS, Documents, Quotas, Reservation, add_stored, forget_stored, lock_tenant
from service.database.engine import Database, FileRow, KeyedLocks
from shared.errors import Conflict, InvalidInput, NotFound
from shared.settings import S3Settings
from shared.storage import artifacts, paths
from shared.storage.artifacts import Manifest
from shared.storage.store import ObjectStore, uri_of

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
_UNFINISHED_S = 86_400.0  # longer than a file is written
_threads = ThreadPoolExecutor(_TRANSFERS_AT_ONCE, "transfers")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Mismatch:
    """How files and the store differ.

    `unnamed`: keys of uploads that belong to no file. `missing`: files whose bytes are not there, as `tenant/file_id`.
    """

    unnamed: tuple[str, ...]
    missing: tuple[str, ...]


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
    ) -> FileView:
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
                record = FileView(
                    file_id=file_id or f"file-{hashlib.sha256(f'{sha256}/{name}/{purpose}'.encode()).hexdigest()[:24]}",
                    tenant=tenant,
                    name=name,
                    purpose=purpose,
                    size=body.num_bytes,
                    sha256=sha256,
                    uri=uri_of(self._store, paths.upload(tenant, sha256, name)),
                    created_at=time.time(),
                )
                return await self._keep(record, body.path, reserved)

    async def _keep(self, record: FileView, file: Path, reserved: Reservation) -> FileView:
        """Put a file's bytes between two transactions: its row claims them before, and is found after."""
        await reserved.hold(record.size)
        audit.touched(record.file_id)
        key = _bytes_of(record)
        while True:
            claimed_at = await self._claim(record)
            if await asyncio.to_thread(self._store.head, key) is None:
                await transferred(self._store.put_file, key, file)
            kept = await self._database.writing(partial(_kept, record, claimed_at, reserved))
            if kept is not None:  # else somebody has deleted the file meanwhile, perhaps with its bytes
                return kept

    async def _claim(self, record: FileView) -> float:
        """Add a file's row, so that nobody deletes its bytes with another file. Waits for whoever is deleting them.

        Returns since when the row is claimed. Raises Conflict: that takes too long.
        """
        until = time.monotonic() + _PATIENCE_S
        while (claimed_at := await self._database.writing(partial(_claimed, record))) is None:
            if time.monotonic() > until:
                raise Conflict("these bytes are being deleted with another file: ask again later")
            await asyncio.sleep(_POLL_S)
        return claimed_at

    async def show(self, tenant: str, file_id: str) -> FileView:
        """Return the record of a tenant's file. Raises NotFound."""
        return _record(await self._database.reading(partial(_row, tenant, file_id)))

    async def page(
        self,
        tenant: str,
        *,
        limit: int = 100,
        after: str | None = None,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> FilePage:
        """List uploaded files, newest first by default: those behind `after`, another page's `next` or a file's id.

        Raises NotFound: `after` is neither.
        """

        def work(session: Session) -> list[FileRow]:
            query = select(FileRow).where(FileRow.tenant == tenant, FileRow.state == "kept")
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

    async def delete(self, tenant: str, file_id: str) -> FileView:
        """Delete a file, and its bytes with the last file that has them; a run that reads them then fails.

        Its row is marked before and removed after. No transaction is open meanwhile: a request to the store may take
        seconds, and other tenants' writes would wait.
        """

        def mark(session: Session) -> tuple[FileRow, bool]:
            lock_tenant(session, tenant)
            row = _row(tenant, file_id, session, states=("writing", "kept", "deleting"))
            row.state, row.state_at = "deleting", time.time()
            same = session.scalars(select(FileRow).where(FileRow.tenant == tenant, FileRow.uri == row.uri)).all()
            return row, all(each.state == "deleting" for each in same)

        row, was_last = await self._database.writing(mark)
        audit.touched(file_id)
        record = _record(row)
        if was_last:
            await asyncio.to_thread(self._store.delete, _bytes_of(record))
        gone = delete(FileRow).where(FileRow.tenant == tenant, FileRow.file_id == file_id, FileRow.state == "deleting")
        await self._database.writing(lambda session: session.execute(gone))
        return record

    async def prune(self) -> None:
        """Delete files that a service was writing or deleting when it died."""
        unfinished = FileRow.state.in_(("writing", "deleting")) & (FileRow.state_at < time.time() - _UNFINISHED_S)
        for row in await self._database.reading(lambda s: s.scalars(select(FileRow).where(unfinished)).all()):
            with suppress(NotFound):  # another service has just deleted it
                await self.delete(row.tenant, row.file_id)

    async def compare(self) -> Mismatch:
        """Compare files with the store, except for files younger than a day.

        They differ if one of both was restored from an older backup.
        """
        before = time.time() - _UNFINISHED_S
        rows = await self._database.reading(lambda session: session.scalars(select(FileRow)).all())
        stored = await asyncio.to_thread(lambda: {info.key: info for info in self._store.list(paths.tenant_folder())})
        named = {paths.upload(row.tenant, row.sha256, row.name) for row in rows}
        uploads = [key for key, info in stored.items() if key.split("/")[2] == "uploads" and info.modified < before]
        missing = [row for row in rows if row.state_at < before and _bytes_of(_record(row)) not in stored]
        return Mismatch(
            unnamed=tuple(key for key in uploads if key not in named),
            missing=tuple(f"{row.tenant}/{row.file_id}" for row in missing),
        )

    def content(self, record: FileView) -> Iterator[bytes]:
        """Read a file's bytes, in pieces. Blocking."""
        key = _bytes_of(record)
        for start in range(0, record.size, _CHUNK_BYTES):
            yield self._store.read_range(key, start, min(_CHUNK_BYTES, record.size - start))


def _bytes_of(record: FileView) -> str:
    return paths.upload(record.tenant, record.sha256, record.name)


def _claimed(record: FileView, session: Session) -> float | None:
    """Add a file's row unless it is there. Returns its `state_at`; None while its bytes are being deleted."""
    lock_tenant(session, record.tenant)
    same = select(FileRow).where(FileRow.tenant == record.tenant, FileRow.uri == record.uri)
    rows = session.scalars(same).all()
    if any(row.state == "deleting" and row.state_at > time.time() - _DELETED_WITHIN_S for row in rows):
        return None
    row = session.get(FileRow, (record.file_id, record.tenant))
    if row is None:
        row = FileRow(**dict(record), state="writing", state_at=time.time())
        session.add(row)
    elif row.state == "deleting":  # whoever was deleting it has died
        row.state, row.state_at = "writing", time.time()
    return row.state_at


def _kept(record: FileView, claimed_at: float, reserved: Reservation, session: Session) -> FileView | None:
    """Let a file be found whose bytes are there; None if it was deleted since it was claimed."""
    row = session.get(FileRow, (record.file_id, record.tenant), with_for_update=True)
    if row is None or row.state == "deleting" or row.state_at != claimed_at:
        return None
    row.state = "kept"
    reserved.settle(session)  # from here on the file's row counts
    return _record(row)


def _row(tenant: str, file_id: str, session: Session, states: tuple[str, ...] = ("kept",)) -> FileRow:
    row = session.get(FileRow, (file_id, tenant))
    if row is None or row.state not in states:
        raise NotFound(f"there is no file {file_id}")
    return row


def _place(session: Session, tenant: str, after: str) -> tuple[float, str]:
    created_at, _, file_id = after.rpartition("/")
    with suppress(ValueError):
        return float(created_at), file_id
    row = _row(tenant, after, session)
    return row.created_at, row.file_id


def _record(row: FileRow) -> FileView:
    return FileView.model_validate(row, from_attributes=True)


@dataclass(frozen=True)
class PublishedFiles:
    """The files that a run published: only names in its manifest can be read. Blocking: call it from a thread."""

    store: ObjectStore
    manifest: Manifest
    manifest_data: bytes = b""

    @classmethod
    def of(cls, status: RunStatus, s3: S3Settings) -> Self:
        """Open a run's published model. Raises Conflict if it has published nothing."""
        if status.adapter is None or status.adapter_sha256 is None:
            raise Conflict(f"{status.run_id} has published nothing: it is {status.state}, {status.phase}")
        files = cls.of_artifact(Artifact(uri=status.adapter, sha256=status.adapter_sha256), s3)
        return replace(files, manifest_data=files.store.get_bytes(paths.MANIFEST))

    @classmethod
    def of_artifact(cls, artifact: Artifact, s3: S3Settings) -> Self:
        """Open an artifact's files at the places in its manifest. Raises CorruptArtifact."""
        return cls(*artifacts.open_artifact(artifact, s3))

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
            piece = self.store.read_range(entry.path, start, length)
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
_JOINED_WITHIN_S = 600.0

_PART_ID = re.compile(r"part_[0-9a-f]{24}")

State = Literal["pending", "completed", "cancelled", "expired"]


class UploadRecord(Frozen):
    """An upload. `size`: of the file, as its sender announced it. `joined_at`: when its parts were joined last."""

    upload_id: str
    tenant: Tenant
    name: str
    purpose: str
    size: int
    created_at: float
    expires_at: float
    state: State = "pending"
    file_id: str | None = None
    joined_at: float | None = None

    @property
    def current_state(self) -> State:
        return "expired" if self.state == "pending" and self.expires_at <= time.time() else self.state


class UploadPart(Frozen):
    """A part in the store."""

    part_id: str
    upload_id: str
    created_at: float


class Uploads:
    """Uploads in parts. Those of other tenants are not found."""

    def __init__(self, store: ObjectStore, database: Database, files: Files, quotas: Quotas, scratch: Path) -> None:
        """`scratch`: a folder for parts that are coming in."""
        self._store = store
        self._database = database
        self._files = files
        self._quotas = quotas
        self._records = Documents(database, quotas, "upload", UploadRecord)
        self._incoming = Incoming(scratch)

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
        audit.touched(record.upload_id)
        await self._records.put(tenant, record.upload_id, record)
        return record

    async def show(self, tenant: str, upload_id: str) -> UploadRecord:
        """Return a tenant's upload and its state. Raises NotFound."""
        record = await self._records.get(tenant, upload_id)
        return record.model_copy(update={"state": record.current_state})

    async def add_part(self, tenant: str, upload_id: str, chunks: AsyncIterator[bytes]) -> UploadPart:
        """Store a part. Raises InvalidInput if it is empty or too large, Conflict if the upload has ended."""
        _check_pending(await self.show(tenant, upload_id))
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

            def note(session: Session) -> None:
                lock_tenant(session, tenant)
                reserved.settle(session)
                add_stored(session, tenant, PARTS, upload_id, body.num_bytes)

            await self._database.writing(note)
        return part

    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[UploadRecord, FileView]:
        """Make a file of the parts, in this order. A repeated call returns the same file.

        Raises:
            InvalidInput: a part is missing, or the number or hash of the bytes is not the announced one.
            Conflict: the upload was cancelled, or has expired.
        """
        record = await self.show(tenant, upload_id)
        if record.state == "completed" and record.file_id is not None:
            return record, await self._files.show(tenant, record.file_id)
        _check_pending(record)
        try:
            file = await self._join(record, part_ids, md5)
        except (InvalidInput, NotFound):
            # Another request may have completed it since, and dropped the parts.
            with suppress(NotFound):
                return await self._end(record, await self._files.show(tenant, _file_id(upload_id)))
            raise
        return await self._end(record, file)

    async def _join(self, record: UploadRecord, part_ids: Sequence[str], md5: str | None) -> FileView:
        sizes = await asyncio.to_thread(self._sizes, record.tenant, record.upload_id, part_ids)
        if sum(sizes) != record.size:
            raise InvalidInput(f"the parts have {sum(sizes)} bytes, and {record.size} were announced", "part_ids")

        def begin(before: UploadRecord) -> UploadRecord:
            _check_pending(before)
            # The expiry is put off, so that no process prunes the parts while they are joined.
            return before.model_copy(update={"joined_at": time.time(), "expires_at": time.time() + EXPIRES_S})

        await self._records.change(record.tenant, record.upload_id, begin)
        keys = [paths.upload_part(record.tenant, record.upload_id, part_id) for part_id in part_ids]
        chunks, file_id = self._joined(keys, sizes, md5), _file_id(record.upload_id)
        return await self._files.receive(
            record.tenant, record.name, chunks, num_bytes=record.size, purpose=record.purpose, file_id=file_id
        )

    async def _end(self, record: UploadRecord, file: FileView) -> tuple[UploadRecord, FileView]:
        audit.touched(record.upload_id)
        changes = {"state": "completed", "file_id": file.file_id}
        record = await self._records.change(record.tenant, record.upload_id, lambda r: r.model_copy(update=changes))
        await self._drop_parts(record.tenant, record.upload_id)
        return record, file

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        """Cancel an upload. Raises Conflict when it is complete, is being completed, or has expired."""

        def end(before: UploadRecord) -> UploadRecord:
            if before.state == "cancelled":
                return before
            _check_pending(before)
            if before.joined_at is not None and before.joined_at > time.time() - _JOINED_WITHIN_S:
                raise Conflict(f"{upload_id} is being completed")
            return before.model_copy(update={"state": "cancelled"})

        record = await self._records.change(tenant, upload_id, end)
        audit.touched(upload_id)
        await self._drop_parts(tenant, upload_id)
        return record

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
        for item in await asyncio.to_thread(lambda: list(self._store.list(paths.upload_part(tenant, upload_id)))):
            await asyncio.to_thread(self._store.delete, item.key)
        await self._database.writing(lambda session: forget_stored(session, tenant, PARTS, upload_id))

    async def prune(self) -> None:
        """Drop the parts of uploads that ended or have expired, and after a day their records."""
        for tenant, record in await self._records.everybodys():
            if record.current_state != "pending":
                # Also if the upload ended: a part may have come late, or a service may have died before deleting them.
                await self._drop_parts(tenant, record.upload_id)
                if record.expires_at + _KEPT_S <= time.time():
                    await self._records.delete(tenant, record.upload_id)


def _check_pending(record: UploadRecord) -> None:
    if record.current_state != "pending":
        raise Conflict(f"{record.upload_id} is {record.current_state}")


def _file_id(upload_id: str) -> str:
    """Return the id of an upload's file, the same however often it is completed."""
    return f"file-{upload_id.removeprefix('upload_')}"
