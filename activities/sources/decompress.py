"""gzip and zstd, known by their first bytes, whatever the file is called."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from shared.errors import DiskFull, InvalidInput

_MAGIC: dict[bytes, Literal["gzip", "zstd"]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK_BYTES = 1 << 20
_RESERVE_BYTES = 256 << 20  # left free for the rest of the machine


def compression_of(file: BinaryIO) -> Literal["gzip", "zstd"] | None:
    """Tell a file's compression by its first bytes. The file stands at its begin, before and after."""
    start = file.read(4)
    file.seek(0)
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def unpack(
    source: BinaryIO, target: Path, max_bytes: int, place: str, limit: str = "download.max_decompressed_bytes"
) -> int:
    """Write an open file's content to `target`, decompressed (one layer, any number of members). Returns its bytes.

    Raises:
        InvalidInput: it is damaged, cut short, or larger than `max_bytes`.
        DiskFull: it would fill the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with _content(source) as content, target.open("wb") as file:
        while chunk := _read(content, place):
            size += len(chunk)
            if size > max_bytes:
                raise InvalidInput(f"more than {max_bytes:,} bytes; the limit is {limit}", place)
            check_space(target, len(chunk))
            file.write(chunk)
    return size


@contextmanager
def _content(source: BinaryIO) -> Iterator[BinaryIO]:
    import pyarrow

    compression = compression_of(source)
    if compression is None:
        yield source
        return
    # Arrow decompresses a bounded piece at a time and notices truncation, for both formats and over member borders.
    with pyarrow.CompressedInputStream(source, compression) as stream:
        yield stream


def _read(content: BinaryIO, place: str) -> bytes:
    try:
        return content.read(_CHUNK_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the compressed data is damaged or cut short: {error}", place) from error


def check_space(target: Path, num_bytes: int) -> None:
    """Raises DiskFull when so many bytes more in `target` would leave its disk too little."""
    if shutil.disk_usage(target.parent).free < num_bytes + _RESERVE_BYTES:
        raise DiskFull(f"no space is left on the disk that holds {target.parent}")
