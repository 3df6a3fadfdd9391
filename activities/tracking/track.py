"""Track: follow a run's events and train steps, and write them to W&B.

Slow or broken W&B servers do not affect the run. All runs share a few threads that read the store and one process that
writes, so any number of runs can be followed, and none delays another.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.host_context import HOST_LEAVES, HostContext, locked, remove_abandoned
from activities.tracking.wandb_writer import (
    Answer,
    Close,
    Done,
    History,
    HistoryRow,
    Line,
    Open,
    Request,
    TrainStep,
    Write,
    WriterStart,
)
from longshore.fields import Frozen
from shared.child_environment import child_environment
from shared.errors import NotFound
from shared.runs.events import EventCursor, RunEvent, read_run_events
from shared.runs.requests import Run, RunRecord, WandbRun
from shared.runs.status import StepStatus
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectInfo, ObjectStore

# --- A host's writer process (wandb_writer.py), seen from the host ---
# Started for the first run, ended when idle.

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


POLL_S = 1.0
_LONGEST_POLL_S = 30.0
_LOOKS_PER_S = 20.0  # reads of the store for all runs together: with more runs each is read less often
_READERS = 4
_EVENTS_A_PAGE = 1000
_BEAT_S = 5.0
_TURN_S = 60.0  # how long an online run stays open in the writer while others wait
_TRIES = 3  # failed tries in a row of one mode, without progress in W&B
_TRY_AGAIN = timedelta(minutes=5)  # the pause before a retry, if not even an offline run could be written
_log = logging.getLogger(__name__)

Mode = Literal["offline", "online"]
T = TypeVar("T")


class TrackRequest(Frozen):
    run_id: str
    run: Run


class Tracked(Frozen):
    """`folder` has W&B's files on this machine; `warning` describes W&B's failure, if there was one."""

    folder: str | None = None
    num_events: int = 0
    warning: str | None = None


class Track:
    """Writes runs to W&B, each from its first event to its end."""

    def __init__(
        self, host: HostContext, *, init_timeout_s: float = INIT_TIMEOUT_S, finish_timeout_s: float = FINISH_TIMEOUT_S
    ) -> None:
        self._host = host
        self._finish_timeout_s = finish_timeout_s
        self._init_timeout_s = init_timeout_s
        self._folder = host.settings.root_path / "wandb"
        self._writer = Writer(self._folder)
        self._readers = ThreadPoolExecutor(_READERS, "track")
        self._num_followed = 0

    async def close(self) -> None:
        """End the writer process and the threads."""
        await self._writer.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    @activity.defn(name="track")
    async def track(self, request: TrackRequest) -> Tracked:
        """Follow the run until its result is in the store. Problems with a W&B server lead to a warning.

        An offline run is written when it has ended, from its first event, into a folder that replaces an earlier one:
        so retries and killed writers neither duplicate nor lose anything. An online run continues after the server's
        last entry. If the server cannot be reached, the run is written offline instead; if that fails too, both are
        retried later. A cancelled activity still writes the existing entries before it ends.

        Raises ApplicationError: nothing could be written, or this host leaves.
        """
        if self._host.settings.wandb_mode == "disabled":
            return Tracked()
        asked_to_end = asyncio.Event()
        work = asyncio.create_task(self._write(request, asked_to_end))
        self._num_followed += 1
        beside = [asyncio.create_task(activity.wait_for_worker_shutdown()), asyncio.create_task(_beat())]
        try:
            await asyncio.wait({work, beside[0]}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # another host restarts it
                raise ApplicationError(HOST_LEAVES, category=ApplicationErrorCategory.BENIGN)
            return work.result()
        except asyncio.CancelledError:
            asked_to_end.set()
            await asyncio.wait({work, beside[0]}, timeout=self._finish_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            self._num_followed -= 1
            for task in (work, *beside):
                task.cancel()
            await asyncio.gather(work, *beside, return_exceptions=True)

    async def _write(self, request: TrackRequest, asked_to_end: asyncio.Event) -> Tracked:
        """Write a run in the installation's mode, or offline if no server accepts it."""
        modes: list[Mode] = ["online", "offline"] if self._host.settings.wandb_mode == "online" else ["offline"]
        warning, trouble = None, ""
        store = self._host.store
        before = await self._read(lambda: store.head(RunKeys(request.run_id).previous_result))
        for mode in modes:
            tries = Tries()
            while tries.num_vain < _TRIES:
                try:
                    lines = RunLines(store, request, before, asked_to_end)
                    tracked = await self._follow(lines, mode, tries)
                    return tracked.model_copy(update={"warning": warning})
                except (WriterLost, RunRefused) as error:
                    trouble = f"W&B could not be written {mode}: {error}"
                    _log.warning("run %s: %s", request.run_id, trouble)
                    tries.failed(error)
                    if mode == "online" and isinstance(error, RunRefused):
                        break  # W&B itself has retried already
                    await asyncio.sleep(POLL_S * 2**tries.num_vain if tries.num_vain < _TRIES else 0)
            warning = trouble
        raise ApplicationError(trouble, next_retry_delay=_TRY_AGAIN)

    async def _follow(self, lines: "RunLines", mode: Mode, tries: "Tries") -> Tracked:
        """Follow a run in one attempt, from its first event on."""
        began = time.monotonic()
        while mode == "offline" and not lines.asked_to_end.is_set() and not await self._read(lines.has_ended):
            # Nobody looks at it before the end, which may be seen a little later: each look is a request to the store.
            await self._pause(lines, min(_LONGEST_POLL_S, max(5 * POLL_S, (time.monotonic() - began) / 10)))
        history: History | None = None
        folder: Path | None = None
        while True:
            page = await self._read(lines.read)
            if page.lines:
                start = await self._read(lambda: self._start(lines.request, mode))
                async with self._writer.opened(start) as run:
                    tries.opened(run.done)
                    history = history or History(run.done)
                    page = await self._visit(run, history, lines, page)
                    await run.close(self._finish_timeout_s)
                    folder = await self._read(partial(self._keep, lines.request.run_id, run.folder))
            if page.is_last:
                return Tracked(folder=folder and str(folder), num_events=lines.num_events)
            if not page.is_full:
                await self._pause(lines)

    async def _visit(self, run: OpenRun, history: History, lines: "RunLines", page: "Page") -> "Page":
        """Write pages to an open run until it has ended, or its turn is over and others wait. Returns the last page."""
        loop = asyncio.get_running_loop()
        give_way_at = loop.time() + _TURN_S
        while True:
            await run.write(list(history.rows(page.lines)))
            if page.is_last or (self._writer.is_crowded and loop.time() > give_way_at):
                return page
            if not page.is_full:
                await self._pause(lines)
            page = await self._read(lines.read)

    async def _read(self, work: Callable[[], T]) -> T:
        """Do work with the store or the disk on the threads that all runs share."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def _pause(self, lines: "RunLines", at_least_s: float = 0.0) -> None:
        """Wait until the run is looked at again."""
        pause_s = max(POLL_S, self._num_followed / _LOOKS_PER_S, at_least_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(lines.asked_to_end.wait(), pause_s)

    def _start(self, request: TrackRequest, mode: Mode) -> WriterStart:
        """Describe a run for W&B. Its project is the one that the request names, or else the installation's."""
        try:
            chosen = read_record(self._host.store, RunKeys(request.run_id).record, RunRecord).source.wandb
        except NotFound:  # a run that was started by hand
            chosen = None
        place = chosen or WandbRun(project=self._host.settings.wandb_project)
        return WriterStart(
            run_id=request.run_id,
            name=place.name or request.run.name or request.run_id,
            project=place.project,
            entity=place.entity,
            tags=place.tags,
            kind=request.run.kind,
            mode=mode,
            folder=self._folder,
            init_timeout_s=self._init_timeout_s,
            config=request.run.model_dump(mode="json"),
        )

    def _keep(self, run_id: str, written: Path) -> Path:
        """Replace the folder of an earlier attempt by the one that W&B has written now."""
        folder = self._folder / run_id
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)
        return folder


