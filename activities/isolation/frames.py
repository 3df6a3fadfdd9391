"""Frames between our processes: eight bytes of length, then this many bytes. Imports only the standard library."""

import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_HEAD_BYTES = 8
_SLICE_S = 0.5  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits


def write_frame(descriptor: int, *parts: bytes) -> None:
    """Write all parts as one frame. Raises BrokenPipeError."""
    head = sum(map(len, parts)).to_bytes(_HEAD_BYTES, "big")
    left = memoryview(b"".join((head, *parts)))
    while left:
        left = left[os.write(descriptor, left) :]


def read_frame(descriptor: int, max_bytes: int | None = None, deadline: float | None = None) -> bytearray:
    """Read one frame, without waiting beyond `deadline` (of `time.monotonic`).

    Raises:
        EOFError: the other end has closed. TimeoutError: the deadline has passed.
        OverflowError: the frame has more than `max_bytes`.
    """
    num_bytes = int.from_bytes(_read(descriptor, _HEAD_BYTES, deadline), "big")
    if max_bytes is not None and num_bytes > max_bytes:
        raise OverflowError(f"a frame of {num_bytes:,} bytes")
    return _read(descriptor, num_bytes, deadline)


def frames_of(descriptor: int) -> Iterator[bytes]:
    """Read frames until the other end closes."""
    with suppress(EOFError):
        while True:
            yield bytes(read_frame(descriptor))


def _read(descriptor: int, num_bytes: int, deadline: float | None) -> bytearray:
    found = bytearray()
    while len(found) < num_bytes:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no whole frame came in time")
            if not select.select([descriptor], [], [], min(left_s, _SLICE_S))[0]:
                continue
        piece = os.read(descriptor, min(num_bytes - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return found


class FramedProcess(subprocess.Popen[bytes]):
    """A process that answers each frame on its standard input with one on its standard output."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the host
            pass_fds=pass_fds,
        )

    def send(self, data: bytes) -> None:
        """Send one frame. Raises EOFError when the process has ended."""
        assert self.stdin
        try:
            write_frame(self.stdin.fileno(), data)
        except BrokenPipeError as error:
            raise EOFError from error

    def receive(self, limit_s: float, max_bytes: int) -> bytearray:
        """Wait at most `limit_s` seconds for one frame. Raises as `read_frame` does."""
        assert self.stdout
        return read_frame(self.stdout.fileno(), max_bytes, time.monotonic() + limit_s)

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the process unless it ends by itself within `grace_s`, reap it, and close its pipes."""
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout):
            assert pipe
            pipe.close()
