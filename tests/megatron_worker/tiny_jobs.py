"""Jobs done by a worker of the tiny engine, and what they leave."""

from pathlib import Path

import torch.distributed as dist

from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Staging
from megatron_worker.warm_engine import BuildEngine
from megatron_worker.worker import Worker
from shared.contract import Artifact
from shared.jobs.events import Failed, Saved, Step
from shared.jobs.job import Job, JobPlan
from shared.settings import S3Settings
from shared.storage.artifacts import sha256_file
from tests.megatron_worker.tiny_engine import build
from tests.megatron_worker.workshop import Workshop, read_log


def new_worker(root: Path, build: BuildEngine = build) -> Worker:
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    return Worker(ranks, Staging(root / "cache", S3Settings(), ranks), build)


def do(
    workshop: Workshop, name: str, plan: JobPlan, start: Artifact | None = None, worker: Worker | None = None
) -> Job:
    job = workshop.job(name, plan, start)
    (worker or new_worker(workshop.root)).do_one(job)
    return job


def adapter_sha256(job: Job, step: int) -> str:
    return sha256_file(Path(job.checkpoint_dir) / f"step-{step:08d}" / "weights" / "adapter_model.safetensors")


def checkpoint(job: Job, step: int) -> Artifact:
    saved = next(e for e in read_log(job.log_path) if isinstance(e, Saved) and e.step == step)
    return Artifact(uri=f"file://{saved.path}", sha256=saved.manifest_sha256)


def losses(job: Job) -> list[float]:
    return [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Step)]


def failure(job: Job) -> Failed:
    last = read_log(job.log_path)[-1]
    assert isinstance(last, Failed), last
    return last
