"""The models at the edges: what they refuse, that what is written is read, also by and of the last release.

`python -m tests.shared.releases` keeps what is compared with, when a release is made (CONTRIBUTING.md).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.grading.grade import GradeSummary
from activities.hosts.lease import LeaseRecord
from activities.publishing.publish import Claim
from activities.records import _Start
from activities.sampling.completions import SampledGroup
from activities.sampling.sample import SampledSummary
from activities.tokenizing.render_prompts import PromptsReport
from activities.trajectories.group_samples import GroupsMade
from longshore.commands import CommandResult
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.events import Probed, Started, Step, Succeeded, parse_event
from longshore.fields import Artifact, Fence, Frozen, added
from longshore.grading import SampleGrade
from longshore.losses import DPO, PPO, CrossEntropy
from longshore.runs import RunRecord
from longshore.training import Layout, Lora
from longshore.views import PlanHeader, RunStatus, StepStatus
from megatron_worker.training.checkpoint import CheckpointState
from shared.chat.messages import ChatRequest
from shared.chat.trajectories import AnswerRecord
from shared.errors import InvalidInput
from shared.field_rules import rule_in_words
from shared.jobs.commands import read_command
from shared.jobs.job import Job, JobPlan, PackedData, Schedule, check_ranks, layout_of
from shared.jobs.packed import UnitsHeader
from shared.models.peft import CONFIG
from shared.models.shape import ModelShape, check_layout
from shared.storage.artifacts import Manifest
from shared.storage.files import write_atomically
from shared.storage.host_states import HostAddress
from shared.storage.paths import RunKeys, content_key
from tests.shared.releases import exchanged

ARTIFACT = Artifact(uri="file:///data", sha256="0" * 64)
SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=192, vocab_size=512
)


def a_plan() -> JobPlan:
    return JobPlan(
        run_id="sft-1",
        job_id="000001",
        model=ARTIFACT,
        trainable=Lora(rank=4),
        data=PackedData(units=ARTIFACT, plan=ARTIFACT),
        num_steps=3,
        loss=CrossEntropy(),
        schedule=Schedule(learning_rate=1e-3),
    )


def a_run(**changes: object) -> SFTRun:
    wanted = {"model": "m", "dataset": DatasetSource(uri="file:///d"), "epochs": 1, "batch_size": 8, **changes}
    return SFTRun.model_validate(wanted)


def test_a_job_refuses_what_nobody_would_read() -> None:
    data = Job(plan=a_plan(), fence=Fence(epoch=1), log_path="/l", checkpoint_dir="/c", scratch_dir="/s").model_dump()
    with pytest.raises(ValidationError, match="kl_coefficient"):
        Job.model_validate({**data, "kl_coefficient": 0.1})
    with pytest.raises(ValidationError, match="log_path must be an absolute path"):
        Job.model_validate({**data, "log_path": "log.jsonl"})
    with pytest.raises(ValidationError, match="schema_version"):
        Job.model_validate({**data, "schema_version": 2})


@pytest.mark.parametrize("loss", [CrossEntropy(), DPO()])
def test_a_temperature_needs_a_policy(loss: CrossEntropy | DPO) -> None:
    fields = a_plan().model_dump()
    assert JobPlan.model_validate({**fields, "loss": PPO(), "temperature": 0.7}).temperature == 0.7
    assert JobPlan.model_validate({**fields, "loss": loss, "temperature": 1}).temperature == 1
    with pytest.raises(ValidationError, match=f"with {loss.kind} it must be 1"):
        JobPlan.model_validate({**fields, "loss": loss, "temperature": 0.7})
    for value in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="temperature"):
            JobPlan.model_validate({**fields, "loss": PPO(), "temperature": value})


def test_a_probe_has_a_token_to_be_given_and_one_to_be_scored() -> None:
    fields = a_plan().model_dump()
    assert JobPlan.model_validate({**fields, "probe": [4, 5]}).probe == (4, 5)
    for probe in ([4], [4, -1]):
        with pytest.raises(ValidationError, match="probe"):
            JobPlan.model_validate({**fields, "probe": probe})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"steps": 3}, "exactly one of epochs and steps"),
        ({"epochs": None}, "exactly one of epochs and steps"),
        ({"batch_tokens": 4096}, "exactly one of batch_size and batch_tokens"),
        ({"bin_tokens": 64, "max_tokens": 128}, "at least max_tokens"),
        ({"batch_size": None, "batch_tokens": 64, "max_tokens": 128}, "at least max_tokens"),
        ({"memory_budget_bytes": 1 << 30, "layout": {"pp": 2}}, "use pp 1"),
        ({"num_samples": 2}, "need an eval_dataset"),
        ({"keep": "best"}, "keep: set eval_dataset and eval_every"),
        (
            {"early_stop": {"patience": 2}, "eval_dataset": {"uri": "file:///x"}},
            "early_stop: set eval_dataset and eval",
        ),
        ({"best_by": "eval_loss"}, "best_by is the metric of keep best"),
        ({"early_stop": {"patience": 0}}, r"early_stop\.patience"),
        ({"initial_adapter": "file:///a", "trainable": {"kind": "full"}}, "cannot continue from an adapter"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"name": "../escape"}, "should match pattern"),
        ({"dataset": {"uri": "file:///d", "prompt_field": "question"}}, "go together"),
    ],
)
def test_a_run_names_the_rule_that_it_breaks(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        a_run(**changes)


@given(fences=st.lists(st.tuples(st.integers(1, 999_999), st.integers(1, 99)), min_size=2, max_size=2, unique=True))
def test_fence_labels_sort_as_fences_do(fences: list[tuple[int, int]]) -> None:
    first, second = (Fence(epoch=e, attempt=a) for e, a in fences)
    assert first.is_older_than(second) == (first.label < second.label)


def test_events_are_told_apart_by_their_name() -> None:
    events = [
        Started(
            seq=1, time=1.0, run_id="r", job_id="000001", fence=Fence(epoch=1), first_step=0, num_steps=2,
            device="cpu", world_size=1,
        ),
        Step(seq=2, time=2.0, step=1, metrics={"loss": float("nan")}),
        Probed(seq=3, time=2.5, step=1, logprobs=(-0.25, float("-inf"))),
        Succeeded(seq=4, time=3.0, step=2, device="released"),
    ]  # fmt: skip
    read = [parse_event(event.model_dump_json()) for event in events]
    assert [type(event) for event in read] == [Started, Step, Probed, Succeeded]
    assert read[0] == events[0]
    assert read[2:] == events[2:]
    assert read[1].metrics["loss"] != read[1].metrics["loss"]  # NaN survives the journey


EXPERTS = SHAPE.model_copy(update={"family": "qwen3_moe", "num_experts": 6, "expert_ffn_size": 24})


@pytest.mark.parametrize(
    ("shape", "layout", "rule"),
    [
        (SHAPE, Layout(tp=3), "tp=3 does not divide"),
        (SHAPE, Layout(tp=4), "tp=4 does not divide"),
        (SHAPE, Layout(sp=True), "needs tp of at least 2"),
        (SHAPE, Layout(pp=SHAPE.num_layers + 1), "stages need a layer each"),
        (SHAPE, Layout(ep=2, dp=2), "ep=2: the model has no experts"),
        (SHAPE, Layout(etp=2, dp=2), "etp=2: the model has no experts"),
        (EXPERTS, Layout(tp=2), "needs sp with tp"),
        (EXPERTS, Layout(ep=4, dp=4), "ep=4 does not divide the model's 6 experts"),
        (EXPERTS, Layout(etp=5, dp=5), "etp=5 does not divide the experts' feed-forward size 24"),
        (EXPERTS, Layout(ep=3, dp=2), r"ep \* etp = 3 does not divide tp \* cp \* dp = 2"),
    ],
)
def test_each_rule_of_layouts_is_named(shape: ModelShape, layout: Layout, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        check_layout(layout, shape)


def test_an_engine_that_cannot_hold_the_model_is_refused() -> None:
    for shape, layout, rule in (
        (
            EXPERTS.model_copy(update={"family": "gpt_oss", "trains_by_fsdp": False}),
            Layout(dp=2),
            "^engine: the engine fsdp does not train gpt_oss: use megatron$",
        ),
        (SHAPE, Layout(pp=2), "^layout: the engine fsdp splits data by dp and .* by tp alone: use these, and no pp2$"),
        (EXPERTS, Layout(tp=2), "^layout.tp: tp: the engine fsdp splits no experts: use dp, or the engine megatron$"),
    ):
        with pytest.raises(InvalidInput, match=rule):
            check_layout(layout, shape, "fsdp")
    for shape in (SHAPE, EXPERTS):
        check_layout(Layout(dp=4), shape, "fsdp")
    check_layout(Layout(tp=2, dp=2), SHAPE, "fsdp")


def test_layouts_that_hold_a_model() -> None:
    for layout in (Layout(tp=2, sp=True, pp=2, cp=3, dp=5), Layout(pp=SHAPE.num_layers)):
        check_layout(layout, SHAPE)
    for layout in (Layout(tp=2, sp=True, ep=6, etp=2, cp=2, dp=3), Layout(pp=2, ep=2, dp=2)):
        check_layout(layout, EXPERTS)
    assert Layout(tp=2, sp=True, pp=2, dp=3).label == "tp2-sp-pp2-dp3"
    assert Layout(tp=2, sp=True, pp=2, cp=3, ep=2, dp=5).world_size == 60


def test_content_keys_differ_with_any_input_and_stay_with_none() -> None:
    source = DatasetSource(uri="file:///d")
    assert content_key(source, "x") == content_key(source.model_copy(), "x")
    assert len({content_key(source), content_key(source, "x"), content_key(source, "y"), content_key("x", source)}) == 4


def test_checkpoints_of_later_fences_and_steps_sort_later() -> None:
    keys = RunKeys("sft-1")
    ordered = [
        keys.checkpoint(Fence(epoch=1), 900),
        keys.checkpoint(Fence(epoch=2), 20),
        keys.checkpoint(Fence(epoch=2), 100),
        keys.checkpoint(Fence(epoch=10), 3),
    ]
    assert sorted(ordered) == ordered
    assert keys.checkpoint_of(f"{ordered[1]}/manifest.json") == (Fence(epoch=2), 20)
    assert keys.checkpoint_of(f"{ordered[1]}/weights/manifest.json") is None


def test_a_failed_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_layout_is_read_from_its_label() -> None:
    for layout in (Layout(), Layout(tp=2, sp=True, pp=2, dp=4), Layout(ep=2, etp=2, cp=4), Layout(tp=2, dp=2, nodes=2)):
        assert layout_of(layout.label) == layout
    for label in ("", "tp", "tp0", "tp2-tp2", "sp2", "zp2", "tp2 dp2"):
        with pytest.raises(InvalidInput, match="layout: "):
            layout_of(label)


@pytest.mark.parametrize(
    ("label", "rule"),
    [
        ("dp3-nodes2", "nodes=2 machines cannot share out 3 ranks evenly"),
        ("tp2-nodes2", "tp=2 ranks would lie on several machines: each has 1"),
        ("tp4-dp3-nodes4", "tp=4 ranks would lie on several machines: each has 3"),
    ],
)
def test_machines_share_out_ranks_evenly_and_each_has_whole_groups_of_tp(label: str, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        layout_of(label)


def test_a_host_has_room_for_its_own_machine_s_ranks() -> None:
    check_ranks(layout_of("tp2-dp2-nodes2"), 2)
    with pytest.raises(InvalidInput, match=r"4 ranks on each of its machines \(dp8-nodes2\); a host .* up to 2"):
        check_ranks(layout_of("dp8-nodes2"), 2)


def schema_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "crates", "schema": schema}}


NESTED: dict[str, object] = {}
for _ in range(64):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("frequency_penalty", 2.1, "less than or equal to 2"),
        ("repetition_penalty", 1.1, "leave it out, or give 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("tool_choice", "crane", '"none", "auto", "required", or'),
        ("tool_choice", "required", "there are no tools"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "there is no such tool"),
        ("response_format", {"type": "json_schema"}, "json_schema is required with the type json_schema"),
        ("response_format", schema_format(NESTED), "nested 64 deep"),
        ("response_format", schema_format({"pattern": "a" * (64 << 10)}), "may have 65,536 characters"),
    ],
)
def test_what_cannot_be_asked_of_a_model_is_refused_in_words(field: str, value: object, words: str) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(asked | {field: value})
    assert words in rule_in_words(refused.value.errors()[0])
    neutral = {"repetition_penalty": 1.0, "top_k": -1, "tool_choice": "auto", "response_format": None}.get(field, 0)
    assert getattr(ChatRequest.model_validate(asked | {field: neutral}), field) == neutral


def test_the_place_of_an_upload_is_the_name_that_its_user_gave() -> None:
    folder = "file:///srv/longshore/store/tenants/acme"
    assert str(InvalidInput("no", f"{folder}/uploads/{'0f' * 32}/rows.jsonl:12")) == "rows.jsonl:12: no"
    assert str(InvalidInput("no", f"s3://b/tenants/acme/adapters/sums/v000003/{CONFIG}")) == (
        f"adapters/sums/v000003/{CONFIG}: no"
    )
    assert str(InvalidInput("no", "file:///data/rows.jsonl:12")) == "file:///data/rows.jsonl:12: no"


FIELDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("released_fields.json").read_text())
FILES: dict[str, str] = json.loads(Path(__file__).with_name("released_files.json").read_text())
Read = Callable[[bytes], object]


def lines_of(read: Read) -> Read:
    return lambda data: [read(line) for line in data.splitlines()]


READERS: dict[str, Read] = {
    r"/run\.json": RunRecord.model_validate_json,
    r"/(previous_)?result\.json": RunStatus.model_validate_json,
    r"/job\.json": Job.model_validate_json,
    r"/(log|N)\.jsonl": lines_of(parse_event),
    r"/state\.json": CheckpointState.model_validate_json,
    r"/manifest\.json|/began_with/\w+\.json": Manifest.model_validate_json,
    r"/(steps/N|step_keys/HASH)\.json": StepStatus.model_validate_json,
    r"/commands/N\.json": read_command,
    r"/results/N\.json": CommandResult.model_validate_json,
    r"/leases/eN-a01\.json": LeaseRecord.model_validate_json,
    r"/starts/HASH\.json": _Start.model_validate_json,
    r"session-ID/host\.json": HostAddress.model_validate_json,
    r"/claims/vN\.json": Claim.model_validate_json,
    r"answers/.*\.json": AnswerRecord.model_validate_json,
    r"packed/HASH/plan\.json": PlanHeader.model_validate_json,
    r"tokenized/HASH/units\.json": UnitsHeader.model_validate_json,
    r"graded/HASH/summary\.json": GradeSummary.model_validate_json,
    r"graded/HASH/grades\.jsonl": lines_of(SampleGrade.model_validate_json),
    r"sampled/HASH/completions/completions\.jsonl": lines_of(SampledGroup.model_validate_json),
    r"sampled/HASH/completions/summary\.json": SampledSummary.model_validate_json,
    r"grouped/HASH/report\.json": GroupsMade.model_validate_json,
    r"prompts/HASH/report\.json": PromptsReport.model_validate_json,
}


@pytest.mark.parametrize("kind", FILES)
def test_what_the_last_release_writes_is_read(kind: str) -> None:
    [read] = [reader for pattern, reader in READERS.items() if re.search(f"{pattern}($| )", kind)]
    assert read(FILES[kind].encode("latin-1"))


def test_each_kind_of_file_is_there() -> None:
    """So that no pattern reads nothing."""
    for pattern in READERS:
        assert any(re.search(f"{pattern}($| )", kind) for kind in FILES), pattern


def test_a_field_that_is_new_is_left_out_where_it_has_its_default() -> None:
    """Otherwise no host of the last release could continue a run of this one, when an installation goes back."""
    known = {name: models for name, models in exchanged().items() if name in FIELDS}
    assert len(known) > len(FIELDS) / 2, "models were renamed: keep their fields anew"
    for name, models in known.items():
        for model in models:
            for each in model.model_fields.keys() - set(FIELDS[name]):
                field, told = model.model_fields[each], f"{name}.{each} is new: use longshore.fields.added"
                assert not field.is_required() and field.exclude_if is not None, told
                assert field.exclude_if(field.get_default(call_default_factory=True)), told


def test_the_last_release_reads_what_has_no_part_in_what_is_new() -> None:
    class Before(Frozen):
        steps: int

    class After(Before):
        nodes: int = added(1, ge=1)

    assert Before.model_validate_json(After(steps=3).model_dump_json()) == Before(steps=3)
    assert After.model_validate_json('{"steps":3}') == After(steps=3, nodes=1)
    with pytest.raises(ValidationError, match="nodes"):
        Before.model_validate_json(After(steps=3, nodes=2).model_dump_json())
