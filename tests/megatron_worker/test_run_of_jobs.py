"""Runs of several jobs end where one job would; jobs on mixtures tell their sources; the same bits after any stop."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from activities.tokenizing.units import PackRequest
from activities.tokenizing.units import write_plan as write_packed
from longshore.events import Evaluated, Saved, Started, Step, Succeeded
from longshore.training import Full
from longshore.views import SourceShare
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, PackedData, Schedule
from shared.jobs.packed import Plan, Units, mix_units
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses, new_worker
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, sealed, write_plan, write_units

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


SHARES = (SourceShare(num_units=20, weight=0.7), SourceShare(num_units=3, weight=0.3))


@pytest.fixture
def mixed(tmp_path: Path) -> Workshop:
    """Steps of ten examples of two sources, seven and three of each: the smaller source is seen twice in two steps."""
    made = make_workshop(tmp_path)
    folders = {"harbour": tmp_path / "first", "2": tmp_path / "second"}
    for (name, folder), share in zip(folders.items(), SHARES, strict=True):
        write_units(folder, share.num_units, seed=len(name))
    (tmp_path / "mixed").mkdir()
    mix_units(folders, tmp_path / "mixed")
    units = sealed(tmp_path / "mixed")
    request = PackRequest(units=units, bin_tokens=64, seed=3, steps=6, batch_size=10, sources=SHARES)
    write_packed(Units.read_lengths(tmp_path / "mixed"), request, tmp_path / "mixed-plan")
    made.data = PackedData(units=units, plan=sealed(tmp_path / "mixed-plan"))
    return made


def of_sets(mixed: Workshop, **fields: object) -> Evaluation:
    """Two further sets of held-out data: the workshop's own, and another."""
    write_units(mixed.root / "others", 4, seed=9)
    write_plan(mixed.root / "others-plan", mixed.root / "others", [[[0, 1], [2, 3]]])
    others = PackedData(units=sealed(mixed.root / "others"), plan=sealed(mixed.root / "others-plan"))
    return Evaluation.model_validate({"sets": {"own": mixed.held_out, "others": others}, "every_steps": 2, **fields})


def job_plan(mixed: Workshop, **changes: object) -> JobPlan:
    return mixed.plan(checkpointing=Checkpointing(every_steps=1, keep=9), **changes)


def test_steps_tell_their_sources_and_a_resumed_job_has_the_same_bits(mixed: Workshop) -> None:
    plan = job_plan(mixed)
    whole = do(mixed, "whole", plan)
    steps = [event.metrics for event in read_log(whole.log_path) if isinstance(event, Step)]
    # Passes have 23 draws, so the third step of each has three.
    assert [(m["examples_harbour"], m["examples_2"]) for m in steps] == [(7, 3), (7, 3), (2, 1), (7, 3), (7, 3), (2, 1)]
    for metrics in steps:
        assert metrics["tokens_harbour"] + metrics["tokens_2"] == metrics["tokens"]
    for step in (2, 4):
        resumed = do(mixed, f"from-{step}", plan, start=checkpoint(whole, step))
        assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)
        assert losses(resumed) == losses(whole)[step:]
        again = [event.metrics for event in read_log(resumed.log_path) if isinstance(event, Step)]
        assert [m["examples_2"] for m in again] == [m["examples_2"] for m in steps[step:]]


def test_each_evaluation_is_as_if_it_were_alone(mixed: Workshop) -> None:
    evaluation = of_sets(mixed, num_samples=1, sample_tokens=4)
    several = do(mixed, "several", job_plan(mixed, evaluation=evaluation))
    found = [event for event in read_log(several.log_path) if isinstance(event, Evaluated)]
    assert [event.step for event in found] == [0, 2, 4, 6]
    assert [sample.evaluation for sample in found[0].samples] == ["own"]  # the other has no prompts
    for name, data in evaluation.sets.items():
        alone = Evaluation(data=data, every_steps=2)
        job = do(mixed, f"only-{name}", job_plan(mixed, evaluation=alone))
        told = [event.metrics for event in read_log(job.log_path) if isinstance(event, Evaluated)]
        for one, both in zip(told, found, strict=True):
            assert {f"{name}_{metric}": value for metric, value in one.items()}.items() <= both.metrics.items()
    assert adapter_sha256(several, 6) == adapter_sha256(job, 6)


def test_the_best_of_a_named_evaluation_is_kept(mixed: Workshop) -> None:
    evaluation = of_sets(mixed, keep="best", best_by="eval_others_loss")
    job = do(mixed, "best", job_plan(mixed, evaluation=evaluation))
    found = {event.step: event.metrics for event in read_log(job.log_path) if isinstance(event, Evaluated)}
    by_loss = {step: metrics["others_loss"] for step, metrics in found.items() if step}
    end = read_log(job.log_path)[-1]
    assert isinstance(end, Succeeded) and end.best is not None
    assert (end.best.step, end.best.value) == (min(by_loss, key=by_loss.__getitem__), min(by_loss.values()))
