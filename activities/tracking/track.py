"""Track: follow a run's events and train steps, and write them to W&B.

Slow or broken W&B servers do not affect the run. All runs share a few threads that read the store and one process that
writes (wandb_process.py), so any number of runs can be followed, and none delays another.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.host_context import HOST_LEAVES, HostContext
from activities.tracking.wandb_process import FINISH_TIMEOUT_S, INIT_TIMEOUT_S, OpenRun, RunRefused, Writer, WriterLost
from activities.tracking.wandb_writer import Done, History, Line, TrainStep, WriterStart
from longshore.fields import Frozen
from shared.errors import NotFound
from shared.runs.events import EventCursor, RunEvent, read_run_events
from shared.runs.requests import Run, RunRecord, WandbRun
from shared.runs.status import StepStatus
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectInfo, ObjectStore

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
