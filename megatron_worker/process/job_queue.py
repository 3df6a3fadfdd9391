"""Rank 0's side of the worker's folder: claim a job, check its fence, see a cancel or stop, archive."""

import errno
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from longshore.events import Cancelled, Event, Failed, Succeeded
from shared.errors import InvalidInput
from shared.jobs.job import Job, LeaseMark, WorkerPlan
from shared.storage.paths import WorkerPaths

# --- The event writer: whole lines, gapless numbers, nothing after the terminal event ---

TERMINAL = (Succeeded, Failed, Cancelled)


class EventLog:
    """Appends a job's events to its log. Ranks other than 0 have one without a path, which writes nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidInput if the log already holds events: each attempt has a new log."""
        self._seq = 0
        self._file: int | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            raise InvalidInput("the log already holds events of another attempt; choose another folder", str(path))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, kind: Callable[..., Event], /, **fields: object) -> None:
        """Append one event; `seq` and `time` are filled in here. A terminal event is fsynced and closes the log.

        Raises OSError: the line does not fit on the disk; nothing of it is left, and `seq` is not used up.
        """
        if self._file is None:
            return
        event = kind(seq=self._seq + 1, time=time.time(), **fields)
        line, end = event.model_dump_json().encode() + b"\n", os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._seq += 1
        if isinstance(event, TERMINAL):
            os.fsync(self._file)
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class ClaimedJob:
    """A claimed job: its file below `claimed/`, its log, and the reason if it is refused as stale."""

    path: Path
    job: Job
    report: EventLog
    stale: str | None


class JobQueue:
    """The worker's folder of jobs. Rank 0 alone reads it, and broadcasts jobs to the other ranks."""

    def __init__(self, paths: WorkerPaths) -> None:
        self.paths = paths
        for folder in (paths.jobs, paths.claimed, paths.archive):
            folder.mkdir(parents=True, exist_ok=True)

    def claim(self, accepts: Callable[[WorkerPlan], bool] = lambda plan: True) -> ClaimedJob | None:
        """Take the oldest job, by rename. Files that are still being written have other names.

        `accepts`: whether the job may begin now; else it waits, and so do all later jobs.
        """
        for path in sorted(self.paths.jobs.glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            try:
                job = Job.model_validate_json(path.read_bytes())
            except ValidationError as error:
                self._set_aside(self._take(path), error)
                continue
            if not accepts(job.plan):
                return None
            claimed = self._take(path)
            try:
                report = EventLog(Path(job.log_path))
            except InvalidInput as error:
                self._set_aside(claimed, error)
                continue
            return ClaimedJob(claimed, job, report, self._stale(job))
        return None

    def _take(self, path: Path) -> Path:
        claimed = self.paths.claimed / path.name
        path.rename(claimed)
        return claimed

    def is_cancelled(self, job: Job) -> bool:
        return self.paths.cancel(job.plan.run_id, job.plan.job_id, job.fence).exists()

    def should_leave(self) -> bool:
        return self.paths.stop.exists()

    def has_no_lease(self) -> bool:
        """Return True if the worker served leases, and serves none now."""
        return self.paths.leases.exists() and not any(self.paths.leases.glob("*.json"))

    def archive(self, claimed: Path) -> None:
        claimed.rename(self.paths.archive / claimed.name)

    def _stale(self, job: Job) -> str | None:
        """Return why the current lease forbids this job; None if it may be done, as always without any lease."""
        if not self.paths.leases.exists():
            return None
        try:
            lease = LeaseMark.model_validate_json(self.paths.lease(job.plan.run_id).read_bytes())
        except FileNotFoundError:
            return f"run {job.plan.run_id} has no lease of this worker"
        if job.fence.is_older_than(lease.fence):
            return f"the job's fence {job.fence.label} is older than the lease's {lease.fence.label}"
        return None

    def _set_aside(self, claimed: Path, error: Exception) -> None:
        """Archive a file that is no job, or whose log is another attempt's: there is no log to report to."""
        print(f"{claimed.name} is set aside: {error}", file=sys.stderr, flush=True)
        claimed.rename(self.paths.archive / f"{claimed.name}.refused")
