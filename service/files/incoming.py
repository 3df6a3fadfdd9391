"""Receives request bodies into files: uploads, their parts, and the bodies that children read."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.database.locks import KeyedLocks

if TYPE_CHECKING:
    from hashlib import _Hash

_PIECE_BYTES, _PIECE_CHUNKS = 1 << 20, 256


@dataclass(frozen=True)
class Received:
    """A body in a file."""

    path: Path
    num_bytes: int


class Incoming:
    """Receives bodies into files of a folder, and lets each tenant's large ones take turns.

    The next piece of a body is read after the last one is written, and each tenant's pieces are written one at a time.
    So the event loop reads two or three bodies of a tenant at once, however many it sends, and a slow sender delays
    nobody else.
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
