"""What a run asks of its base's form, where it arrives, and what is refused by name."""

import pytest
from pydantic import ValidationError

from longshore.fields import Artifact
from longshore.layout import Layout
from longshore.training import Full, Lora, SessionRun
from shared.jobs.job import JobPlan, PackedData, Schedule, WorkerKey
from shared.runs.dataset_runs import SFTRun
from shared.runs.requests import RLRun

ANY = Artifact(uri="file:///x", sha256="0" * 64)
DATA = {"uri": "file:///rows.jsonl"}
GRADER = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}


def sft(**changes):
    return SFTRun.model_validate({"model": "m", "dataset": DATA, "steps": 1, "batch_size": 1} | changes)


def rl(probe_bound=None, **changes):
    rollouts = {"prompts": DATA, "grader": GRADER, "steps": 1, "probe_bound": probe_bound}
    return RLRun.model_validate({"model": "m", "rollouts": rollouts} | changes)


def plan(**changes):
    data = PackedData(units=ANY, plan=ANY)
    schedule = Schedule(learning_rate=1.0)
    fields = {"run_id": "r", "job_id": "000001", "model": ANY, "data": data, "num_steps": 1, "schedule": schedule}
    return JobPlan.model_validate(fields | {"trainable": Lora()} | changes)


@pytest.mark.parametrize("make", [sft, lambda **c: SessionRun(model="m", **c), lambda **c: rl(0.5, **c), plan])
def test_a_quantized_base_is_of_adapters_beside_megatron_s(make):
    assert make().quantize_base is None
    assert make(quantize_base="nf4").quantize_base == "nf4"
    with pytest.raises(ValidationError, match="quantize_base: quantized weights are frozen; train a lora"):
        make(quantize_base="nf4", trainable=Full())
    with pytest.raises(ValidationError, match="quantize_base: the engine fsdp holds weights as they are; use megatron"):
        make(quantize_base="int8", engine="fsdp")
    with pytest.raises(ValidationError, match="'nf4', 'int8' or 'fp8'"):
        make(quantize_base="int4")
    assert make(optimizer_states="8bit", trainable=Full()).optimizer_states == "8bit"
    with pytest.raises(ValidationError, match="optimizer_states: the engine fsdp holds moments in float32; use meg"):
        make(optimizer_states="8bit", engine="fsdp")


@pytest.mark.parametrize("make", [sft, lambda **c: SessionRun(model="m", **c), lambda **c: rl(0.5, **c), plan])
def test_split_linears_of_fsdp_have_no_dropout_and_no_norms(make):
    with pytest.raises(ValidationError, match=r"trainable\.dora: the engine fsdp has no dora for split rows; use meg"):
        make(trainable=Lora(dora=True), engine="fsdp", layout=Layout(tp=2))
    dropped = {"trainable": Lora(dropout=0.1), "engine": "fsdp"}
    assert make(**dropped, layout=Layout(dp=2)).trainable.dropout == 0.1
    assert make(**dropped | {"engine": "megatron"}, layout=Layout(tp=2)).trainable.dropout == 0.1
    with pytest.raises(ValidationError, match=r"trainable\.dropout: the engine fsdp has no dropout for split linears"):
        make(**dropped, layout=Layout(tp=2))


def test_rollouts_say_how_far_a_sampler_may_be_off():
    with pytest.raises(ValidationError, match=r"quantize_base: samplers hold the base .* rollouts\.probe_bound"):
        rl(quantize_base="nf4")
    assert rl(quantize_base=None).quantize_base is None
    assert RLRun(model="m", quantize_base="nf4").rollouts is None


def test_a_worker_serves_runs_of_the_same_base_alone():
    keys = {WorkerKey.of(plan(quantize_base=kind)) for kind in (None, "nf4", "int8", "fp8", "nf4")}
    assert len(keys) == 4
    assert WorkerKey.of(plan(optimizer_states="8bit")) not in keys
