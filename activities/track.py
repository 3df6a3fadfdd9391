"""Track: follow a run's events and train steps, and hand them to W&B.

W&B may be slow, away or broken: the run does not notice.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.heartbeat import beating, host_is_leaving
from activities.wandb_writer import Line, TrainStep, WriterStart
from shared.child_environment import child_environment
from shared.errors import NotFound
from shared.models import Frozen
from shared.paths import RunKeys
from shared.run_events import EventCursor, RunEvent, read_run_events
from shared.runs import Run, RunRecord, StepStatus, WandbRun
from shared.settings import Settings
from shared.store import ObjectStore, open_store

POLL_S = 1.0
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 60.0
_LARGEST_WRITE = 1 << 16
_log = logging.getLogger(__name__)

Mode = Literal["offline", "online"]


class TrackRequest(Frozen):
    run_id: str
    run: Run


class Tracked(Frozen):
    """`folder` holds what W&B wrote on this machine; `warning` says what went wrong with W&B, if anything did."""

    folder: str | None = None
    num_events: int = 0
    warning: str | None = None


class WriterLost(Exception):
    """The writer process ended early, or did not end in time."""


class Track:
    """Writes one run to W&B, from its first event to its end."""

    def __init__(
        self, settings: Settings, *, init_timeout_s: float = INIT_TIMEOUT_S, finish_timeout_s: float = FINISH_TIMEOUT_S
    ) -> None:
        self._settings = settings
        self._finish_timeout_s = finish_timeout_s
        self._init_timeout_s = init_timeout_s

    @activity.defn(name="track")
    def track(self, request: TrackRequest) -> Tracked:
        """Follow the run until its result stands. Trouble with W&B ends in a warning, never in an error.

        Every attempt writes from the first event, into a folder of its own that takes its place at the end, so a retry
        duplicates nothing. When a W&B server cannot be reached, the run is written offline instead. A cancelled
        activity still writes what is there before it ends.
        """
        modes: list[Mode] = ["offline"]
        match self._settings.wandb_mode:
            case "disabled":
                return Tracked()
            case "online":
                modes = ["online", "offline"]
        warning = None
        with beating(), activity.shield_thread_cancel_exception():
            for mode in modes:
                try:
                    return self._follow(request, mode).model_copy(update={"warning": warning})
                except WriterLost as error:
                    warning = f"W&B could not be written {mode}: {error}"
                    _log.warning("run %s: %s", request.run_id, warning)
        return Tracked(warning=warning)

    def _follow(self, request: TrackRequest, mode: Mode) -> Tracked:
        folder = self._settings.root_path / "wandb" / request.run_id
        temporary = folder.with_name(f".{request.run_id}.{uuid.uuid4().hex}")
        for left in folder.parent.glob(f".{request.run_id}.*"):
            shutil.rmtree(left, ignore_errors=True)
        with Writer(self._start(request, mode, temporary)) as writer:
            num_events = self._copy(request, writer.send)
            writer.finish(self._finish_timeout_s)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        return Tracked(folder=str(folder), num_events=num_events)

    def _start(self, request: TrackRequest, mode: Mode, folder: Path) -> WriterStart:
        place = self._place(request.run_id)
        return WriterStart(
            run_id=request.run_id,
            name=place.name or request.run.name or request.run_id,
            project=place.project,
            entity=place.entity,
            tags=place.tags,
            kind=request.run.kind,
            mode=mode,
            folder=folder,
            init_timeout_s=self._init_timeout_s,
            config=request.run.model_dump(mode="json"),
        )

    def _place(self, run_id: str) -> WandbRun:
        """Where the run's sender wants it in W&B, or else the installation."""
        store = open_store(self._settings.store, self._settings.s3)
        try:
            record = RunRecord.model_validate_json(store.get_bytes(RunKeys(run_id).record))
        except NotFound:  # a run that was started by hand
            return WandbRun(project=self._settings.wandb_project)
        return record.source.wandb or WandbRun(project=self._settings.wandb_project)

    def _copy(self, request: TrackRequest, send: Callable[[Sequence[Line]], None]) -> int:
        store = open_store(self._settings.store, self._settings.s3)
        run_id, cursor, steps = request.run_id, EventCursor(), TrainSteps(store, request)
        num_events = 0
        deadline: float | None = None
        while True:
            # Asked first, so that the last events are read after it.
            ended = store.head(RunKeys(run_id).result) is not None
            events, cursor = read_run_events(store, run_id, cursor)
            num_events += len(events)
            send(steps.among(events, ended))
            if ended or (deadline is not None and time.monotonic() > deadline):
                return num_events
            if host_is_leaving():
                raise CancelledError
            if activity.is_cancelled() and deadline is None:
                deadline = time.monotonic() + self._finish_timeout_s
            time.sleep(POLL_S)


