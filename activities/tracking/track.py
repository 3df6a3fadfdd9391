"""Track: follow a run's events and train steps, and write them to W&B.

Slow or broken W&B servers do not affect the run. A process for each run writes (wandb_writer.py), a bounded number at a
time, and all runs share a few threads that read the store: so any number of runs can be followed.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.heartbeats import HOST_LEAVES
from activities.host_context import HostContext, locked, remove_abandoned
from activities.tracking.wandb_writer import END, Done, History, HistoryRow, Line, WriterStart
from longshore.events import RunEvent
from longshore.fields import Frozen
from longshore.runs import Run, RunRecord, WandbRun
from longshore.views import StepStatus
from shared.child_environment import child_environment
from shared.errors import NotFound
from shared.runs.events import EventCursor, read_run_events
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectInfo, ObjectStore

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 60.0
_PLACES = 8  # processes at a time: each takes memory
_ANSWER_S = 60.0  # the longest time that a process takes to begin, or takes no rows
_ROWS_A_CALL = 200
_LAST_BYTES = 4096
Mode = Literal["offline", "online"]
T = TypeVar("T")


class NotWritten(Exception):
    """The writer ended, or did not answer in time: the run must be written again. `done`: the server's progress before,
    if the run was opened."""

    def __init__(self, message: str, done: Done | None = None) -> None:
        super().__init__(message)
        self.done = done


class Writer:
    """A process that writes one run. `folder`: W&B's files; `done`: the progress that the server had already."""

    def __init__(self, process: asyncio.subprocess.Process, own: Path, mode: Mode) -> None:
        self._process = process
        self.mode = mode
        self._log = own / "writer.log"
        self.folder = own / "run"
        self.done: Done | None = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path, start: WriterStart) -> AsyncIterator["Writer"]:
        """Begin the run in W&B, or resume it there. The process ends with the block, with all that W&B started.

        Args:
            folder: the process gets a folder in it, which goes with the block.

        Raises NotWritten.
        """
        await asyncio.to_thread(remove_abandoned, folder, ".writer-*", after_s=0.0)
        name = uuid.uuid4().hex
        new, own = folder / f".new-{name}", folder / f".writer-{name}"
        for inner in ("tmp", "run"):
            (new / inner).mkdir(parents=True)
        places = {variable: str(own / "tmp") for variable in ("TMPDIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
        with locked(new) as held:
            new.rename(own)  # other hosts must not see it before it is locked
            with (own / "writer.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "activities.tracking.wandb_writer"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    cwd=Path(__file__).parents[2],
                    env=child_environment("wandb") | places,
                    start_new_session=True,
                    pass_fds=(held,),  # which holds the lock if the host is killed
                )
            writer = cls(process, own, start.mode)
            try:
                await writer._open(start.model_copy(update={"folder": writer.folder}))
                yield writer
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also the processes that W&B started
                await process.wait()
                await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)

    async def _open(self, start: WriterStart) -> None:
        assert self._process.stdout is not None
        await self._send([start.model_dump_json().encode() + b"\n"])
        answer = await self._within(start.init_timeout_s + _ANSWER_S, self._process.stdout.readline(), "begin")
        if not answer:
            raise await self._lost()
        self.done = Done.model_validate_json(answer)

    async def write(self, rows: Sequence[HistoryRow]) -> None:
        """Append rows to the run's history. Raises NotWritten, also if the process has ended since the last rows."""
        if self._process.returncode is not None:
            raise await self._lost()
        for first in range(0, len(rows), _ROWS_A_CALL):
            part = rows[first : first + _ROWS_A_CALL]
            await self._send([row.model_dump_json().encode() + b"\n" for row in part])

    async def close(self, timeout_s: float) -> None:
        """Let W&B write or send the rest. Raises NotWritten."""
        await self._send([END])
        if await self._within(timeout_s, self._process.wait(), "end"):
            raise await self._lost()

    async def _send(self, lines: list[bytes]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.writelines(lines)
        try:
            await self._within(_ANSWER_S, self._process.stdin.drain(), "take rows")
        except ConnectionError:
            raise await self._lost() from None

    async def _within(self, timeout_s: float, work: Awaitable[T], verb: str) -> T:
        try:
            return await asyncio.wait_for(work, timeout_s)
        except TimeoutError:
            raise NotWritten(f"it did not {verb} within {timeout_s:g} s", self.done) from None

    async def _lost(self) -> NotWritten:
        """Return the reason why the process has ended: the last line that it wrote."""
        await self._within(_ANSWER_S, self._process.wait(), "end")
        data = await asyncio.to_thread(self._log.read_bytes)
        lines = data[-_LAST_BYTES:].decode(errors="replace").splitlines()
        return NotWritten(lines[-1] if lines else f"its writer ended with status {self._process.returncode}", self.done)


POLL_S = 1.0
_LONGEST_POLL_S = 30.0
_LOOKS_PER_S = 20.0  # reads of the store for all runs together: with more runs each is read less often
_READERS = 4
_EVENTS_A_PAGE = 1000
_BEAT_S = 5.0
_TURN_S = 60.0  # how long an online run keeps its place while others wait
_TRIES = 3  # failed tries in a row of one mode, without progress in W&B
_TRY_AGAIN = timedelta(minutes=5)  # the pause before a retry, if not even an offline run could be written
_log = logging.getLogger(__name__)


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
        self._places = asyncio.Semaphore(_PLACES)
        self._num_waiting = 0
        self._readers = ThreadPoolExecutor(_READERS, "track")
        self._num_followed = 0

    def close(self) -> None:
        """End the threads. The writers end with their activities."""
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
            num_vain, done = 0, Done()
            while num_vain < _TRIES:
                try:
                    tracked = await self._follow(RunLines(store, request, before, asked_to_end), mode)
                    return tracked.model_copy(update={"warning": warning})
                except NotWritten as error:
                    trouble = f"W&B could not be written {mode}: {error}"
                    _log.warning("run %s: %s", request.run_id, trouble)
                    num_vain = num_vain + 1 if error.done in (None, done) else 1
                    done = error.done or done
                    await asyncio.sleep(POLL_S * 2**num_vain if num_vain < _TRIES else 0)
            warning = trouble
        raise ApplicationError(trouble, next_retry_delay=_TRY_AGAIN)

    async def _follow(self, lines: "RunLines", mode: Mode) -> Tracked:
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
                async with self._place(), Writer.opened(self._folder, start) as writer:
                    history = history or History(writer.done or Done())
                    page = await self._visit(writer, history, lines, page)
                    await writer.close(self._finish_timeout_s)
                    folder = await self._read(partial(self._keep, lines.request.run_id, writer.folder))
            if page.is_last:
                return Tracked(folder=folder and str(folder), num_events=lines.num_events)
            if not page.is_full:
                await self._pause(lines)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for one of the few places for processes."""
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    async def _visit(self, writer: Writer, history: History, lines: "RunLines", page: "Page") -> "Page":
        """Write pages of a run until it has ended, or its turn is over and others wait. Returns the last page.

        An offline run has ended already, and is written as a whole.
        """
        give_way_at = time.monotonic() + _TURN_S
        while True:
            await writer.write(list(history.rows(page.lines)))
            is_over = writer.mode == "online" and self._num_waiting and time.monotonic() > give_way_at
            if page.is_last or is_over:
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
            **place.model_dump(include={"project", "entity", "tags"}),
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
            while steps and int(PurePosixPath(steps[0]).stem) < int(item.job_id):
                yield self._step(steps.pop(0))
            yield item.event
        if not is_full:
            yield from map(self._step, steps)

    def _step(self, key: str) -> StepStatus:
        self._last_step = key
        return read_record(self._store, key, StepStatus)