class Tries:
    """Counts tries to write a run in one mode. `num_vain`: failures in a row without anything new in W&B, not counting
    those that another run's call caused."""

    def __init__(self) -> None:
        self.num_vain = 0
        self._done = Done()

    def opened(self, done: Done) -> None:
        """Note the server's progress; if there is some, reset the count of failures."""
        if done != self._done:
            self.num_vain, self._done = 0, done

    def failed(self, error: WriterLost | RunRefused) -> None:
        if not (isinstance(error, WriterLost) and error.by_another):
            self.num_vain += 1


async def _beat() -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(_BEAT_S)


@dataclass(frozen=True)
class Page:
    """Lines that were read at once. `is_full`: there are more. `is_last`: the run has ended, and there are no more."""

    lines: list[Line]
    is_full: bool
    is_last: bool


class RunLines:
    """A run's events and train steps, read a page at a time.

    Each step is placed after the events of its job and before those of the next one. Jobs have the numbers of their
    train steps, and a step is recorded after its job's events and before the next job begins.

    Args:
        before: the run's previous result when following began. If it changes, the run has ended and was resumed before
            its result was seen here; another activity follows the resumed run.
        asked_to_end: set when the run is not to be waited for any longer.
    """

    def __init__(
        self, store: ObjectStore, request: TrackRequest, before: ObjectInfo | None, asked_to_end: asyncio.Event
    ) -> None:
        self.request, self.asked_to_end = request, asked_to_end
        self._store, self._keys, self._before = store, RunKeys(request.run_id), before
        self._cursor, self._last_step = EventCursor(), ""
        self.num_events = 0

    def has_ended(self) -> bool:
        keys = self._keys
        return self._store.head(keys.result) is not None or self._store.head(keys.previous_result) != self._before

    def read(self) -> Page:
        """Read the next lines."""
        # The end and the steps are read first: so all their events are there when the events are read.
        has_ended, steps = self.asked_to_end.is_set() or self.has_ended(), self.new_steps()
        events, self._cursor = read_run_events(self._store, self.request.run_id, self._cursor, _EVENTS_A_PAGE)
        self.num_events += len(events)
        is_full = len(events) == _EVENTS_A_PAGE
        return Page(list(self.merged(events, steps, is_full)), is_full, is_last=has_ended and not is_full)

    def new_steps(self) -> list[str]:
        """Return the keys of train steps' records that were not read yet, in order of step."""
        if self.request.run.kind != "rl":
            return []
        return sorted(info.key for info in self._store.list(f"{self._keys.steps}/") if info.key > self._last_step)

    def merged(self, events: Sequence[RunEvent], steps: list[str], is_full: bool) -> Iterator[Line]:
        """Return the events, merged with the steps whose events have all been read. `is_full`: more events exist."""
        for item in events:
            while steps and _number(steps[0]) < int(item.job_id):
                yield self._step(steps.pop(0))
            yield item.event
        if not is_full:
            yield from map(self._step, steps)

    def _step(self, key: str) -> TrainStep:
        self._last_step = key
        return TrainStep(record=read_record(self._store, key, StepStatus))


def _number(key: str) -> int:
    """Return the number of the step whose record has this key."""
    return int(key.rsplit("/", 1)[-1].removesuffix(".json"))
