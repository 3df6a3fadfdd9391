"""Jobs on a mixture with several evaluations: what the steps say of the sources, and the same bits after any stop."""

from pathlib import Path

import pytest

from activities.tokenizing.units import PackRequest
from activities.tokenizing.units import write_plan as write_packed
from longshore.events import Evaluated, Step, Succeeded
from longshore.views import SourceShare
from shared.jobs.job import Checkpointing, Evaluation, JobPlan, PackedData
from shared.jobs.packed import Units, mix_units
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, losses
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, sealed, write_plan, write_units

SHARES = (SourceShare(num_units=20, weight=0.7), SourceShare(num_units=3, weight=0.3))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
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


def of_sets(workshop: Workshop, **fields: object) -> Evaluation:
    """Two further sets of held-out data: the workshop's own, and another."""
    write_units(workshop.root / "others", 4, seed=9)
    write_plan(workshop.root / "others-plan", workshop.root / "others", [[[0, 1], [2, 3]]])
    others = PackedData(units=sealed(workshop.root / "others"), plan=sealed(workshop.root / "others-plan"))
    return Evaluation.model_validate({"sets": {"own": workshop.held_out, "others": others}, "every_steps": 2, **fields})


def job_plan(workshop: Workshop, **changes: object) -> JobPlan:
    return workshop.plan(checkpointing=Checkpointing(every_steps=1, keep=9), **changes)


def test_steps_tell_their_sources_and_a_resumed_job_has_the_same_bits(workshop: Workshop) -> None:
    plan = job_plan(workshop)
    whole = do(workshop, "whole", plan)
    steps = [event.metrics for event in read_log(whole.log_path) if isinstance(event, Step)]
    # Passes have 23 draws, so the third step of each has three.
    assert [(m["examples_harbour"], m["examples_2"]) for m in steps] == [(7, 3), (7, 3), (2, 1), (7, 3), (7, 3), (2, 1)]
    for metrics in steps:
        assert metrics["tokens_harbour"] + metrics["tokens_2"] == metrics["tokens"]
    for step in (2, 4):
        resumed = do(workshop, f"from-{step}", plan, start=checkpoint(whole, step))
        assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)
        assert losses(resumed) == losses(whole)[step:]
        again = [event.metrics for event in read_log(resumed.log_path) if isinstance(event, Step)]
        assert [m["examples_2"] for m in again] == [m["examples_2"] for m in steps[step:]]


def test_each_evaluation_is_as_if_it_were_alone(workshop: Workshop) -> None:
    evaluation = of_sets(workshop, num_samples=1, sample_tokens=4)
    several = do(workshop, "several", job_plan(workshop, evaluation=evaluation))
    found = [event for event in read_log(several.log_path) if isinstance(event, Evaluated)]
    assert [event.step for event in found] == [0, 2, 4, 6]
    assert [sample.evaluation for sample in found[0].samples] == ["own"]  # the other has no prompts
    for name, data in evaluation.sets.items():
        alone = Evaluation(data=data, every_steps=2)
        job = do(workshop, f"only-{name}", job_plan(workshop, evaluation=alone))
        told = [event.metrics for event in read_log(job.log_path) if isinstance(event, Evaluated)]
        for one, both in zip(told, found, strict=True):
            assert {f"{name}_{metric}": value for metric, value in one.items()}.items() <= both.metrics.items()
    assert adapter_sha256(several, 6) == adapter_sha256(job, 6)


def test_the_best_of_a_named_evaluation_is_kept(workshop: Workshop) -> None:
    evaluation = of_sets(workshop, keep="best", best_by="eval_others_loss")
    job = do(workshop, "best", job_plan(workshop, evaluation=evaluation))
    found = {event.step: event.metrics for event in read_log(job.log_path) if isinstance(event, Evaluated)}
    by_loss = {step: metrics["others_loss"] for step, metrics in found.items() if step}
    end = read_log(job.log_path)[-1]
    assert isinstance(end, Succeeded) and end.best is not None
    assert (end.best.step, end.best.value) == (min(by_loss, key=by_loss.__getitem__), min(by_loss.values()))
