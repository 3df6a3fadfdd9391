"""Downloads objects of a store into files: in ranges, several at a time, hashed as they arrive.

A range is written to its place in the file and hashed from there, in order, while later ones are being downloaded.
Memory holds only the ranges that are fetched at once, whatever the files' size.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CorruptArtifact, NotFound, StoreUnavailable
from shared.storage.store import ObjectStore, disk_errors, uri_of

RANGE_BYTES = 8 << 20
_PAUSES_S = (0.1, 0.4, 1.0)  # a connection that breaks within a range; the store's client repeats requests by itself


@dataclass(frozen=True)
class Fetched:
    """An object of a known size, and the file that is to hold it."""

    key: str
    size: int
    path: Path


def fetch(store: ObjectStore, wanted: Sequence[Fetched], at_once: int, check: Callable[[], None]) -> Iterator[str]:
    """Download objects into new files. Yields the SHA-256 of each, in order.

    `at_once`: ranges downloaded at a time. `check`: called before and after each, from any thread; its errors
    propagate.

    Raises:
        CorruptArtifact: an object is missing, or of another size.
        DiskFull, StoreUnavailable
    """
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="range")
    try:
        begun = [(file, _begin(store, file, threads, check)) for file in wanted]
        buffer = memoryview(bytearray(RANGE_BYTES))
        for file, ranges in begun:
            digest = hashlib.sha256()
            with file.path.open("rb", buffering=0) as made:
                for start, arrived in zip(_starts(file), ranges, strict=True):
                    arrived.result()
                    digest.update(buffer[: made.readinto(buffer[: file.size - start])])
            yield digest.hexdigest()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _begin(
    store: ObjectStore, file: Fetched, threads: ThreadPoolExecutor, check: Callable[[], None]
) -> list["Future[None]"]:
    with disk_errors(file.path):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.touch(exist_ok=False)

    def bring(start: int) -> None:
        check()
        # The last range asks for one byte too many, to detect an object that is too long.
        end = min(start + RANGE_BYTES, file.size)
        data = _read(store, file.key, start, end - start + (end == file.size))
        check()
        if len(data) != end - start:
            found = store.head(file.key)
            told = f"the file has {found.size if found else 0} bytes, the manifest says {file.size}"
            raise CorruptArtifact(told, uri_of(store, file.key))
        with disk_errors(file.path), file.path.open("r+b") as made:
            made.seek(start)
            made.write(data)

    return [threads.submit(bring, start) for start in _starts(file)]


def _starts(file: Fetched) -> range:
    return range(0, max(1, file.size), RANGE_BYTES)


def _read(store: ObjectStore, key: str, start: int, length: int) -> bytes:
    for pause_s in (*_PAUSES_S, None):
        try:
            return store.read_range(key, start, length)
        except NotFound as error:
            raise CorruptArtifact("the file is missing", uri_of(store, key)) from error
        except StoreUnavailable:
            if pause_s is None:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")
