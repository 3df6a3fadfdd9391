"""The runner around the FSDP engine: the job files, metrics and checkpoints are Megatron's, on one rank and on two."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longshore.events import Evaluated, Offloaded, Started
from longshore.training import Full, Layout, Lora
from shared.jobs.job import Checkpointing, Job, JobPlan
from tests.megatron_worker.engines import furthest
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.test_megatron_job import NUM_STEPS, checkpoint, do, numbers, plan
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.test_policy_jobs import TRAINER, rollouts
from tests.megatron_worker.workshop import read_log

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
