"""Stages artifacts for this host's workers, which have no credentials of a store (shared/storage/staging.py)."""

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from longshore.fields import Artifact
from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.jobs.commands import CommandHead
from shared.jobs.job import Job, artifacts_of
from shared.jobs.leases import LeaseMark
from shared.settings import S3Settings
from shared.storage.artifacts import stage
from shared.storage.files import write_atomically
from shared.storage.paths import RunKeys, WorkerPaths
from shared.storage.staging import StageAnswer, StageRequest
from shared.storage.store import ObjectStore

_log = logging.getLogger(__name__)


class _JobHasEnded(Exception): ...


class Stager:
    """Stages artifacts in the cache that this host shares with its workers. Safe to use from several threads."""

    def __init__(self, cache: Path, s3: S3Settings) -> None:
        self._cache, self._s3 = cache, s3
        self._locks: WeakValueDictionary[Artifact, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    def stage(self, artifact: Artifact, check: Callable[[], None]) -> None:
        """Stage an artifact. Waits for other jobs that are staging the same one, so that it is fetched once.

        Calls `check` now and then. Raises as `stage` of shared/storage/artifacts.py does, and what `check` raises.
        """
        with self._lock:
            lock = self._locks.setdefault(artifact, threading.Lock())
        while not lock.acquire(timeout=0.05):
            check()
        try:
            stage(artifact, self._cache, self._s3, check=check)
        finally:
            lock.release()


class JobStaging:
    """Stages artifacts that a job's worker asks for, in a thread, if the job or a command of its session names them."""

    def __init__(self, stager: Stager, job: Job, store: ObjectStore) -> None:
        self._stager, self._job, self._store = stager, job, store
        self._request, self._answer = StageRequest.path(job.log_path), StageAnswer.path(job.log_path)
        self._answering: Future[StageAnswer] | None = None
        self._is_over = threading.Event()

    def look(self) -> None:
        """Start a new request, or answer it once the artifact is staged. Does not block."""
        if self._answering is not None and self._answering.done():
            write_atomically(self._answer, self._answering.result().model_dump_json().encode(), is_durable=False)
            self._answering = None
        if self._answering is None and self._request.exists():
            data, self._answering = self._request.read_bytes(), Future()
            self._request.unlink()
            threading.Thread(target=self._work, args=(data, self._answering), name="staging", daemon=True).start()

    def end(self) -> None:
        """Stop staging soon, because nobody waits for it any more."""
        self._is_over.set()

    def _work(self, data: bytes, answering: "Future[StageAnswer]") -> None:
        try:
            request = StageRequest.model_validate_json(data)
            for artifact in request.artifacts:
                self._check_is_named(artifact, request.command)
                self._stager.stage(artifact, self._check)
            answering.set_result(StageAnswer())
        except Exception as error:
            if not self._is_over.is_set():
                _log.warning("inputs of job %s of %s: %r", self._job.plan.job_id, self._job.plan.run_id, error)
            answering.set_result(StageAnswer.of(error))

    def _check_is_named(self, artifact: Artifact, command: int | None) -> None:
        """Refuse artifacts that the job does not name: a worker may run untrusted code, and its host can read more."""
        if command is None:
            is_named = artifact in artifacts_of(self._job)
        else:
            data = self._store.get_bytes(RunKeys(self._job.plan.run_id).command(command))
            is_named = CommandHead.model_validate_json(data).checkpoint == artifact
        if not is_named:
            raise InvalidInput("the job does not name this artifact", artifact.uri)

    def _check(self) -> None:
        if self._is_over.is_set():
            raise _JobHasEnded


class NodeStaging:
    """Stages inputs of this machine's ranks for jobs of another machine's host, by the job files in the store.

    A run's jobs on one worker are sequential, so an earlier job's files can be deleted when the next one asks.
    """

    def __init__(self, stager: Stager, paths: WorkerPaths, mark: LeaseMark, store: ObjectStore) -> None:
        self._stager, self._paths, self._mark, self._store = stager, paths, mark, store
        self._jobs = paths.outputs(mark.run_id, "*", mark.fence).parent.parent
        self._current: tuple[Path, JobStaging] | None = None

    def look(self) -> None:
        """Start a new request, or answer it. A request waits until its job is in the store."""
        for wanted in self._jobs.glob(f"*/{self._mark.fence.label}/wanted.json"):
            with suppress(NotFound, StoreUnavailable):
                self._turn_to(wanted.parent.parent)
        if self._current is not None:
            self._current[1].look()

    def _turn_to(self, folder: Path) -> None:
        if self._current is not None and self._current[0] == folder:
            return
        fence = self._mark.fence
        job = Job.model_validate_json(self._store.get_bytes(RunKeys(self._mark.run_id).job(folder.name, fence)))
        job = job.model_copy(update=Job.places(self._paths, job.plan, fence))
        if self._current is not None:
            self.end()
            shutil.rmtree(self._current[0], ignore_errors=True)
        self._current = folder, JobStaging(self._stager, job, self._store)

    def end(self) -> None:
        if self._current is not None:
            self._current[1].end()
