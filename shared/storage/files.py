"""Files on a host's disk: written whole or not at all, and folders of what a job stages."""

import errno
import logging
import os
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen, Reason
from shared.errors import CorruptArtifact, DiskFull, InvalidInput

# --- Files ---
# Files on a host's disk that are written atomically, or that only their owner can read; and sockets like these.

logger = logging.getLogger("longshore.files")


@contextmanager
def replacing(path: Path, is_durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that gets the name `path` when the block succeeds; after an error it is deleted.

    `is_durable`: fsynced before the name, and the folder after it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_durable:
        fsync_folder(path.parent)


_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def go_on() -> None:
    """The default `check` of long operations, which never stops them."""


def copy_file(source: BinaryIO, target: BinaryIO, check: Callable[[], None] = go_on) -> None:
    """Copy in the kernel if the file systems can (a reflink costs nothing), else through memory; `check` each piece."""
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), 64 << 20):
            check()
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_KERNEL_COPY:
            raise
        while piece := source.read(1 << 20):
            check()
            target.write(piece)


def private_folder(folder: Path) -> None:
    """Make a folder that other users cannot read: runs, datasets and webhooks' secrets are private.

    A folder that is meant to be shared (/tmp) or belongs to another user keeps its mode, with a warning.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not found.st_mode & 0o077:
        return
    if found.st_mode & stat.S_ISVTX or found.st_uid != os.geteuid():
        logger.warning("other users of this machine may look into %s, which holds runs and datasets", folder)
        return
    folder.chmod(0o700)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, is_durable: bool = True) -> None:
    """Write to a temporary name and rename, both fsynced if `is_durable`: readers see all of it or none."""
    with replacing(path, is_durable) as file:
        file.write(data)


def write_privately(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the start: readers see all of it or none. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name of a Unix socket, for all processes of this user, until the `with` block ends.

    Addresses have at most 107 bytes, and paths may have more.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen_privately(path: Path, backlog: int) -> socket.socket:
    """Listen at a Unix socket that only this user can open. One that an earlier process left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with reachable(path) as short:
        path.unlink(missing_ok=True)
        listener.bind(short)
        path.chmod(0o600)
    listener.listen(backlog)
    return listener


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it. Pipes and devices count as missing, since reading them might never end.

    Raises FileNotFoundError: there is no file, or it is not a regular one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
    return os.fdopen(descriptor, "rb")


# --- Requests between a worker and its host, as files next to a job's log ---
#
# Only the host has a store's credentials: the worker requests missing artifacts, and the host stages them in the
# shared cache and answers. In the other direction, the host requests a trace of steps.


class StageRequest(Frozen):
    """A worker's request for artifacts. `command`: the number of the session's command that names them; None: the job
    does.
    """

    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    command: int | None = None

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("wanted.json")


class StageAnswer(Frozen):
    """The answer: everything is in the cache; or the error, in the form of a job's `failed` event."""

    kind: Literal["invalid_input", "corrupt_artifact", "disk_full", "error"] | None = None
    message: Reason = ""

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("staged.json")

    @classmethod
    def of(cls, error: Exception) -> "StageAnswer":
        match error:
            case CorruptArtifact():
                return cls(kind="corrupt_artifact", message=str(error))
            case InvalidInput():
                return cls(kind="invalid_input", message=str(error))
            case DiskFull() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return cls(kind="disk_full", message=str(error))
            case _:
                return cls(kind="error", message=str(error))
