"""A job's inputs as local folders, every hash checked. One rank of each machine fetches, the others find it done."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_worker.process.ranks import WorkerRanks
from shared.contract import Artifact
from shared.jobs.job import Job, PackedData, reference_of
from shared.settings import S3Settings
from shared.storage.artifacts import files_of, stage


@dataclass(frozen=True)
class Staging:
    """Where artifacts are kept on this machine, and how to reach the store."""

    cache: Path
    s3: S3Settings
    ranks: WorkerRanks

    def fetch(self, job: Job, at_hand: Collection[Artifact | None] = ()) -> dict[Artifact, Path]:
        """Every input of the job but those at hand. Raises JobFailed on all ranks when one of them cannot have one."""
        wanted = [artifact for artifact in artifacts_of(job) if artifact not in at_hand]

        def fetch_all() -> dict[Artifact, Path]:
            return {artifact: stage(artifact, self.cache, self.s3) for artifact in wanted}

        if self.ranks.world_size > 1:
            self.ranks.agree(lambda: fetch_all() if self.ranks.local_rank == 0 else {})
        return self.ranks.agree(fetch_all)

    def contents_sha256(self, artifact: Artifact) -> str:
        """What an artifact's files are, wherever they lie. Raises JobFailed as `fetch`."""
        return self.ranks.agree(lambda: files_of(artifact, self.s3)[1].contents_sha256)


def artifacts_of(job: Job) -> list[Artifact]:
    plan = job.plan
    data = [plan.data, *([plan.evaluation.data] if plan.evaluation.data else [])]
    reference = reference_of(plan.loss)
    before = plan.initial_checkpoint if job.needs_its_beginning else None
    optional = [plan.initial_adapter, before, job.start, None if reference == "base" else reference]
    return [plan.model, *(a for d in data for a in _both(d)), *(a for a in optional if a is not None)]


def _both(data: PackedData) -> tuple[Artifact, Artifact]:
    return data.units, data.plan
