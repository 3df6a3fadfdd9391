"""What a run asks of its optimizer, where it arrives, and what is refused by name."""

import pytest
from pydantic import TypeAdapter, ValidationError

from longshore.commands import OptimStep
from longshore.layout import Layout
from longshore.training import Adam, Full, Lora, Muon
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


def test_an_optimizer_is_read_by_its_kind():
    for optimizer in (Adam(beta1=0.5), Muon(momentum=0.5)):
        asked = OptimStep(learning_rate=0.1, optimizer=optimizer)
        assert OptimStep.model_validate_json(asked.model_dump_json()) == asked
    for wrong, told in (({"kind": "adamw", "momentum": 0.5}, "momentum"), ({"kind": "sgd"}, "'adamw', 'muon'")):
        with pytest.raises(ValidationError, match=told):
            OptimStep.model_validate({"kind": "optim_step", "learning_rate": 0.1, "optimizer": wrong})


def test_the_openapi_document_has_both():
    schema = TypeAdapter(OptimStep).json_schema()
    assert {"Adam", "Muon"} <= schema["$defs"].keys()
    assert {"optimizer", "decay", "lora_plus_ratio", "noise_scale"} <= SFTRun.model_json_schema()["properties"].keys()
