"""Fetches a job's inputs as local folders, with all hashes checked: one rank of each machine, before the others."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from megatron_worker.process.background import Awaited, Check, in_background
from megatron_worker.process.ranks import WorkerRanks
from shared.contract import Artifact
from shared.jobs.job import Job, JobPlan, reference_of
from shared.settings import S3Settings
from shared.storage.artifacts import files_of, stage

T = TypeVar("T")
Folders = dict[Artifact, Path]


class Inputs(NamedTuple):
    """A job's artifacts as folders, and the SHA-256 of the base model's files, wherever they lie."""

    folders: Folders
    model_sha256: str


@dataclass(frozen=True)
class Staging:
    """Where artifacts are kept on this machine, and how to reach the store."""

    cache: Path
    s3: S3Settings
    ranks: WorkerRanks
    _locks: "WeakValueDictionary[Artifact, Lock]" = field(default_factory=WeakValueDictionary, init=False)
    _locks_lock: Lock = field(default_factory=Lock, init=False)

    def fetch(
        self, job: Job, cancelled: Callable[[], bool], at_hand: Collection[Artifact | None] = ()
    ) -> Generator[Awaited, None, Inputs]:
        """Return every input of the job but those in `at_hand`. Yields while it waits for a store.

        Raises:
            JobFailed: on all ranks, if one of them cannot get an input.
            CancelledEarly: the job was cancelled. The transfer ends soon, and leaves nothing in the cache.
        """
        wanted = [artifact for artifact in artifacts_of(job) if artifact not in at_hand]

        def fetch_all(check: Check) -> Inputs:
            folders = {artifact: self._stage(artifact, check) for artifact in wanted}
            return Inputs(folders, files_of(job.plan.model, self.s3)[1].contents_sha256)

        return (yield from self._fetch(fetch_all, cancelled))

    def fetch_one(self, artifact: Artifact, cancelled: Callable[[], bool]) -> Generator[Awaited, None, Path]:
        """Return an artifact as a folder. Yields and raises as `fetch`."""
        return (yield from self._fetch(lambda check: self._stage(artifact, check), cancelled))

    def _fetch(self, fetch: Callable[[Check], T], cancelled: Callable[[], bool]) -> Generator[Awaited, None, T]:
        if self.ranks.world_size > 1:
            is_first = self.ranks.local_rank == 0
            yield from in_background(lambda check: fetch(check) if is_first else None, self.ranks, cancelled)
        return (yield from in_background(fetch, self.ranks, cancelled))

    def _stage(self, artifact: Artifact, check: Check) -> Path:
        """Stage an artifact, after any other job that is staging it, so that it is fetched once."""
        with self._locks_lock:
            lock = self._locks.setdefault(artifact, Lock())
        while not lock.acquire(timeout=0.05):
            check()
        try:
            return stage(artifact, self.cache, self.s3, check=check)
        finally:
            lock.release()


def artifacts_of(job: Job) -> list[Artifact]:
    plan = job.plan
    before = plan.initial_checkpoint if job.needs_its_beginning else None
    own = _of_training(plan) if isinstance(plan, JobPlan) else []
    return [plan.model, *(a for a in (*own, plan.initial_adapter, before, job.start) if a is not None)]


def _of_training(plan: JobPlan) -> list[Artifact]:
    reference = reference_of(plan.loss)
    packed = [plan.data, *([plan.evaluation.data] if plan.evaluation.data else [])]
    return [
        *(artifact for data in packed for artifact in (data.units, data.plan)),
        *([reference] if isinstance(reference, Artifact) else []),
    ]