class TrainSteps:
    """The train steps of an RL run, each put behind the events of its own job and before those of the next.

    Jobs are numbered as their steps are, and a step comes on record after its job's events, and before the next job
    begins.
    """

    def __init__(self, store: ObjectStore, request: TrackRequest) -> None:
        self._store, self._folder = store, f"{RunKeys(request.run_id).steps}/"
        self._has_steps = request.run.kind == "rl"
        self._before = self._sent = ""
        self._last_job = ""

    def among(self, events: Sequence[RunEvent], all_are_read: bool) -> list[Line]:
        """The events just read, with the steps whose events are read by now."""
        if events:
            self._last_job = events[-1].job_id
        waiting = self._waiting()
        # A step that was listed before the events were read, or has a later job behind it, has all of its events.
        ready = [k for k in waiting if all_are_read or k <= self._before or _number(k) < int(self._last_job or 0)]
        self._before = waiting[-1] if waiting else self._before
        self._sent = ready[-1] if ready else self._sent
        lines: list[Line] = []
        for item in events:
            while ready and _number(ready[0]) < int(item.job_id):
                lines.append(self._record(ready.pop(0)))
            lines.append(item.event)
        return lines + [self._record(key) for key in ready]

    def _waiting(self) -> list[str]:
        """Keys of records that were not sent, in order of step."""
        if not self._has_steps:
            return []
        return sorted(info.key for info in self._store.list(self._folder) if info.key > self._sent)

    def _record(self, key: str) -> TrainStep:
        return TrainStep(record=StepStatus.model_validate_json(self._store.get_bytes(key)))


def _number(key: str) -> int:
    """The step that a record's key is of."""
    return int(key.rsplit("/", 1)[-1].removesuffix(".json"))


class Writer:
    """The writer process, and what it has not taken yet. Nothing here waits for it longer than it is told to."""

    def __init__(self, start: WriterStart) -> None:
        start.folder.mkdir(parents=True, exist_ok=True)
        self._log_path = start.folder / "writer.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "activities.wandb_writer"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[1],
                env={**child_environment("wandb"), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._pending: deque[bytes] = deque([start.model_dump_json().encode() + b"\n"])

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()

    def send(self, lines: Sequence[Line]) -> None:
        """Hand lines over; what the process does not take now waits here.

        Raises:
            WriterLost: the process has ended.
        """
        self._pending.extend(line.model_dump_json().encode() + b"\n" for line in lines)
        self._pump(0.0)

    def finish(self, timeout_s: float) -> None:
        """Hand over the rest and let the process end by itself.

        Raises:
            WriterLost: it did not, in time or at all.
        """
        deadline = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < deadline:
            self._pump(0.2)
        self._stdin.close()
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise WriterLost(f"did not finish within {timeout_s:g} s") from None
        if status != 0:
            raise WriterLost(self._last_words())

    def _pump(self, timeout_s: float) -> None:
        if self._process.poll() is not None:
            raise WriterLost(self._last_words())
        while self._pending and select.select([], [self._stdin], [], timeout_s)[1]:
            try:
                written = os.write(self._stdin.fileno(), self._pending[0][:_LARGEST_WRITE])
            except BrokenPipeError:
                self._process.wait()
                raise WriterLost(self._last_words()) from None
            rest = self._pending.popleft()[written:]
            if rest:
                self._pending.appendleft(rest)

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the writer ended with status {self._process.returncode}"
