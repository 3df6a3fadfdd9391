"""Reads forms with one file (multipart/form-data) by Starlette's parser, and streams the file."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

from anyio import BrokenResourceError, create_memory_object_stream
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import Request, UploadFile
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from shared.errors import InvalidInput

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
        """Read no further."""
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
