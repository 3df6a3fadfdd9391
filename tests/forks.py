"""Programs of tests as forks of a process that has imported what they need: a start takes a moment instead of seconds.

For tests of what a program does. Where it matters how it is started, a test starts it as users and hosts do.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [__name__, "longshore.client", "service.cli.runs"]
"""Modules that all forks have at once. Whoever starts other programs adds what these import."""


@dataclass(frozen=True)
class Program:
    """A call in a process of its own, with its own argv, environment and folder. Its output goes to files."""

    call: Callable[[], object]
    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    stdout: Path
    stderr: Path

    def __call__(self) -> None:
        gc.freeze()  # a collection of what was imported would copy its pages
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.cwd)
        for number, path in ((1, self.stdout), (2, self.stderr)):
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
        faulthandler.enable()  # anew: its stderr is another
        sys.argv = [*self.argv]
        self.call()


def start(program: Program) -> BaseProcess:
    """Not waited for. It ends with this process at the latest."""
    _FORKS.set_forkserver_preload(IMPORTED)
    process = _FORKS.Process(target=program, daemon=True)
    process.start()
    return process


@contextmanager
def running(program: Program) -> Iterator[BaseProcess]:
    """Killed at the end, if it has not ended."""
    process = start(program)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def end(process: BaseProcess, patience_s: float = 40) -> None:
    """Ask it to leave; abort one that does not, which then tells where it stands."""
    process.terminate()
    process.join(patience_s)
    if process.exitcode is None:
        print(f"{process.pid} did not leave within {patience_s:g} s; aborted")
        os.kill(process.pid or 0, signal.SIGABRT)
        process.join()


def run(programs: Sequence[Program], timeout_s: float) -> list[int]:
    """Run them beside each other until all have ended, or one has failed: then the others are killed.

    Returns:
        Their exit statuses.
    """
    processes: list[BaseProcess] = []
    try:
        for program in programs:
            processes.append(start(program))
        _wait_for(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


@dataclass(frozen=True)
class Answer:
    """What one program said."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def captured(
    call: Callable[[], object], argv: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout_s: float
) -> Answer:
    """Run one program."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        [code] = run([Program(call, argv, environment, cwd, stdout, stderr)], timeout_s)
        return Answer(code, stdout.read_text(), stderr.read_text())


def _wait_for(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while living := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            return
        if not wait([process.sentinel for process in living], max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"not ended after {timeout_s:g} s")
