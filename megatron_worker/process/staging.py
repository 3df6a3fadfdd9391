"""Finds a job's inputs as local folders, with all hashes checked: one rank of each machine, before the others."""

import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longshore.fields import Artifact
from megatron_worker.process.background import Awaited, Check, in_background
from megatron_worker.process.faults import Fault, JobFailed
from megatron_worker.process.ranks import WorkerRanks
from shared.jobs.job import Job, artifacts_of
from shared.settings import S3Settings
from shared.storage.artifacts import Manifest, stage, staged
from shared.storage.files import write_atomically
from shared.storage.staging import StageAnswer, StageRequest

_POLL_S = 0.005
Folders = dict[Artifact, Path]
_Found = dict[Artifact, tuple[Path, Manifest]]


class Inputs(NamedTuple):
    """A job's artifacts as folders, and the SHA-256 of the base model's files, wherever they lie."""

    folders: Folders
    model_sha256: str


@dataclass(frozen=True)
class Staging:
    """Where artifacts are kept on this machine, and how those come there that are not on it.

    `s3`: how to reach a store there, of a job that is done by hand; None: the worker's host stages them.
    """

    cache: Path
    s3: S3Settings | None
    ranks: WorkerRanks

    def fetch(
        self, job: Job, cancelled: Callable[[], bool], at_hand: Collection[Artifact | None] = ()
    ) -> Generator[Awaited, None, Inputs]:
        """Return every input of the job but those in `at_hand`. Yields while it waits for a store.

        Raises:
            JobFailed: on all ranks, if one of them cannot get an input.
            CancelledEarly: the job was cancelled. The transfer ends soon, and leaves nothing in the cache.
        """
        wanted = StageRequest(artifacts=tuple(artifact for artifact in artifacts_of(job) if artifact not in at_hand))
        found = yield from self._fetch(job, wanted, cancelled)
        folders = {artifact: folder for artifact, (folder, _) in found.items()}
        return Inputs(folders, found[job.plan.model][1].contents_sha256)

    def fetch_one(
        self, job: Job, command: int, artifact: Artifact, cancelled: Callable[[], bool]
    ) -> Generator[Awaited, None, Path]:
        """Return the artifact that a session's command names as a folder. Yields and raises as `fetch`."""
        found = yield from self._fetch(job, StageRequest(artifacts=(artifact,), command=command), cancelled)
        return found[artifact][0]

    def _fetch(self, job: Job, wanted: StageRequest, cancelled: Callable[[], bool]) -> Generator[Awaited, None, _Found]:
        def find(check: Check) -> _Found:
            return self._found(job, wanted, check)

        if self.ranks.world_size > 1:
            is_first = self.ranks.local_rank == 0
            yield from in_background(lambda check: find(check) if is_first else None, self.ranks, cancelled)
        return (yield from in_background(find, self.ranks, cancelled))

    def _found(self, job: Job, wanted: StageRequest, check: Check) -> _Found:
        missing = tuple(each for each in wanted.artifacts if staged(each, self.cache, check) is None)
        if missing and self.s3 is not None:
            for artifact in missing:
                stage(artifact, self.cache, self.s3, check=check)
        elif missing and self.ranks.local_rank == 0:
            _have_staged(job, wanted.model_copy(update={"artifacts": missing}), check)
        return {artifact: self._here(artifact, check) for artifact in wanted.artifacts}

    def _here(self, artifact: Artifact, check: Check) -> tuple[Path, Manifest]:
        if (found := staged(artifact, self.cache, check)) is None:
            raise JobFailed(Fault(kind="error", message=f"{artifact.uri} is no longer in the cache, {self.cache}"))
        return found


def _have_staged(job: Job, request: StageRequest, check: Check) -> None:
    """Have the host stage artifacts, and wait for that. Raises JobFailed if it cannot."""
    path = StageAnswer.path(job.log_path)
    path.unlink(missing_ok=True)
    write_atomically(StageRequest.path(job.log_path), request.model_dump_json().encode(), is_durable=False)
    while not path.exists():
        check()
        time.sleep(_POLL_S)
    answer = StageAnswer.model_validate_json(path.read_bytes())
    if answer.kind is not None:
        raise JobFailed(Fault(kind=answer.kind, message=answer.message))
