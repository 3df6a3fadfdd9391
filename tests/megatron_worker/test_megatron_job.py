"""The runner around the real engine: a tiny Qwen3 through LoRA, full training, resume and reuse, in a warm process."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from longshore.events import Evaluated, Offloaded, Probed, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.training import Full, Lora
from megatron_worker.process.ranks import Staging, WorkerRanks
from megatron_worker.warm_engine import build_engine
from megatron_worker.worker import Worker
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, Schedule
from shared.settings import S3Settings
from shared.storage.artifacts import sha256_file
from tests.megatron_worker.workshop import Workshop, read_log, workshop_of_ids

NUM_STEPS = 4
TIMES = {"step_s", "tokens_per_s", "memory_bytes"}


@pytest.fixture(scope="module")
def workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("megatron")
    model = shutil.copytree(tiny_model, root / "model")
    return workshop_of_ids(root, model, 512, NUM_STEPS, held_out=[[0, 1], [2, 3]], prompt_ids=[300, 301, 302])


@pytest.fixture(scope="module")
def worker(workshop: Workshop) -> Iterator[Worker]:
    yield new_worker(workshop.root)
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def new_worker(root: Path) -> Worker:
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    return Worker(ranks, Staging(root / "cache", S3Settings(), ranks), build_engine)


def plan(workshop: Workshop, **changes: object) -> JobPlan:
    fields: dict[str, object] = {
        "checkpointing": Checkpointing(every_steps=2),
        "evaluation": Evaluation(data=workshop.held_out, num_samples=1, sample_tokens=4),
        "schedule": Schedule(kind="constant", learning_rate=5e-3),
        "trainable": Lora(rank=4, alpha=8),
    }
    return workshop.plan(**(fields | changes))


def do(worker: Worker, workshop: Workshop, name: str, what: JobPlan, start: Artifact | None = None) -> Job:
    job = workshop.job(name, what, start)
    worker.do_one(job)
    assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
    return job


def weights_sha256(job: Job) -> dict[str, str]:
    folder = Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}" / "weights"
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


def checkpoint(job: Job, step: int) -> Artifact:
    saved = next(e for e in read_log(job.log_path) if isinstance(e, Saved) and e.step == step)
    return Artifact(uri=f"file://{saved.path}", sha256=saved.manifest_sha256)


def numbers(log: str | Path) -> list[dict[str, float]]:
    """What a job's events say, by event: metrics of steps and evaluations, the probe."""
    events = read_log(log)
    assert isinstance(events[-1], Succeeded), events[-1]
    found = [{k: v for k, v in e.metrics.items() if k not in TIMES} for e in events if isinstance(e, Step | Evaluated)]
    return found + [dict(enumerate(e.logprobs)) for e in events if isinstance(e, Probed)]


LORA = Lora(rank=4, alpha=8)
BY_MEGATRON = [("megatron", trainable, dtype) for trainable in (LORA, Full()) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("engine", "trainable", "dtype"),
    [*BY_MEGATRON, ("fsdp", LORA, "float32"), ("fsdp", Full(), "bfloat16")],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_job_gives_the_same_bytes_whole_resumed_and_after_others(
    worker: Worker, workshop: Workshop, engine: str, trainable: Lora | Full, dtype: str
):
    name, changes = f"{engine}-{trainable.kind}-{dtype}", {"engine": engine, "dtype": dtype, "probe": (5, 9, 300)}
    what = plan(workshop, trainable=trainable, **changes)
    whole = do(worker, workshop, f"{name}-whole", what)
    resumed = do(worker, workshop, f"{name}-resumed", what, checkpoint(whole, 2))
    do(worker, workshop, f"{name}-other", plan(workshop, seed=3, trainable=Full(), **changes))
    again = do(worker, workshop, f"{name}-again", what)
    assert weights_sha256(resumed) == weights_sha256(whole) == weights_sha256(again)
    assert checkpoint(again, NUM_STEPS).sha256 == checkpoint(whole, NUM_STEPS).sha256
    assert numbers(again.log_path) == numbers(whole.log_path)
    losses = [e.metrics["loss"] for e in read_log(whole.log_path) if isinstance(e, Evaluated)]
    assert losses[0] != losses[-1]


def test_every_metric_of_a_step_is_a_number_one_would_expect(worker: Worker, workshop: Workshop):
    job = do(worker, workshop, "metrics", plan(workshop))
    events = read_log(job.log_path)
    for step in (e.metrics for e in events if isinstance(e, Step)):
        assert 5 < step["loss"] < 8  # about ln 512
        assert step["learning_rate"] == 5e-3
        assert step["num_bins"] == 3
        assert 0 < step["grad_norm"] < 100
        assert step["memory_bytes"] > 0
    offloaded = next(e for e in events if isinstance(e, Offloaded))
    assert offloaded.device_bytes_after == 0 < offloaded.host_bytes
    samples = [e.samples for e in events if isinstance(e, Evaluated)]
    assert [len(s) for s in samples] == [1, 1]
    assert samples[0][0].completion
