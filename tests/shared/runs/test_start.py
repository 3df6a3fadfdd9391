"""What is refused before a run starts, with place and rule; the form of its base and its optimizer."""

import time
from itertools import product
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from longshore.commands import OptimStep
from longshore.dataset_runs import SFTRun
from longshore.fields import Artifact
from longshore.runs import RLRun, dtype_of
from longshore.training import Adam, Full, Layout, Lora, Muon, SessionRun
from shared.errors import InvalidInput
from shared.jobs.job import JobPlan, PackedData, Schedule, WorkerKey
from shared.runs.acceptance import check_offered, check_startable, precision_of
from shared.settings import SamplingSettings, Settings
from shared.storage.host_states import write_fast_bf16, write_offer
from shared.storage.store import LocalStore

GRADER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}
ROLLOUTS = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 1}
FULL = {"kind": "rl", "model": "/model", "trainable": {"kind": "full"}}


def settings(url: str | None) -> Settings:
    return Settings(sampling=SamplingSettings(url=url))


def test_full_weights_need_a_sampler_that_takes_them():
    run = RLRun.model_validate(FULL | {"rollouts": ROLLOUTS})
    check_startable(run, settings(None))
    with pytest.raises(InvalidInput, match="does not take whole weights") as refused:
        check_startable(run, settings("http://localhost:8000"), "run.")
    assert refused.value.place == "run.trainable"
    with pytest.raises(ValidationError, match=r"drop rollouts\.sampler_url"):
        RLRun.model_validate(FULL | {"rollouts": ROLLOUTS | {"sampler_url": "http://localhost:8000"}})
    check_startable(RLRun.model_validate(FULL), settings("http://localhost:8000"))  # its client samples


@pytest.mark.parametrize("rollouts", [None, ROLLOUTS])
@pytest.mark.parametrize(
    ("asked", "place", "mended"),
    [
        ({"algorithm": "gkd"}, "loss.distillation.teacher", {"loss": {"kind": "distillation", "teacher": "file:///t"}}),
        ({"algorithm": "distill"}, "loss.reinforce.kl.reference", {"loss": {"kl": {"reference": "file:///t"}}}),
    ],
)
def test_a_student_that_begins_as_its_own_teacher_is_refused(asked, place, mended, rollouts):
    fields = {"kind": "rl", "model": "/model", "rollouts": rollouts, **asked}
    with pytest.raises(InvalidInput, match="the student begins as the base itself") as refused:
        check_startable(RLRun.model_validate(fields), settings(None), "run.")
    assert refused.value.place == f"run.{place}"
    for change in (mended, {"initial_adapter": "file:///a"}):
        check_startable(RLRun.model_validate(fields | change), settings(None))


def test_several_samplers_are_leased_ones():
    run = RLRun.model_validate({"kind": "rl", "model": "/model", "rollouts": ROLLOUTS | {"samplers": 2}})
    check_startable(run, settings(None))
    with pytest.raises(InvalidInput, match="samplers may be 1 at most") as refused:
        check_startable(run, settings("http://localhost:8000"), "run.")
    assert refused.value.place == "run.rollouts.samplers"
    with pytest.raises(ValidationError, match="drop samplers, or sampler_url"):
        RLRun.model_validate(FULL | {"rollouts": ROLLOUTS | {"samplers": 2, "sampler_url": "http://localhost:8000"}})


def test_nobody_sends_weights_to_a_server_behind_a_url():
    sync = {"weight_sync": {"backend": "shared_memory"}}
    run = RLRun.model_validate(FULL | {"trainable": {"kind": "lora"}, "rollouts": ROLLOUTS | sync})
    check_startable(run, settings(None))
    named = RLRun.model_validate(run.model_dump() | {"rollouts": ROLLOUTS | sync | {"sampler_url": "http://a:1"}})
    for asked, url in ((run, "http://localhost:8000"), (named, None)):
        with pytest.raises(InvalidInput, match=r"shared_memory needs one that a host leases; .* auto and store") as no:
            check_startable(asked, settings(url), "run.")
        assert no.value.place == "run.rollouts.weight_sync.backend"


