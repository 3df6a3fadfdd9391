"""Files uploaded in parts, one request each. The parts are joined when the client lists them in order."""

import asyncio
import hashlib
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.database.locks import KeyedLocks
from service.errors import Conflict
from service.files.files import FileRecord, Files, transferred
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import Tenant
from shared.storage import paths
from shared.storage.store import ObjectStore

MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000
EXPIRES_S = 3600.0
_KEPT_S = 86_400.0
_CHUNK_BYTES = 1 << 20
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
        self._scratch = scratch
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
        await asyncio.to_thread(self._scratch.mkdir, parents=True, exist_ok=True)
        size = 0
        async with self._quotas.reservation(tenant) as reserved:
            with tempfile.NamedTemporaryFile(dir=self._scratch) as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_PART_BYTES:
                        raise InvalidInput(f"a part has at most {MAX_PART_BYTES} bytes", "data")
                    await reserved.hold(size, grows=True)
                    await asyncio.to_thread(file.write, chunk)
                if not size:
                    raise InvalidInput("the part is empty", "data")
                file.flush()
                key = paths.upload_part(tenant, upload_id, part.part_id)
                await transferred(self._store.put_file, key, Path(file.name))
            await reserved.settle(size)
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
        for key, size in zip(keys, sizes, strict=True):
            for start in range(0, size, _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, size - start)
                chunk = await asyncio.to_thread(self._store.read_range, key, start, length)
                digest.update(chunk)
                yield chunk
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
