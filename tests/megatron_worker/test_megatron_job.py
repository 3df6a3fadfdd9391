"""The runner around the real engines on a tiny Qwen3: resumed, reused, one engine as the other, a step by hand."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from longshore.events import Evaluated, Offloaded, Probed, Saved, Started, Step, Succeeded
from longshore.fields import Artifact
from longshore.training import Full, Layout, Lora
from megatron_worker.engine import Scores
from megatron_worker.losses import supervised
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.planned import learning_rate
from megatron_worker.process.ranks import Staging, WorkerRanks
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from megatron_worker.training.batches import PackedBatches
from megatron_worker.warm_engine import build_engine
from megatron_worker.worker import Worker, make_deterministic
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, Schedule
from shared.settings import S3Settings
from shared.storage.artifacts import sha256_file
from tests.megatron_worker.engines import checkpoint_bytes, furthest
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.test_policy_jobs import TRAINER, rollouts
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


PROBE = (5, 9, 300, 7, 7, 511)


def a_plan(workshop, **changes):
    return plan(workshop, probe=PROBE, **changes)


def assert_close(ours, theirs, rel):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert set(mine) == set(other)
        for name in mine:
            assert mine[name] == pytest.approx(other[name], rel=rel, abs=rel / 10), name


def weights(job):
    folder = Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}" / "weights"
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()], ids=["lora", "full"])
def test_a_job_says_and_leaves_what_megatron_s_does(worker, workshop, trainable):
    theirs = do(worker, workshop, f"{trainable.kind}-megatron", a_plan(workshop, trainable=trainable))
    ours = do(worker, workshop, f"{trainable.kind}-fsdp", a_plan(workshop, trainable=trainable, engine="fsdp"))
    assert_close(numbers(ours.log_path), numbers(theirs.log_path), rel=1e-4)
    assert furthest(weights(ours), weights(theirs)) <= 1e-4
    offloaded = next(e for e in read_log(ours.log_path) if isinstance(e, Offloaded))
    assert offloaded.device_bytes_after == 0
    assert bool(offloaded.host_bytes) == (trainable.kind == "lora")  # full training used the base up
    samples = [[e.samples for e in read_log(job.log_path) if isinstance(e, Evaluated)] for job in (ours, theirs)]
    assert samples[0] == samples[1] and samples[0][0][0].completion
    moved = a_plan(workshop, trainable=trainable, engine="fsdp")
    resumed = do(worker, workshop, f"{trainable.kind}-moved", moved, checkpoint(theirs, 2))
    assert furthest(weights(resumed), weights(theirs)) <= 1e-4


def on_two_ranks(workshop, job: Job) -> Path:
    """Where the log is of a job done by hand."""
    path, into = workshop.root / f"{job.plan.run_id}.json", workshop.root / f"{job.plan.run_id}-by-hand"
    path.write_text(job.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), "--into", str(into), num_ranks=2)
    log = next(into.rglob("log.jsonl"))
    assert next(e for e in read_log(log) if isinstance(e, Started)).world_size == 2
    return log


@pytest.mark.parametrize(
    ("objective", "budget"), [("sft", None), ("rl", None), ("rl-budget", 1_400_000)], ids=["sft", "rl", "rl-budget"]
)
def test_two_ranks_report_what_one_does(worker, workshop, objective, budget):
    """A step's bins are three: one rank has a bin less than the other. Nor do their turns of scoring come out even.

    Within a budget each rank measures for itself; ranks that cut otherwise than others would wait for them for ever.
    """
    single = a_plan(workshop, engine="fsdp", run_id=objective)
    if objective != "sft":
        data = rollouts(workshop.root, 512)
        changes = {"loss": TRAINER, "data": data, "temperature": 0.7, "checkpointing": Checkpointing()}
        single = a_plan(replace(workshop, data=data), engine="fsdp", run_id=objective, **changes)
    changes = {"layout": Layout(dp=2), "memory_budget_bytes": budget}
    double = JobPlan.model_validate(single.model_dump() | changes)
    one = do(worker, workshop, f"{objective}-one", single)
    log = on_two_ranks(workshop, workshop.job(f"{objective}-two", double))
    ours, theirs = numbers(log), numbers(one.log_path)
    if budget is not None:
        cut = [[step.pop("num_bins") for step in steps if "num_bins" in step] for steps in (ours, theirs)]
        assert cut == [[3, 3, 3, 3], [2, 2, 2, 2]]
    assert_close(ours, theirs, rel=2e-4)


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()], ids=["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_job_by_hand_gives_the_runners_bytes(worker, workshop, tmp_path, trainable, dtype):
    what = plan(
        workshop,
        trainable=trainable,
        dtype=dtype,
        schedule=Schedule(kind="cosine", learning_rate=5e-3, warmup_steps=1),
        checkpointing=Checkpointing(every_steps=0),
    )
    job = do(worker, workshop, f"runner-{trainable.kind}-{dtype}", what)
    expected = Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}"

    make_deterministic(what)
    rank = TrainerRank(MegatronEngine(folder_of(what.model), what.layout, what.dtype))
    name = None if trainable == Full() else "default"
    if name is None:
        rank.train_base()
    else:
        rank.create_adapter(name, trainable, what.seed)
    with PackedBatches.open(folder_of(what.data.units), folder_of(what.data.plan)) as data:
        for step in range(what.num_steps):
            weight = torch.zeros((), dtype=torch.float64)
            for units in data.bins(step):
                batch = data.batch(units, rank.facts.device)
                outputs = rank.forward(inputs_of(batch))
                scores = Scores(torch.cat([output.target_logprob_P for output in outputs]))
                sums = supervised.cross_entropy_sums(scores, batch)
                rank.backward(sums.loss)
                weight += sums.weight
            rate = learning_rate(what.schedule, step, what.num_steps)
            rank.optim_step(what.optimizer, rate, rank.reduce({"weight": weight})["weight"])
    rank.save(name, tmp_path / "by-hand")
    ours, theirs = checkpoint_bytes(tmp_path / "by-hand"), checkpoint_bytes(expected)
    assert theirs.items() - ours.items() == {
        (path, theirs[path]) for path in ("rng.safetensors", "state.json", "manifest.json")
    }
    again = TrainerRank(MegatronEngine(folder_of(what.model), what.layout, what.dtype))
    if name is None:  # it goes on from a job's checkpoint
        again.train_base()
        again.load(None, expected)
        rank_s = dict(rank.engine.named_weights())
        assert all(torch.equal(weight, rank_s[tensor]) for tensor, weight in again.engine.named_weights())


def folder_of(artifact):
    return Path(artifact.uri.removeprefix("file://"))


def inputs_of(batch):
    """The chains of a bin, each with the positions that the bin scores."""
    starts = [*(batch.parent_T == -1).nonzero()[:, 0].tolist(), len(batch.parent_T)]
    inputs = []
    for start, stop in pairwise(starts):
        inside_N = (batch.hidden_index_N >= start) & (batch.hidden_index_N < stop)
        positions = (batch.hidden_index_N[inside_N] - start).tolist()
        inputs.append(ForwardInput(batch.token_id_T[start:stop], positions=positions, target_logprobs=True))
    return inputs