def test_samples_go_on_under_new_weights_on_every_leased_sampler():
    goes_on = ROLLOUTS | {"off_policy_steps": 1, "weight_sync": {"in_flight": "continue"}}
    for sampler, trainable in product(("own", "vllm"), ("lora", "full")):
        asked = {"rollouts": goes_on | {"sampler": sampler}, "trainable": {"kind": trainable}}
        check_startable(RLRun.model_validate(FULL | asked), settings(None))
    own = RLRun.model_validate(FULL | {"rollouts": goes_on, "trainable": {"kind": "lora"}})
    with pytest.raises(InvalidInput, match="samples end on the weights they began on") as refused:
        check_startable(own, settings("http://localhost:8000"), "run.")
    assert refused.value.place == "run.rollouts.weight_sync.in_flight"
    for change, rule in (
        ({"sampler_url": "http://localhost:8000"}, "a sampler behind a URL does not go on under new weights"),
        ({"off_policy_steps": 0}, "set off_policy_steps"),
    ):
        with pytest.raises(ValidationError, match=rule):
            RLRun.model_validate(FULL | {"rollouts": goes_on | change})


def test_a_vllm_that_nobody_can_start_is_refused():
    vllm = ROLLOUTS | {"sampler": "vllm"}
    run = RLRun.model_validate(FULL | {"rollouts": vllm, "trainable": {"kind": "lora"}})
    check_startable(run, settings(None))
    check_startable(run.model_copy(update={"trainable": Full()}), settings(None))
    with pytest.raises(InvalidInput, match="a server behind a URL") as refused:
        check_startable(run, settings("http://localhost:8000"), "run.")
    assert refused.value.place == "run.rollouts.sampler"
    lora = {"kind": "lora"}
    for trainable, change, rule in (
        (lora, {"sampler_url": "http://localhost:8000"}, "drop it, or sampler_url"),
        (lora, {"weight_sync": {"backend": "shared_memory"}}, "auto or store"),
        (lora, {"colocate": True}, "for CPUs does not sleep"),
        ({"kind": "lora", "rank": 513}, {}, "lower trainable.rank"),
        ({"kind": "lora", "dora": True}, {}, "trained norms: drop trainable.dora, or sample with own"),
    ):
        asked = RLRun.model_validate(FULL | {"rollouts": vllm | change, "trainable": trainable})
        with pytest.raises(InvalidInput, match=rule):
            check_startable(asked, settings(None))
    with pytest.raises(ValidationError, match="sglang, which needs a GPU here, was never tried"):
        RLRun.model_validate(FULL | {"rollouts": vllm | {"sampler": "sglang"}})


@pytest.mark.parametrize(
    ("rollouts", "run", "rule"),
    [
        ({"samplers": 2}, {}, "a device has one sampler"),
        ({"sampler_url": "http://localhost:8000"}, {}, "a device has one sampler"),
        ({"off_policy_steps": 1}, {}, "drop off_policy_steps"),
        ({"weight_sync": {"backend": "delta"}}, {}, "backend is auto or store"),
        ({}, {"between_steps": "keep"}, "between_steps is offload"),
    ],
)
def test_what_needs_the_device_at_all_times_does_not_share_it(rollouts, run, rule):
    colocated = {"kind": "rl", "model": "/model", "rollouts": ROLLOUTS | {"colocate": True}}
    check_startable(RLRun.model_validate(colocated), settings(None))
    with pytest.raises(InvalidInput, match="does not sleep"):
        check_startable(RLRun.model_validate(colocated), settings("http://localhost:8000"))
    with pytest.raises(ValidationError, match=rule):
        RLRun.model_validate(colocated | {"rollouts": ROLLOUTS | {"colocate": True} | rollouts} | run)


@pytest.mark.parametrize(
    ("rollouts", "run", "rule"),
    [
        ({"off_policy_steps": 0}, {}, "carry_over: no other prompts are sampled in the meantime: set off_policy_steps"),
        ({"prompts_per_step": 2049}, {}, "carry_over: at most 4096 prompts are begun and not trained"),
        ({}, {"max_staleness": 64}, "rollouts.carry_over: slow prompts would be dropped for their age"),
        ({}, {"trainable": {"kind": "full"}}, "set rollouts.weight_sync.in_flight to continue, or train a lora"),
        ({"colocate": True}, {}, "drop off_policy_steps"),
    ],
)
def test_prompts_that_cannot_be_carried_over_are_refused(rollouts, run, rule):
    carried = {"kind": "rl", "model": "/model", "trainable": {"kind": "lora"}}
    own = ROLLOUTS | {"carry_over": True, "off_policy_steps": 1}
    RLRun.model_validate(carried | {"rollouts": own | {"prompts_per_step": 2048, "redraws": 2}})
    goes_on = {"weight_sync": {"in_flight": "continue"}}
    RLRun.model_validate(carried | {"trainable": {"kind": "full"}, "rollouts": own | goes_on})
    with pytest.raises(ValidationError, match=rule):
        RLRun.model_validate(carried | {"rollouts": own | rollouts} | run)


