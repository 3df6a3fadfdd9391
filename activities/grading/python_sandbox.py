"""Python graders are a stranger's code: this side starts the sandbox, hands it samples, and believes nothing it says.

One process start serves many samples; each is graded in a child of its own (sandbox_process.py), so that no sample sees
another and the same sample always gets the same grade. A sandbox that is lost is started anew.
"""

import json
import math
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from activities.grading.outcome import NotGraded
from activities.grading.sandbox_process import MAX_ANSWER_BYTES, MAX_FRAME_BYTES, Limits
from shared.errors import InvalidInput
from shared.settings import GradingSettings

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
_START_S = 30.0
_GRACE_S = 10.0  # beyond a sample's own time, which the supervisor inside keeps


class _Lost(Exception):
    """The sandbox ended, or went silent."""


class PythonSandbox:
    """A grader's source in a sandbox. Start and use it in one thread: it ends when that thread does.

    Raises (from `with`):
        InvalidInput: this system refuses isolation.
    """

    def __init__(self, source: str, settings: GradingSettings, folder: Path) -> None:
        """`folder`: an empty one, of the sandbox's own."""
        self._source = source
        self._settings = settings
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def check(self) -> None:
        """Load the source. Raises NotGraded when it cannot be, or defines no `grade`."""
        self._ask(None)

    def grade(self, sample: Any, item: Any) -> float:
        """The grade of one sample, finite. Raises NotGraded with the reason when there is none."""
        answer = self._ask({"sample": sample, "item": item})
        match answer:
            case {"grade": float() as grade} if math.isfinite(grade):
                return grade
            case _:
                raise NotGraded("the grader wrote an answer of its own making")

    def _ask(self, request: Any) -> Any:
        frame = json.dumps(request).encode()
        if len(frame) > MAX_FRAME_BYTES:
            raise NotGraded(f"the sample has {len(frame):,} bytes; a python grader takes up to {MAX_FRAME_BYTES:,}")
        try:
            if self._process is None:
                self._start()
            self._send(frame)
            outer = self._receive(self._settings.python_time_s + _GRACE_S)
        except _Lost as lost:
            self._stop()
            raise NotGraded(f"the sandbox {lost}") from lost
        except BaseException:  # cancelled while it graded: what it would still say belongs to no question
            self._stop()
            raise
        if "failed" in outer:
            raise NotGraded(outer["failed"])
        return _believed(outer["answer"])

    def _start(self) -> None:
        answer = self._launch()
        if "refused" in answer:
            self._stop()
            rule = "this system refuses the isolation that python graders need"
            raise InvalidInput(f"{rule} ({answer['refused']})", "grader")
        self._send(self._source.encode())

    def _launch(self) -> Any:
        settings = self._settings
        limits = Limits(
            folder=str(self._folder),
            parent_pid=os.getpid(),
            time_s=settings.python_time_s,
            memory_bytes=settings.python_memory_bytes,
        )
        self._process = subprocess.Popen(
            # Without site packages, user folders or the environment; the hash seed is fixed, so that grades repeat.
            [sys.executable, "-S", "-P", "-s", str(_PROGRAM), json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            return self._receive(_START_S)
        except _Lost as lost:
            self._stop()
            raise RuntimeError(f"the sandbox {lost} while it started") from lost

    def _send(self, data: bytes) -> None:
        assert self._process and self._process.stdin
        try:
            self._process.stdin.write(len(data).to_bytes(4, "big") + data)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise _Lost("ended its process") from error

    def _receive(self, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        num_bytes = int.from_bytes(self._read_exactly(4, deadline), "big")
        if num_bytes > 8 * MAX_ANSWER_BYTES:  # as JSON, escaped
            raise _Lost("answered with more than it may")
        return json.loads(self._read_exactly(num_bytes, deadline))

    def _read_exactly(self, num_bytes: int, deadline: float) -> bytes:
        assert self._process and self._process.stdout
        found = bytearray()
        while len(found) < num_bytes:
            ready = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise _Lost("went silent and was stopped")
            piece = os.read(self._process.stdout.fileno(), num_bytes - len(found))
            if not piece:
                raise _Lost("ended its process")
            found += piece
        return bytes(found)

    def _stop(self) -> None:
        """End the sandbox to its last process: the launcher leaves after all of its namespace has gone."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()


def _believed(answer: str) -> Any:
    """What a child wrote, if it is an answer at all. Raises NotGraded with the child's reason where it gave one."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise NotGraded("the grader wrote an answer of its own making") from error
    match parsed:
        case {"failed": str(reason)}:
            raise NotGraded(reason[:4000])
        case {"checked": True} | {"grade": _}:
            return parsed
        case _:
            raise NotGraded("the grader wrote an answer of its own making")
