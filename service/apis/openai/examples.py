"""How many examples a file has, as far as that can be told without reading all of it."""

from collections.abc import Iterable

_LOOKED_AT_BYTES = 32 << 20
# gzip, zstd, zip, Parquet: what is in them is not counted here.
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1")


def count_examples(pieces: Iterable[bytes], num_bytes: int) -> int | None:
    """The lines of a JSONL file that say something; beyond 32 MiB, as many as the first ones let expect.

    Args:
        pieces: the file from its beginning; as many are taken as are looked at.
        num_bytes: the size of all of it.

    Returns:
        None for a file that is not in lines.
    """
    seen, count, rest = 0, 0, b""
    for piece in pieces:
        if not seen and (piece.startswith(_PACKED) or piece.lstrip()[:1] == b"["):
            return None
        seen += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        count += sum(1 for line in lines if line.strip())
        if seen >= _LOOKED_AT_BYTES:
            break
    if seen >= num_bytes:
        return count + bool(rest.strip())
    whole = seen - len(rest)
    return round(count * num_bytes / whole) if whole else None
