"""What a run asks of its optimizer, where it arrives, and what is refused by name; jobs and commands of before."""

import pytest
from pydantic import TypeAdapter, ValidationError

from longshore.commands import OptimStep
from longshore.layout import Layout
from longshore.training import Adam, Full, Lora, Muon
from shared.jobs.job import JobPlan
from shared.runs.dataset_runs import SFTRun
from tests.shared.runs.test_quantized_base import plan, rl, sft


@pytest.mark.parametrize("make", [sft, rl])
def test_what_a_run_asks_for_is_its_jobs_optimizer(make):
    assert make().settings_of_optimizer == Adam()
    fields = {"weight_decay": 0.1, "decay": "matrices", "clip_norm": 2.0, "lora_plus_ratio": 8.0, "noise_scale": True}
    asked = make(**fields, layout=Layout(dp=2))
    assert asked.settings_of_optimizer == Adam(**fields)
    assert make(optimizer="muon", weight_decay=0.1).settings_of_optimizer == Muon(weight_decay=0.1)
    with pytest.raises(ValidationError, match="'adamw' or 'muon'"):
        make(optimizer="sgd")


def of_plan(**changes):
    own = {name: changes.pop(name) for name in ("noise_scale", "lora_plus_ratio") if name in changes}
    return plan(optimizer=Muon(**own), **changes)


@pytest.mark.parametrize("make", [sft, rl, of_plan])
def test_settings_that_would_do_nothing_are_refused(make):
    with pytest.raises(ValidationError, match="lora_plus_ratio: full training has no B matrices"):
        make(lora_plus_ratio=2.0, trainable=Full())
    assert make(noise_scale=True, layout=Layout(dp=2)).layout.dp == 2
    assert make(noise_scale=True, layout=Layout(dp=2), engine="fsdp", trainable=Lora()).engine == "fsdp"
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, dp=2), Layout(dp=2, ep=2), Layout(dp=2, cp=2)):
        with pytest.raises(ValidationError, match=r"noise_scale: .* ask for a layout of dp alone"):
            make(noise_scale=True, layout=layout)
    with pytest.raises(ValidationError, match="noise_scale: the engine fsdp"):
        make(noise_scale=True, layout=Layout(dp=2), engine="fsdp", trainable=Full())


def test_jobs_and_commands_without_a_kind_are_adam_s():
    archived = plan(optimizer=Adam(weight_decay=0.1)).model_dump(mode="json")
    for name in ("kind", "decay", "lora_plus_ratio", "noise_scale"):
        del archived["optimizer"][name]
    assert JobPlan.model_validate(archived).optimizer == Adam(weight_decay=0.1)
    step = {"kind": "optim_step", "learning_rate": 0.1}
    assert OptimStep.model_validate(step | {"optimizer": {"beta1": 0.5}}).optimizer == Adam(beta1=0.5)
    assert OptimStep.model_validate(step | {"optimizer": {"kind": "muon", "momentum": 0.5}}).optimizer == Muon(
        momentum=0.5
    )
    assert (
        OptimStep.model_validate_json(OptimStep(learning_rate=0.1, optimizer=Muon()).model_dump_json()).optimizer
        == Muon()
    )
    with pytest.raises(ValidationError, match="momentum"):
        OptimStep.model_validate(step | {"optimizer": {"momentum": 0.5}})
    with pytest.raises(ValidationError, match="'adamw', 'muon'"):
        OptimStep.model_validate(step | {"optimizer": {"kind": "sgd"}})


def test_the_openapi_document_has_both():
    schema = TypeAdapter(OptimStep).json_schema()
    assert {"Adam", "Muon"} <= schema["$defs"].keys()
    assert {"optimizer", "decay", "lora_plus_ratio", "noise_scale"} <= SFTRun.model_json_schema()["properties"].keys()
