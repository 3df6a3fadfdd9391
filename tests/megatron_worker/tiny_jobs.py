"""Jobs done by a worker of the tiny engine, and what they leave."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from activities.hosts.lease import JobStaging, Stager
from longshore.events import Failed, Saved, Step, Terminal
from longshore.fields import Artifact
from megatron_worker.process.ranks import Staging, WorkerRanks
from megatron_worker.warm_engine import BuildEngine
from megatron_worker.worker import Worker
from shared.jobs.job import Job, JobPlan
from shared.settings import S3Settings
from shared.storage.artifacts import sha256_file
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from shared.storage.store import LocalStore
from tests.megatron_worker.tiny_engine import TinyEngine, build
from tests.megatron_worker.workshop import Workshop, read_log, submit

_BY_HAND = S3Settings()


def new_worker(
    root: Path, build: BuildEngine = build, slot_bytes: int | None = None, s3: S3Settings | None = _BY_HAND
) -> Worker:
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    return Worker(ranks, Staging(root / "cache", s3, ranks), build, slot_bytes)


def noted_in(engines: list[TinyEngine], of: type[TinyEngine] = TinyEngine) -> BuildEngine:
    """What builds engines and leaves them in this list."""

    def build_one(plan: JobPlan, model: Path) -> TinyEngine:
        engines.append(of(model))
        return engines[-1]

    return build_one


def do(
    workshop: Workshop, name: str, plan: JobPlan, start: Artifact | None = None, worker: Worker | None = None
) -> Job:
    job = workshop.job(name, plan, start)
    (worker or new_worker(workshop.root)).do_one(job)
    return job


def serve(
    workshop: Workshop,
    jobs: Sequence[JobPlan],
    build: BuildEngine = build,
    name: str = "shared",
    s3: S3Settings | None = None,
) -> list[Job]:
    """A worker that finds these jobs in its folder, and is asked to leave when the last of them has ended.

    What it lacks is staged as its host would do it.
    """
    paths = WorkerPaths(workshop.root / name)
    submitted = [submit(paths, plan) for plan in jobs]
    stager, store = Stager(workshop.root / "cache", s3 or S3Settings()), LocalStore(workshop.root / "store")
    going_on = [(job, JobStaging(stager, job, store)) for job in submitted]
    is_gone = threading.Event()

    def stop_at_the_end() -> None:
        deadline = time.monotonic() + 300
        while going_on and time.monotonic() < deadline and not is_gone.wait(0.01):
            for job, staging in list(going_on):
                if has_ended(job):
                    staging.end()
                    going_on.remove((job, staging))
                else:
                    staging.look()
        write_atomically(paths.stop, b"")

    watching = threading.Thread(target=stop_at_the_end)
    watching.start()
    try:
        new_worker(workshop.root, build, s3=None).serve(paths)
    finally:
        is_gone.set()
        watching.join()
    return submitted


def has_ended(job: Job) -> bool:
    return Path(job.log_path).exists() and isinstance((read_log(job.log_path) or [None])[-1], Terminal)


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
