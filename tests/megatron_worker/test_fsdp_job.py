"""The runner around the FSDP engine: the job files, metrics and checkpoints are Megatron's, on one rank and on two."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longshore.layout import Layout
from longshore.training import Full, Lora
from shared.jobs.events import Evaluated, Offloaded, Probed, Started, Step, Succeeded
from shared.jobs.job import (
    Checkpointing,
    Job,
    JobPlan,
    PackedData,
)
from tests.megatron_worker.engines import furthest
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.test_megatron_job import NUM_STEPS, checkpoint, do, plan, weights_sha256
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.test_policy_jobs import ROLLOUT, TRAINER, write_rollouts
from tests.megatron_worker.workshop import read_log, sealed, write_plan

PROBE = (5, 9, 300, 7, 7, 511)
TIMES = {"step_s", "tokens_per_s", "memory_bytes"}


def a_plan(workshop, **changes):
    return plan(workshop, probe=PROBE, **changes)


def numbers(log):
    """What a job's events say, by event: metrics of steps and evaluations, the probe."""
    events = read_log(log)
    assert isinstance(events[-1], Succeeded), events[-1]
    found = [{k: v for k, v in e.metrics.items() if k not in TIMES} for e in events if isinstance(e, (Step, Evaluated))]
    return found + [dict(enumerate(e.logprobs)) for e in events if isinstance(e, Probed)]


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
    resumed = do(
        worker, workshop, f"{trainable.kind}-moved", a_plan(workshop, trainable=trainable, engine="fsdp"),
        checkpoint(theirs, 2),
    )  # fmt: skip
    assert furthest(weights(resumed), weights(theirs)) <= 1e-4


@pytest.mark.parametrize(("trainable", "dtype"), [(Lora(rank=4, alpha=8), "float32"), (Full(), "bfloat16")])
def test_a_job_gives_the_same_bytes_whole_resumed_and_after_others(worker, workshop, trainable, dtype):
    name, what = f"fsdp-{trainable.kind}", a_plan(workshop, trainable=trainable, dtype=dtype, engine="fsdp")
    whole = do(worker, workshop, f"{name}-whole", what)
    resumed = do(worker, workshop, f"{name}-resumed", what, checkpoint(whole, 2))
    do(worker, workshop, f"{name}-other", a_plan(workshop, seed=3, dtype=dtype, trainable=Full(), engine="fsdp"))
    again = do(worker, workshop, f"{name}-again", what)
    assert weights_sha256(resumed) == weights_sha256(whole) == weights_sha256(again)
    assert checkpoint(again, NUM_STEPS).sha256 == checkpoint(whole, NUM_STEPS).sha256
    assert numbers(again.log_path) == numbers(whole.log_path)


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
        root = workshop.root
        write_rollouts(root / "rollouts", 6, vocab_size=512)
        write_plan(root / "rollouts-plan", root / "rollouts", ROLLOUT)
        data = PackedData(units=sealed(root / "rollouts"), plan=sealed(root / "rollouts-plan"))
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
