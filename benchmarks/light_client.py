"""HTTP GETs over persistent connections with little CPU, so that a load's client does not distort the figures."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class LightClient:
    """One server's. As many connections as there are requests at once; idle ones are used again."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        lines = {"host": parts.netloc, **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self._idle:
            writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError, asyncio.IncompleteReadError when the server hangs up."""
        while self._idle:
            reader, writer = self._idle.pop()
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the server closed it while it was idle
                return await self._ask(reader, writer, path)
        return await self._ask(*await asyncio.open_connection(self._host, self._port), path)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[int, bytes]:
        writer.write(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is None:
            raise ValueError(f"{path} answers without a length")
        body = await reader.readexactly(int(length[1]))
        self._idle.append((reader, writer))
        return int(head[9:12]), body
