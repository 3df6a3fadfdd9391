"""`/v1/files`: data for jobs, and the files that jobs made; `/v1/uploads`: a file in parts of at most 64 MiB."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Annotated, Any, Literal

from anyio import BrokenResourceError, create_memory_object_stream
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import APIRouter, Depends, Query, Request, Response, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from longshore.accounts import FileView
from longshore.fields import Frozen, pattern
from service.accounts.keys import Asking, reads_or_writes, require
from service.apis.bodies import JsonBody, JsonRoute, ListAnswer, RecordView, Seconds, page_of
from service.apis.openai import jobs
from service.backend import Backed, Backend
from service.files import MAX_PARTS
from shared.errors import InvalidInput, NotFound

# --- Reads forms with one file (multipart/form-data) by Starlette's parser, and streams the file ---

_MAX_FIELDS = 32
_MAX_BOUNDARY_BYTES = 70  # RFC 2046, 5.1.1
_MAX_FIELD_BYTES = 8 << 10

BINARY = {"type": "string", "format": "binary"}


def described(**fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a form with these required fields, since FastAPI does not see how it is read."""
    schema = {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class _HandedOn(UploadFile):
    """A pipe of one piece: its writer waits until the reader has taken the piece."""

    def __init__(self, pieces: MemoryObjectSendStream[bytes]) -> None:
        super().__init__(BytesIO())
        self._pieces = pieces

    async def write(self, data: bytes) -> None:
        await self._pieces.send(data)


class FileForm(MultiPartParser):
    """A form with one file, and fields before or after it: `fields` is complete when `chunks` has ended."""

    def __init__(self, content_type: str | None, body: AsyncGenerator[bytes, None], file_field: str) -> None:
        """Raises InvalidInput for a content type of another kind. `file_field`: the name of the form's one file."""
        kind, options = parse_options_header(content_type or "")
        if kind != b"multipart/form-data" or not 0 < len(options.get(b"boundary", b"")) <= _MAX_BOUNDARY_BYTES:
            raise InvalidInput("send a form: content-type multipart/form-data, with a boundary", "content-type")
        headers = Headers({"content-type": content_type or ""})
        super().__init__(headers, body, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
        self._file_field = file_field
        self._filename: str | None = None
        self._is_whole = False
        self._has_begun = asyncio.Event()
        self._sent, self._pieces = create_memory_object_stream[bytes](0)
        self._reading = asyncio.create_task(self._read())

    @property
    def fields(self) -> dict[str, str]:
        return {name: value for name, value in self.items if isinstance(value, str)}

    async def find_file(self) -> str:
        """Read up to the file, and return its name. Raises InvalidInput when there is none."""
        await self._has_begun.wait()
        if self._filename is None:
            await self._reading
            raise InvalidInput("the form has no such file", self._file_field)
        return self._filename

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file's bytes, then read the rest of the form. Raises InvalidInput for a form that is cut off."""
        async for piece in self._pieces:
            yield piece
        await self._reading

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._pieces.close()

    async def _read(self) -> None:
        try:
            with self._sent:
                await self.parse()
        except MultiPartException as error:
            raise InvalidInput(f"the form cannot be read: {error.message}", self._file_field) from None
        except BrokenResourceError:  # the reader was closed
            return
        finally:
            self._has_begun.set()
        if not self._is_whole:
            raise InvalidInput("the form ends early", self._file_field)

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        is_file = part.field_name == self._file_field  # with a file name or without
        if is_file and self._filename is None:
            self._filename, part.file = (part.file and part.file.filename) or "", _HandedOn(self._sent)
            self._has_begun.set()
        elif is_file or part.file is not None or part.field_name in self.fields:
            raise MultiPartException(f"{part.field_name or 'a field without a name'} is not expected, or stands twice")

    def on_end(self) -> None:
        self._is_whole = True


@asynccontextmanager
async def file_form(request: Request, file_field: str) -> AsyncIterator[FileForm]:
    """Read a request's form, as far as the block needs it. Raises InvalidInput for a body that is not a form."""
    form = FileForm(request.headers.get("content-type"), request.stream(), file_field)
    try:
        yield form
    finally:
        await form.close()


router = APIRouter(prefix="/v1", tags=["files"], dependencies=[Depends(reads_or_writes)])

PURPOSES = ("fine-tune", "evals", "user_data")
MAX_NAME = 128
_FORM = described(file=BINARY, purpose={"type": "string", "enum": list(PURPOSES)})
_PART_FORM = described(data=BINARY)
uploads = APIRouter(
    route_class=JsonRoute, prefix="/v1/uploads", tags=["uploads"], dependencies=[Depends(require("write"))]
)


class FileObject(RecordView):
    """A file as clients see it. The same bytes, sent again, are another file, which can be deleted on its own."""

    id: str = Field(validation_alias="file_id")
    object: Literal["file"] = "file"
    bytes: int = Field(validation_alias="size")
    created_at: Seconds
    filename: str = Field(validation_alias="name")
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None
    expires_at: None = None


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


@router.post("/files", openapi_extra=_FORM)
async def create_file(request: Request, asking: Asking, backend: Backed) -> FileObject:
    """Upload a file, as a form."""
    length = request.headers.get("content-length", "0")
    async with file_form(request, "file") as form:

        def purpose() -> str:
            if unknown := sorted(form.fields.keys() - {"purpose"}):
                raise InvalidInput("unknown field: files are kept until they are deleted", unknown[0])
            return checked_purpose(form.fields.get("purpose", ""))

        record = await backend.files.receive(
            asking.tenant,
            plain_name(await form.find_file()),
            form.chunks(),
            num_bytes=int(length) if length.isdecimal() else 0,
            purpose=purpose,
            file_id=f"file-{secrets.token_hex(12)}",
        )
    return FileObject.of(record)


def checked_purpose(purpose: str) -> str:
    """Return a file's purpose. Raises InvalidInput if it is not supported."""
    if purpose not in PURPOSES:
        raise InvalidInput(f"a purpose is one of {', '.join(PURPOSES)}: nothing here reads files of another", "purpose")
    return purpose


def plain_name(filename: str) -> str:
    """Return a file name that the store takes: without folders, and with _ for characters that it refuses."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", re.split(r"[/\\]", filename)[-1])[-MAX_NAME:]
    name = re.sub(r"^[.-]", "_", name)
    return name or "file"


@router.get("/files")
async def list_files(
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=64, description="the id of the previous page's last file")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(pattern=r"^[a-z_-]{1,64}$")] = None,
) -> ListAnswer[FileObject]:
    """Your tenant's files by age. Files that jobs made are listed with their jobs."""
    if after is not None:
        await _shown(backend, asking.tenant, after)
    page = await backend.files.page(
        asking.tenant, limit=limit, after=after, purpose=purpose, oldest_first=order == "asc"
    )
    return page_of([FileObject.of(record) for record in page.files], page.has_more)


@router.get("/files/{file_id}")
async def get_file(file_id: str, asking: Asking, backend: Backed) -> FileObject:
    """Show an uploaded file, or one that a job made."""
    if jobs.is_result(file_id):
        return FileObject.of(await jobs.find_result_file(backend, asking.tenant, file_id))
    return FileObject.of(await _shown(backend, asking.tenant, file_id))


@router.get("/files/{file_id}/content", response_class=Response)
async def file_content(file_id: str, asking: Asking, backend: Backed) -> StreamingResponse:
    """The bytes of a file."""
    if jobs.is_result(file_id):
        found = await jobs.find_result_file(backend, asking.tenant, file_id)
        size, pieces = found.size, found.content()
    else:
        record = await _shown(backend, asking.tenant, file_id)
        size, pieces = record.size, backend.files.content(record)
    headers = {"content-length": str(size)}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


async def _shown(backend: Backend, tenant: str, file_id: str) -> FileView:
    """Raises NotFound."""
    if not jobs.FILE_ID.fullmatch(file_id):
        raise NotFound(f"there is no file {file_id[:64]}")
    return await backend.files.show(tenant, file_id)


@router.delete("/files/{file_id}")
async def delete_file(file_id: str, asking: Asking, backend: Backed) -> DeletedFile:
    """Delete a file. A job's result files are only deleted with the job."""
    if jobs.is_result(file_id):
        await jobs.find_result_file(backend, asking.tenant, file_id)
        raise InvalidInput("this file belongs to a job, and is kept as long as the job", "file_id")
    await _shown(backend, asking.tenant, file_id)
    await backend.files.delete(asking.tenant, file_id)
    return DeletedFile(id=file_id)


class UploadRequest(Frozen):
    """The announcement of a file."""

    filename: str = Field(min_length=1, max_length=1024)
    purpose: str = Field(max_length=64)
    size: int = Field(alias="bytes", ge=1, le=1 << 40)
    mime_type: str = Field(max_length=256, description="ignored: the format is detected from the content")


class CompleteUpload(Frozen):
    """The parts in the order of the file, and what it must be."""

    part_ids: tuple[Annotated[str, Field(max_length=64)], ...] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = pattern(r"^[0-9a-fA-F]{32}$", "an MD5 has 32 hex digits", default=None)


class UploadObject(RecordView):
    """An upload as clients see it."""

    id: str = Field(validation_alias="upload_id")
    object: Literal["upload"] = "upload"
    bytes: int = Field(validation_alias="size")
    created_at: Seconds
    expires_at: Seconds
    filename: str = Field(validation_alias="name")
    purpose: str
    status: str = Field(validation_alias="state")
    file: FileObject | None = None


class PartObject(RecordView):
    id: str = Field(validation_alias="part_id")
    object: Literal["upload.part"] = "upload.part"
    created_at: Seconds
    upload_id: str


@uploads.post("")
async def create_upload(body: JsonBody[UploadRequest], asking: Asking, backend: Backed) -> UploadObject:
    """Announce a file. Its parts are awaited for an hour."""
    if body.size > (most := backend.settings.download.max_bytes):
        raise InvalidInput(f"a file has at most {most} bytes here", "bytes")
    record = await backend.uploads.create(
        asking.tenant, name=plain_name(body.filename), purpose=checked_purpose(body.purpose), size=body.size
    )
    return UploadObject.of(record)


@uploads.post("/{upload_id}/parts", openapi_extra=_PART_FORM)
async def add_part(upload_id: str, request: Request, asking: Asking, backend: Backed) -> PartObject:
    """Send one part, as a form. Parts may come in any order, several at a time, and more than once."""
    async with file_form(request, "data") as form:
        await form.find_file()
        return PartObject.of(await backend.uploads.add_part(asking.tenant, upload_id, form.chunks()))


@uploads.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: JsonBody[CompleteUpload], asking: Asking, backend: Backed
) -> UploadObject:
    """Make a file of the parts."""
    record, file = await backend.uploads.complete(asking.tenant, upload_id, body.part_ids, body.md5)
    return UploadObject.of(record).model_copy(update={"file": FileObject.of(file)})


@uploads.post("/{upload_id}/cancel")
async def cancel_upload(upload_id: str, asking: Asking, backend: Backed) -> UploadObject:
    """Cancel an upload and drop its parts."""
    return UploadObject.of(await backend.uploads.cancel(asking.tenant, upload_id))