POSSIBLE = "possible are auto, store, delta, shared_memory, tcp, collective, cuda_ipc, external"
OUTSIDE = ("/etc/passwd", "../x", "a/../b", ".hidden", "a//b", "x" * 65, "a/b/c/d/e")


@pytest.mark.parametrize(
    ("sync", "place", "rule"),
    [
        *(({"backend": name}, "backend", POSSIBLE) for name in ("pigeon", "hccl", "nixl")),
        *(({"profile_path": path}, "profile_path", "pattern") for path in OUTSIDE),
        ({"bucket_bytes": 10}, "bucket_bytes", "greater"),
        ({"x": 1}, "x", "Extra"),
    ],
)
def test_a_weight_sync_that_cannot_be_is_refused(sync, place, rule):
    with pytest.raises(ValidationError, match=rule) as refused:
        RLRun.model_validate(FULL | {"rollouts": ROLLOUTS | {"weight_sync": sync}})
    assert refused.value.errors()[0]["loc"] == ("rollouts", "weight_sync", place)


def test_the_precision_follows_what_gpu_hosts_say(tmp_path: Path) -> None:
    store, auto = LocalStore(tmp_path), Settings(dtype="auto")

    def told(asked: str, settings: Settings = auto) -> tuple[str, bool, bool]:
        found = precision_of(asked, settings, store)
        return found.dtype, found.reason is not None, found.notice is not None

    pinned = Settings(dtype="bfloat16")
    assert "no GPU host has said" in precision_of("auto", auto, store).reason
    assert told("auto") == ("float32", True, False) and told("float32") == ("float32", False, False)
    write_fast_bf16(store, auto.shape, True)
    assert told("auto") == ("bfloat16", True, False) and told("bfloat16") == ("bfloat16", False, False)
    assert told("float32") == ("float32", False, True), "another would be faster"
    write_fast_bf16(store, auto.shape, False)
    assert told("auto") == ("float32", True, False) and told("float32") == ("float32", False, False)
    assert told("bfloat16") == ("bfloat16", False, True)
    assert (
        told("auto", pinned) == ("bfloat16", True, False)
        and "LONGSHORE_DTYPE" in precision_of("auto", pinned, store).reason
    )


def test_a_run_of_more_ranks_than_the_hosts_that_are_up_offer_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given = LocalStore(tmp_path), Settings(shape="gpu1", max_ranks=8)
    run = RLRun.model_validate(FULL | {"layout": {"dp": 4}})
    check_offered(run, given, store)  # none is up: those to come may take it
    write_offer(store, "gpu1", 2)
    with pytest.raises(InvalidInput, match=r"^run.layout.dp: 4 ranks \(dp4\).* up to 2 .*gpu1 that are up"):
        check_offered(run, given, store, "run.")
    write_offer(store, "gpu1", 4)
    check_offered(run, given, store)
    write_offer(store, "gpu1", 2)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 120)
    check_offered(run, given, store)  # they have gone


def test_a_run_on_more_machines_than_there_can_be_is_refused() -> None:
    gang = RLRun.model_validate(FULL | {"layout": {"dp": 4, "nodes": 4}})
    check_startable(gang, Settings())  # nobody knows how many there can be
    check_startable(gang, Settings(max_hosts=4))
    for most, named in ((3, "3 GPU hosts"), (1, "1 GPU host")):
        with pytest.raises(InvalidInput, match=rf"^run.layout.nodes: 4 machines \(dp4-nodes4\).*up to {named} at a"):
            check_startable(gang, Settings(max_hosts=most), "run.")


def test_a_run_that_no_service_has_accepted_is_of_float32() -> None:
    old = RLRun.model_validate({"kind": "rl", "model": "/model"})
    assert dtype_of(old) == "float32" and dtype_of(old.model_copy(update={"dtype": "bfloat16"})) == "bfloat16"


ANY = Artifact(uri="file:///x", sha256="0" * 64)
DATA = {"uri": "file:///rows.jsonl"}
CHECK = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}


def sft(**changes):
    return SFTRun.model_validate({"model": "m", "dataset": DATA, "steps": 1, "batch_size": 1} | changes)


def rl(probe_bound=None, **changes):
    rollouts = {"prompts": DATA, "grader": CHECK, "steps": 1, "probe_bound": probe_bound}
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
