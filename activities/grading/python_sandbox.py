"""Runs python graders, which are untrusted code, in a sandbox: starts it, sends it samples, and validates its answers.

One sandbox grades many samples, each in a separate child process (sandbox_process.py), so that samples cannot
influence each other's grades. A lost sandbox is restarted.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from activities import isolation
from activities.confined.fork_server import sign
from activities.grading.sandbox_process import MAX_ANSWER_BYTES, MAX_FRAME_BYTES, SandboxLimits
from activities.isolation import FramedProcess
from shared.errors import InvalidInput
from shared.grading import SampleGrade
from shared.settings import GradingSettings

# --- The outcome of grading one sample: a grade, or the reason why there is none ---


class NotGraded(Exception):
    """A sample gets no grade; the message is the reason."""


def attempt(grade: Callable[[], float]) -> SampleGrade:
    """Call `grade`, and return its grade, or the reason of its NotGraded. The caller fills in the sample's place."""
    sign()
    try:
        return SampleGrade(place="", grade=grade())
    except NotGraded as error:
        return SampleGrade(place="", grade=None, error=str(error))


_PROGRAM = ("-m", "activities.grading.sandbox_process")
_PACKAGES = Path(__file__).parents[1]  # Longshore's own package that the program imports
# The sandbox's whole environment. The hash seed is fixed, so that grades are reproducible.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
_OWN_MAKING = "the grader wrote an answer of its own making"
_START_S = 30.0
_GRACE_S = 10.0  # to wait beyond a sample's time limit, which the supervisor in the sandbox enforces


class _Lost(Exception):
    """The sandbox ended, or went silent."""


class PythonSandbox:
    """A grader's source in a sandbox. Start and use it in one thread: it ends when that thread does.

    Attributes:
        isolation: `bubblewrap` if that is installed and works, else `namespaces`.

    Raises (from `with`):
        InvalidInput: this system refuses isolation.
    """

    def __init__(
        self, source: str, settings: GradingSettings, folder: Path, bwrap: str | None = isolation.INSTALLED
    ) -> None:
        """`folder`: an empty one, of the sandbox's own. `bwrap`: the path of bubblewrap, which is preferred."""
        self._source = source
        self._settings = settings
        self._folder = folder
        self._bwrap = bwrap
        self._process: FramedProcess | None = None
        self._first: int | None = None  # descriptor of the first process in bubblewrap
        self.isolation: Literal["bubblewrap", "namespaces"] = "namespaces"

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
        match self._ask({"sample": sample, "item": item}):
            case {"grade": float() as grade} if math.isfinite(grade):
                return grade
        raise NotGraded(_OWN_MAKING)

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
        except BaseException:  # cancelled: its late answer must not be taken for that of the next sample
            self._stop()
            raise
        if "failed" in outer:
            raise NotGraded(outer["failed"])
        return _believed(outer["answer"])

    def _start(self) -> None:
        self.isolation = "bubblewrap"
        if self._bwrap is None or not self._is_started_by(self._bwrap):
            self.isolation = "namespaces"
            self._start_in_namespaces()
        self._send(self._source.encode())

    def _is_started_by(self, bwrap: str) -> bool:
        """Start the sandbox in bubblewrap. False if the system refuses it, or it is older than 0.8."""
        for namespaces in isolation.namespace_options():
            told, tells = os.pipe()
            options = ("--as-pid-1", "--info-fd", str(tells))
            start = isolation.BubblewrapStart([_PACKAGES], _ENVIRONMENT, ["CAP_SYS_ADMIN"], options)
            program = (*_PROGRAM, self._limits(in_bubblewrap=True))
            try:
                try:
                    self._launch(isolation.isolated_command(bwrap, program, start, namespaces), {}, [tells])
                finally:
                    os.close(tells)
                if "ready" in self._receive(_START_S):
                    self._first = os.pidfd_open(json.loads(os.read(told, 4096))["child-pid"])
                    return True
            except _Lost:
                pass
            finally:
                os.close(told)
            self._stop()
        return False

    def _start_in_namespaces(self) -> None:
        command = [sys.executable, "-S", "-P", "-s", *_PROGRAM, self._limits(in_bubblewrap=False)]
        self._launch(command, _ENVIRONMENT | {"PYTHONPATH": str(_PACKAGES.parent)})
        try:
            answer = self._receive(_START_S)
        except _Lost as lost:
            self._stop()
            raise RuntimeError(f"the sandbox {lost} while it started") from lost
        if "refused" in answer:
            self._stop()
            rule = "this system refuses the isolation that python graders need"
            raise InvalidInput(f"{rule} ({answer['refused']})", "grader")

    def _limits(self, *, in_bubblewrap: bool) -> str:
        limits = SandboxLimits(
            folder=str(self._folder),
            parent_pid=os.getpid(),
            in_bubblewrap=in_bubblewrap,
            time_s=self._settings.python_time_s,
            memory_bytes=self._settings.python_memory_bytes,
        )
        return json.dumps(asdict(limits))

    def _launch(self, command: list[str], environment: dict[str, str], pass_fds: Sequence[int] = ()) -> None:
        self._process = FramedProcess(command, environment, self._folder, subprocess.DEVNULL, pass_fds)

    def _send(self, data: bytes) -> None:
        assert self._process
        try:
            self._process.send(data)
        except EOFError as error:
            raise _Lost("ended its process") from error

    def _receive(self, limit_s: float) -> Any:
        assert self._process
        try:
            return json.loads(self._process.receive(limit_s, 8 * MAX_ANSWER_BYTES))  # as JSON, escaped
        except EOFError as error:
            raise _Lost("ended its process") from error
        except TimeoutError as error:
            raise _Lost("went silent and was stopped") from error
        except OverflowError as error:
            raise _Lost("answered with more than it may") from error

    def _stop(self) -> None:
        """End all processes of the sandbox. The launcher exits after the last process of its namespace has gone."""
        process, self._process = self._process, None
        first, self._first = self._first, None
        if process is None:
            return
        if first is None:
            process.terminate()
        else:  # bubblewrap itself would exit before the processes that it started
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            os.close(first)
        process.end(grace_s=5.0)


def _believed(answer: str) -> Any:
    """Parse and validate a child's answer. Raises NotGraded if it is malformed, or gives a reason for a failure."""
    with suppress(ValueError, RecursionError):
        match json.loads(answer):
            case {"failed": str(reason)}:
                raise NotGraded(reason[:4000])
            case {"checked": True} | {"grade": _} as parsed:
                return parsed
    raise NotGraded(_OWN_MAKING)


def isolation_in_use() -> str:
    """Return how graders are isolated on this machine: `bubblewrap`, `namespaces`, or why they are not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with PythonSandbox("", GradingSettings(), Path(folder)) as sandbox:
                return sandbox.isolation
        except InvalidInput as error:
            return error.message


if __name__ == "__main__":  # for `longshore doctor`
    print(isolation_in_use())
