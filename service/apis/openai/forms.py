"""Forms with one file (multipart/form-data), read as they come: the file is handed on and never held."""

from collections.abc import AsyncIterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shared.errors import InvalidInput

_MAX_FIELDS = 32
_MAX_BOUNDARY_BYTES = 70  # RFC 2046, 5.1.1
_MAX_FIELD_BYTES = 8 << 10

BINARY = {"type": "string", "format": "binary"}


def described(**fields: dict[str, Any]) -> dict[str, Any]:
    """A form of these fields, all required, for `openapi_extra`: FastAPI does not see what is read by hand."""
    schema = {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class FileForm:
    """A form whose fields may stand before its file and behind it: `fields` is whole when `chunks` has ended."""

    def __init__(self, content_type: str | None, body: AsyncIterator[bytes], file_field: str) -> None:
        """
        Args:
            file_field: the name of the one field that is a file.

        Raises:
            InvalidInput: the content type is of no such form.
        """
        kind, options = parse_options_header(content_type or "")
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY_BYTES:
            raise InvalidInput("send a form: content-type multipart/form-data, with a boundary", "content-type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._body = body
        self._file_field = file_field
        self._pieces: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._field: str | None = None
        self._value = bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": self._add_to_name,
                "on_header_value": self._add_to_value,
                "on_header_end": self._keep_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def find_file(self) -> str:
        """Read up to the file, and return its name. Raises InvalidInput when there is none."""
        while self.filename is None:
            if not await self._read():
                raise InvalidInput("the form has no such file", self._file_field)
        return self.filename

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes, and behind them the rest of the form. Raises InvalidInput for a form that is cut off."""
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if not await self._read():
                break
        for piece in self._pieces:
            yield piece

    async def _read(self) -> bool:
        """Feed the parser with what comes next; False at the body's end."""
        try:
            chunk = await anext(self._body)
        except StopAsyncIteration:
            if not self._ended:
                raise InvalidInput("the form ends early", self._file_field) from None
            return False
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidInput(f"the form cannot be read: {error}", self._file_field) from None
        return True

    # What the parser finds.

    def _add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header()

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > _MAX_FIELD_BYTES or len(self._headers) > _MAX_FIELDS:
            raise InvalidInput(f"a part has at most {_MAX_FIELDS} headers of {_MAX_FIELD_BYTES} bytes each", "form")

    def _keep_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == self._file_field:
            if self.filename is not None:
                raise InvalidInput("the form has more than one of it", name)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._field = None
            return
        if len(self.fields) >= _MAX_FIELDS or name in self.fields:
            raise InvalidInput(f"a form has each field once, and at most {_MAX_FIELDS}", name or "form")
        self._field = name
        self._value.clear()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidInput(f"a field has at most {_MAX_FIELD_BYTES} bytes", self._field)

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")
            self._field = None

    def _end(self) -> None:
        self._ended = True
