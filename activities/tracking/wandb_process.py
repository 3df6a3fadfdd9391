"""A host's writer process (wandb_writer.py), seen from the host: started for the first run, ended when idle."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from activities.host_context import locked, remove_abandoned
from activities.tracking.wandb_writer import Answer, Close, Done, HistoryRow, Open, Request, Write, WriterStart
from shared.child_environment import child_environment

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 60.0
_PLACES = 8  # runs that are open at a time: each takes memory in the writer
_CALL_TIMEOUT_S = 60.0
_IDLE_S = 30.0
_RUNS_A_PROCESS = 500  # then the process is replaced, since W&B does not free all memory of closed runs
_ROWS_A_CALL = 200
_LAST_BYTES = 4096


class WriterLost(Exception):
    """The writer process ended, or did not answer in time. The run must be written again.

    `by_another`: it was ended because a call of another run got no answer in time.
    """

    def __init__(self, message: str, *, by_another: bool = False) -> None:
        super().__init__(message)
        self.by_another = by_another


class RunRefused(Exception):
    """W&B did not take a run."""


class OpenRun:
    """A run that is open in the writer. `done`: the progress that the server has already."""

    def __init__(self, process: "_Process", number: int, folder: Path) -> None:
        self._process = process
        self._number = number
        self.folder = folder
        self.done = Done()
        self.is_closed = False

    async def open(self, start: WriterStart) -> None:
        """Begin the run in W&B, or resume it there. Raises WriterLost, RunRefused."""
        answer = await self._process.call(self._number, Open(start=start), start.init_timeout_s + _CALL_TIMEOUT_S)
        self.done = answer.done or Done()

    async def write(self, rows: Sequence[HistoryRow]) -> None:
        """Append rows to the run's history. Raises: WriterLost, RunRefused."""
        for first in range(0, len(rows), _ROWS_A_CALL):
            part = Write(rows=tuple(rows[first : first + _ROWS_A_CALL]))
            await self._process.call(self._number, part, _CALL_TIMEOUT_S)

    async def close(self, timeout_s: float) -> None:
        """Let W&B write or send the rest. Raises: WriterLost, RunRefused."""
        self.is_closed = True
        await self._process.call(self._number, Close(), timeout_s)

    def abandon(self) -> None:
        """Close it without waiting."""
        if not self.is_closed:
            self._process.post(self._number, Close())


class Writer:
    """Runs that are written to W&B, a bounded number at a time, by one process.

    `folder`: for offline runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = asyncio.Semaphore(_PLACES)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._num_waiting = 0

    @property
    def is_crowded(self) -> bool:
        """True if somebody waits for a place."""
        return self._num_waiting > 0

    @asynccontextmanager
    async def opened(self, start: WriterStart) -> AsyncIterator[OpenRun]:
        """Yield a run of the writer as soon as a place is free. If it is not closed in the block, it is abandoned.

        Raises:
            WriterLost, RunRefused.
        """
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            async with (await self._running()).used() as run:
                try:
                    await run.open(start.model_copy(update={"folder": run.folder}))
                    yield run
                finally:
                    run.abandon()
        finally:
            self._places.release()

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.end()

    async def _running(self) -> "_Process":
        async with self._starting:
            if self._process is None or not self._process.takes_runs:
                self._process = await _Process.start(self._folder)
            return self._process


class _Process:
    """One writer process, with a separate folder for its files and W&B's."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._num_open = self._num_opened = 0
        self._idle: asyncio.TimerHandle | None = None
        self._has_ended = self._is_retired = self._is_given_up = False
        self._sending = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, folder: Path) -> "_Process":
        remove_abandoned(folder, ".writer-*", after_s=0.0)
        name = uuid.uuid4().hex
        new, own = folder / f".new-{name}", folder / f".writer-{name}"
        (new / "tmp").mkdir(parents=True)
        places = {variable: str(own / "tmp") for variable in ("TMPDIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
        with ExitStack() as stack:
            held = stack.enter_context(locked(new))
            new.rename(own)  # other hosts must not see it before it is locked
            log = stack.enter_context((own / "writer.log").open("wb"))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "activities.tracking.wandb_writer",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=child_environment("wandb") | places,
                start_new_session=True,
                pass_fds=(held,),  # which holds the lock until the process has ended, however it ends
            )
        return cls(process, own)

    @property
    def takes_runs(self) -> bool:
        return not self._is_retired and self._process.returncode is None and self._num_opened < _RUNS_A_PROCESS

    @asynccontextmanager
    async def used(self) -> AsyncIterator[OpenRun]:
        """Yield a new run, with a new number and folder. A process without open runs ends after a while."""
        if self._idle is not None:
            self._idle.cancel()
        self._num_open += 1
        self._num_opened += 1
        folder = self._folder / "runs" / str(self._num_opened)
        folder.mkdir(parents=True)
        try:
            yield OpenRun(self, self._num_opened, folder)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                wait_s = _IDLE_S if self.takes_runs else 0.0
                self._idle = asyncio.get_running_loop().call_later(wait_s, self._end_if_idle)

    async def call(self, number: int, body: Open | Write | Close, timeout_s: float) -> Answer:
        """Send a command and return its answer. A process that does not answer is ended, with all of its runs."""
        if self._has_ended:
            raise self._lost()
        answered = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self.post(number, body)
                await self._drain()
                answer = await answered
        except TimeoutError:
            self._is_given_up = True
            self._kill()
            raise WriterLost(f"it did not {body.command} within {timeout_s:g} s") from None
        finally:
            self._calls.pop(number, None)
        if answer.error is not None:
            self._is_retired = True  # a run that W&B refused stays in use there: its next try needs another process
            raise RunRefused(answer.error)
        return answer

    def post(self, number: int, body: Open | Write | Close) -> None:
        """Send a command; nobody waits for its answer here."""
        assert self._process.stdin is not None
        if not self._has_ended:
            self._process.stdin.write(Request(number=number, body=body).model_dump_json().encode() + b"\n")

    async def _drain(self) -> None:
        assert self._process.stdin is not None
        # If the process has ended, `_read` fails the calls that wait for an answer.
        async with self._sending:
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.drain()

    async def _read(self) -> None:
        """Give answers to the waiting calls; when the process has ended, fail the remaining ones."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = Answer.model_validate_json(line)
            if (answered := self._calls.get(answer.number)) is not None and not answered.done():
                answered.set_result(answer)
        self._kill()  # also the processes that W&B started
        await self._process.wait()
        self._has_ended = True
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(self._lost())
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _end_if_idle(self) -> None:
        if self._num_open == 0:
            self._kill()

    def _kill(self) -> None:
        self._is_retired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        self._kill()
        if self._idle is not None:
            self._idle.cancel()
        await self._reader

    def _lost(self) -> WriterLost:
        said = f"the writer ended with status {self._process.returncode}"
        with contextlib.suppress(OSError):
            lines = (self._folder / "writer.log").read_bytes()[-_LAST_BYTES:].decode(errors="replace").splitlines()
            said = lines[-1] if lines else said
        return WriterLost(said, by_another=self._is_given_up)
