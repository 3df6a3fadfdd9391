"""`/v1/uploads`: a file in parts of at most 64 MiB, put together at the end."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from service.accounts.principals import Asking, require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.openai.files import FileObject, checked_purpose, plain_name
from service.apis.openai.forms import BINARY, described, file_form
from service.backend import Backed
from service.files.uploads import MAX_PARTS, Part, UploadRecord
from shared.contract import Frozen
from shared.errors import InvalidInput
from shared.field_rules import pattern

router = APIRouter(
    route_class=JsonRoute, prefix="/v1/uploads", tags=["uploads"], dependencies=[Depends(require("write"))]
)

_FORM = described(data=BINARY)


class UploadRequest(Frozen):
    """The announcement of a file."""

    filename: str = Field(min_length=1, max_length=1024)
    purpose: str = Field(max_length=64)
    size: int = Field(alias="bytes", ge=1, le=1 << 40)
    mime_type: str = Field(max_length=256, description="not looked at: what a file holds is seen when it is read")


class CompleteRequest(Frozen):
    """The parts in the order of the file, and what it must be."""

    part_ids: tuple[Annotated[str, Field(max_length=64)], ...] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = pattern(r"^[0-9a-fA-F]{32}$", "an MD5 has 32 hex digits", default=None)


class UploadObject(BaseModel):
    """An upload as clients see it."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    file: FileObject | None = None

    @classmethod
    def of(cls, record: UploadRecord, file: FileObject | None = None) -> "UploadObject":
        return cls(
            id=record.upload_id,
            bytes=record.size,
            created_at=int(record.created_at),
            expires_at=int(record.expires_at),
            filename=record.name,
            purpose=record.purpose,
            status=record.state,
            file=file,
        )


class PartObject(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str

    @classmethod
    def of(cls, part: Part) -> "PartObject":
        return cls(id=part.part_id, created_at=int(part.created_at), upload_id=part.upload_id)


@router.post("")
async def create_upload(body: JsonBody[UploadRequest], asking: Asking, backend: Backed) -> UploadObject:
    """Announce a file. Its parts are awaited for an hour."""
    if body.size > (most := backend.settings.download.max_bytes):
        raise InvalidInput(f"a file has at most {most} bytes here", "bytes")
    record = await backend.uploads.create(
        asking.tenant, name=plain_name(body.filename), purpose=checked_purpose(body.purpose), size=body.size
    )
    return UploadObject.of(record)


@router.post("/{upload_id}/parts", openapi_extra=_FORM)
async def add_part(upload_id: str, request: Request, asking: Asking, backend: Backed) -> PartObject:
    """Send one part, as a form. Parts may come in any order, several at a time, and more than once."""
    async with file_form(request, "data") as form:
        await form.find_file()
        return PartObject.of(await backend.uploads.add_part(asking.tenant, upload_id, form.chunks()))


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: JsonBody[CompleteRequest], asking: Asking, backend: Backed
) -> UploadObject:
    """Make a file of the parts."""
    record, file = await backend.uploads.complete(asking.tenant, upload_id, body.part_ids, body.md5)
    return UploadObject.of(record, FileObject.of(file))


@router.post("/{upload_id}/cancel")
async def cancel_upload(upload_id: str, asking: Asking, backend: Backed) -> UploadObject:
    """Give the upload up; its parts are dropped."""
    return UploadObject.of(await backend.uploads.cancel(asking.tenant, upload_id))
