"""Uploads of a job's results from the worker's disk into the store: its log, read line by line, and checkpoints."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from activities.hosts.session import carry_results
from activities.hosts.worker_process import log_tail
from activities.records.checkpoints import prune_checkpoints
from shared.errors import CorruptArtifact, DiskFull, StoreUnavailable
from shared.jobs.events import Event, Kept, Saved, parse_event
from shared.jobs.job import Job
from shared.runs.requests import FIRST_TENANT
from shared.runs.session_results import SessionResults
from shared.runs.status import CheckpointRef
from shared.storage.artifacts import upload_artifact
from shared.storage.files import write_atomically
from shared.storage.paths import RunKeys
from shared.storage.staging import ProfileRequest
from shared.storage.store import ObjectStore

_PATIENCE_S = 300.0
_PAUSE_S = 2.0
_PROFILE_LOOK_S = 5.0
_PART_SHARE = 0.02


@dataclass(frozen=True)
class LogLine:
    """One event, and the bytes of its line (newline included)."""

    data: bytes
    event: Event


class LogReader:
    """Follows one job's log. `offset` counts the bytes read so far; a line without its newline waits for the rest."""

    def __init__(self, path: Path, offset: int = 0, seq: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.seq = seq

    def read(self) -> list[LogLine]:
        """The whole lines that were appended since the last call.

        Raises ValueError: a line is not an event, or `seq` has a gap.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        return [self._line(line) for line in whole.splitlines(keepends=True)]

    def _line(self, data: bytes) -> LogLine:
        event = parse_event(data)
        if event.seq != self.seq + 1:
            raise ValueError(f"{self.path}: event {event.seq} follows event {self.seq}")
        self.seq = event.seq
        self.offset += len(data)
        return LogLine(data, event)


class Uploader:
    """Uploads a job's results in order, on its own thread, so that a slow store delays neither log nor cancellation.

    While the store is away for some minutes, the worker trains on. Leaving the `with` block waits for the call in
    progress, and drops uploads that `finish` did not wait for. `durable` is the newest checkpoint in the store.
    """

    def __init__(self, store: ObjectStore, job: Job, durable: CheckpointRef | None) -> None:
        self.durable = durable
        self._store = store
        self._job = job
        self._keys = RunKeys(job.plan.run_id)
        self._keep = job.plan.checkpointing.keep
        self._keep_states = job.plan.num_kept_states
        self._kept: set[int] = set()
        self._begun_at = time.monotonic()
        self._uploaded_at = 0.0
        self._lines: list[LogLine] = []
        self._parts: list[str] = []
        self._num_saved = 0
        self._away_since: float | None = None
        self._looked_at = 0.0
        self._asked: ProfileRequest | None = None
        self._pending: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def job(self) -> None:
        """Upload the job file, so that the job can be run again later, however it ends."""
        key = self._keys.job(self._job.plan.job_id, self._job.fence)
        self._begin(lambda: self._store.put_bytes(key, self._job.model_dump_json(indent=1).encode()))

    def checkpoint(self, saved: Saved) -> None:
        """Upload a checkpoint, after the log of the steps before it: a job that resumes from it needs their metrics."""
        self._part()
        self._num_saved += 1
        number = self._num_saved
        self._begin(lambda: self._checkpoint(saved, number))

    def keep(self, kept: Kept) -> None:
        """Mark the state of a step, which a session's client has asked for, before it is uploaded."""
        self._kept.add(kept.step)
        self._begin(lambda: self._store.put_bytes(f"{self._keys.kept_states}{kept.step:08d}", b""))

    def line(self, line: LogLine, at_once: bool) -> None:
        """Take a line of the log, to be uploaded at once or with the next piece."""
        self._lines.append(line)
        if at_once:
            self._part()

    def tick(self) -> None:
        """Upload a piece of the log if it is time, every second at first and every 30 s in a long job.

        Raises StoreUnavailable: something could not be uploaded, and waiting did not help.
        """
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        if time.monotonic() - self._looked_at > _PROFILE_LOOK_S:
            self._looked_at = time.monotonic()
            self._begin(self._profile)
        age_s = time.monotonic() - self._begun_at
        if time.monotonic() - self._uploaded_at > min(30.0, max(1.0, _PART_SHARE * age_s)):
            self._part()

    def finish(self, output: Path | None) -> None:
        """Upload the whole log, which replaces its pieces, and the end of `output`, if given; wait for all uploads."""
        if self._asked is not None:
            self._begin(self._profile)
        self._begin(lambda: self._whole_log(output))
        for future in self._pending:
            future.result()
        self._pending.clear()

    def _begin(self, step: Callable[[], bool | None]) -> None:
        self._pending.append(self._thread.submit(self._with_retries, step))

    def _part(self) -> None:
        self._uploaded_at = time.monotonic()
        if not self._lines:
            return
        key = self._keys.log_part(self._job.plan.job_id, self._job.fence, self._lines[0].event.seq)
        data = b"".join(line.data for line in self._lines)
        self._lines.clear()
        self._parts.append(key)
        self._begin(lambda: self._store.put_bytes(key, data))

    def _checkpoint(self, saved: Saved, number: int) -> bool:
        """Upload a checkpoint, its manifest last; then delete the local copy, and prune older ones in the store.

        If `keep` newer ones are waiting already, delete it without uploading, unless a client asked for it: a slow
        store must not fill the disk.
        """
        folder = Path(saved.path)
        if self._num_saved - number >= self._keep and saved.step not in self._kept:
            shutil.rmtree(folder, ignore_errors=True)
            return False
        if self._job.commands_dir is not None:
            results = SessionResults(self._store, self._job.tenant or FIRST_TENANT, self._job.plan.run_id)
            carry_results(results, Path(self._job.commands_dir), saved.step)
        artifact = upload_artifact(self._store, self._keys.checkpoint(self._job.fence, saved.step), folder)
        if artifact.sha256 != saved.manifest_sha256:
            raise CorruptArtifact("the checkpoint's manifest is not the one that the worker announced", artifact.uri)
        self.durable = CheckpointRef(step=saved.step, fence=self._job.fence, artifact=artifact)
        shutil.rmtree(folder, ignore_errors=True)
        prune_checkpoints(self._store, self._job.plan.run_id, self._keep, self._job.fence, self._keep_states)
        return True

    def _profile(self) -> bool:
        """Pass a request for a trace of steps to the worker, and its trace to the store. False: nothing was written.

        A job that ends before the worker has begun leaves the request to the run's next job.
        """
        log = self._job.log_path
        if self._asked is None:
            if self._store.head(self._keys.profile_request) is not None:
                self._asked = ProfileRequest.model_validate_json(self._store.get_bytes(self._keys.profile_request))
                write_atomically(ProfileRequest.path(log), self._asked.model_dump_json().encode())
        elif (trace := self._asked.trace(log)).exists():
            key = self._keys.profile(self._job.plan.job_id, self._job.fence, self._asked.profile_id)
            self._store.put_file(key, trace)
            self._store.delete(self._keys.profile_request)
            trace.unlink()
            self._asked = None
            return True
        return False

    def _whole_log(self, output: Path | None) -> None:
        job_id, fence = self._job.plan.job_id, self._job.fence
        log = Path(self._job.log_path)
        if log.exists():
            data = log.read_bytes()
            self._store.put_bytes(self._keys.log(job_id, fence), data[: data.rfind(b"\n") + 1])
            for key in self._parts:
                self._store.delete(key)
        if output is not None:
            self._store.put_bytes(self._keys.output(job_id, fence), log_tail(output).encode())

    def _with_retries(self, step: Callable[[], bool | None]) -> None:
        """Repeat a step until it is done, or the store has been away for `_PATIENCE_S`, counted over all steps.

        A step that returns False has put nothing there, so it does not count as a sign that the store is back.
        """
        while True:
            try:
                if step() is not False:
                    self._away_since = None
                return
            except DiskFull:
                raise
            except StoreUnavailable:
                self._away_since = self._away_since or time.monotonic()
                if time.monotonic() - self._away_since > _PATIENCE_S:
                    raise
            time.sleep(_PAUSE_S)
