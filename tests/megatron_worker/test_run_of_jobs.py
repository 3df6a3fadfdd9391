"""A run of several jobs: each goes on from what the one before left, and all together end where one job would."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longshore.events import Saved, Started, Step, Succeeded
from longshore.training import Full
from shared.jobs.job import Checkpointing, Job, JobPlan, PackedData, Schedule
from shared.jobs.packed import Plan
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses, new_worker
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan

CONSTANT = Schedule(kind="constant", learning_rate=0.05, warmup_steps=4)


def part(workshop: Workshop, first: int, last: int) -> PackedData:
    """The data of some of the workshop's steps, as a plan of its own."""
    whole = Plan(workshop.root / "plan")
    folder = workshop.root / f"plan-{first}-{last}"
    write_plan(folder, workshop.root / "units", [[b.tolist() for b in whole.bins(s)] for s in range(first, last)])
    return PackedData(units=workshop.data.units, plan=sealed(folder))


def two_jobs(workshop: Workshop, **changes: object) -> tuple[Job, Job]:
    """Steps 1 and 2, then steps 3 to 6, each in a process of its own."""
    fields = {"schedule": CONSTANT, **changes}
    first = do(workshop, "first", workshop.plan(data=part(workshop, 0, 2), num_steps=2, **fields))
    second = workshop.plan(
        job_id="000002",
        data=part(workshop, 2, 6),
        num_steps=4,
        first_step=2,
        initial_checkpoint=checkpoint(first, 2),
        checkpointing=Checkpointing(every_steps=2),
        **fields,
    )
    return first, do(workshop, "second", second)


@pytest.mark.parametrize("trainable", [None, Full()])
def test_two_jobs_end_in_the_bits_of_one(workshop: Workshop, trainable) -> None:
    """Weights, moments, the step count that Adam corrects by, the warm-up and the random state all go on."""
    changes = {} if trainable is None else {"trainable": trainable}
    whole = do(workshop, "whole", workshop.plan(schedule=CONSTANT, **changes))
    first, second = two_jobs(workshop, **changes)
    assert losses(first) + losses(second) == losses(whole)
    for folder, files in (("weights", "*.safetensors"), ("optimizer", "*"), (".", "rng.safetensors")):
        ends = [Path(job.checkpoint_dir) / "step-00000006" / folder for job in (second, whole)]
        names = sorted(path.name for path in ends[0].glob(files) if path.is_file())
        assert names
        for name in names:
            assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


def test_the_second_job_counts_on(workshop: Workshop) -> None:
    _, second = two_jobs(workshop)
    events = read_log(second.log_path)
    started = next(e for e in events if isinstance(e, Started))
    assert (started.first_step, started.num_steps) == (2, 6)
    assert [e.step for e in events if isinstance(e, Step)] == [3, 4, 5, 6]
    assert [e.step for e in events if isinstance(e, Saved)] == [4, 6]
    rates = [e.metrics["learning_rate"] for e in events if isinstance(e, Step)]
    assert rates == pytest.approx([0.05 * 3 / 5, 0.05 * 4 / 5, 0.05, 0.05])
    assert isinstance(events[-1], Succeeded)
    assert events[-1].step == 6


def test_the_second_job_resumes_from_its_own_checkpoint(workshop: Workshop) -> None:
    _, second = two_jobs(workshop)
    resumed = do(workshop, "resumed", second.plan, start=checkpoint(second, 4))
    assert [e.step for e in read_log(resumed.log_path) if isinstance(e, Step)] == [5, 6]
    assert adapter_sha256(resumed, 6) == adapter_sha256(second, 6)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"first_step": 3}, "the checkpoint's step is 2, the job begins at 3"),
        ({"seed": 8}, "the checkpoint's seed is 7, the job's is 8"),
        ({"trainable": {"kind": "lora", "rank": 8, "alpha": 8}}, ""),
    ],
)
def test_a_checkpoint_that_is_not_the_one_before_fails_the_job(workshop: Workshop, changes, rule: str) -> None:
    _, second = two_jobs(workshop)
    job = do(workshop, "other", JobPlan.model_validate(second.plan.model_dump() | changes))
    assert failure(job).kind == "invalid_input"
    assert rule in failure(job).message
    assert not any(isinstance(e, Step) for e in read_log(job.log_path))


def test_a_checkpoint_that_is_gone_fails_the_job(workshop: Workshop) -> None:
    first, second = two_jobs(workshop)
    shutil.rmtree(Path(first.checkpoint_dir) / "step-00000002")
    assert failure(do(workshop, "other", second.plan)).kind == "corrupt_artifact"


@pytest.mark.parametrize("trainable", [None, Full()])
def test_a_kept_state_is_gone_on_with_and_nothing_of_it_is_read(workshop: Workshop, trainable) -> None:
    """The checkpoint between the two jobs is there, and is not read: it is gone before the second job begins."""
    changes = {} if trainable is None else {"trainable": trainable}
    cold_first, cold = two_jobs(workshop, **changes)
    worker = new_worker(workshop.root)
    plan = workshop.plan(schedule=CONSTANT, data=part(workshop, 0, 2), num_steps=2, after="keep", **changes)
    first = do(workshop, "first-kept", plan, worker=worker)
    assert checkpoint(first, 2) == checkpoint(cold_first, 2).model_copy(update={"uri": checkpoint(first, 2).uri})
    shutil.rmtree(Path(first.checkpoint_dir) / "step-00000002")
    shutil.rmtree(Path(cold_first.checkpoint_dir) / "step-00000002")
    warm = do(workshop, "second-kept", cold.plan, worker=worker)
    assert losses(warm) == losses(cold)
    assert checkpoint(warm, 6).sha256 == checkpoint(cold, 6).sha256


@pytest.mark.parametrize("changes", [{"seed": 8}, {"first_step": 3}])
def test_a_kept_state_is_held_to_the_rules_of_its_checkpoint(workshop: Workshop, changes) -> None:
    worker = new_worker(workshop.root)
    do(
        workshop,
        "kept",
        workshop.plan(schedule=CONSTANT, data=part(workshop, 0, 2), num_steps=2, after="keep"),
        worker=worker,
    )
    _, cold = two_jobs(workshop)
    job = do(workshop, "other", JobPlan.model_validate(cold.plan.model_dump() | changes), worker=worker)
    assert failure(job).kind == "invalid_input"
    again = do(workshop, "again", cold.plan, worker=worker)  # what was kept is gone: it is read
    assert adapter_sha256(again, 6) == adapter_sha256(cold, 6)


def test_a_job_that_failed_while_its_slot_was_made_leaves_the_run_its_place(workshop: Workshop) -> None:
    """The adapter to start from lacks a tensor: found when the slot is there already."""
    torn = workshop.root / "torn"
    torn.mkdir()
    save_file({"lora_A": torch.zeros(4, 16)}, torn / "adapter_model.safetensors")
    worker, plan = new_worker(workshop.root), workshop.plan()
    first = do(workshop, "first", plan.model_copy(update={"initial_adapter": sealed(torn)}), worker=worker)
    assert failure(first).kind == "invalid_input"
    again = do(workshop, "again", plan, worker=worker)
    assert adapter_sha256(again, 6) == adapter_sha256(do(workshop, "alone", plan), 6)
