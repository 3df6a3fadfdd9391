"""Requests of a run's own rollouts: refused once the model's shape is known, asked again, those further on first."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from temporalio.api.enums.v1 import EventType

from activities.grading.grade import GradeSummary
from activities.sampling.admit import BegunPrompts
from activities.sampling.sample import Sampled
from activities.tokenizing.render_prompts import Prompts
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact, Fence
from longshore.runs import RLRun
from longshore.views import CarriedOver
from shared.models.shape import ModelShape
from shared.runs.start import RLStart
from shared.runs.status import Policy, RolloutData
from shared.serving import LeasedSampler
from tests.waiting import eventually
from tests.workflows.stack import started
from workflows.rollouts.requests import (
    admitted_metrics,
    held_out_metrics,
    held_out_samples,
    held_out_sources,
    mix_prompts_request,
    rollout_data,
    step_samples,
    too_small_a_bucket,
)
from workflows.sft import SFTWorkflow

SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=1024, num_heads=4, num_kv_heads=2, ffn_size=3072, vocab_size=512
)
EXPERTS = SHAPE.model_copy(update={"family": "qwen3_moe", "num_experts": 8, "ffn_size": 0, "expert_ffn_size": 256})
GRADER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}


@pytest.mark.parametrize(
    ("shape", "dtype", "needed"), [(SHAPE, "bfloat16", 6144), (SHAPE, "float32", 12288), (EXPERTS, "float32", 4096)]
)
def test_a_bucket_holds_a_row_of_the_widest_weight(shape: ModelShape, dtype: str, needed: int) -> None:
    def reason(num_bytes: int, kind: str = "full", **rollouts: object) -> str | None:
        own = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 1, "weight_sync": {"bucket_bytes": num_bytes}}
        run = {"kind": "rl", "model": "/m", "dtype": dtype, "trainable": {"kind": kind}, "rollouts": own | rollouts}
        return too_small_a_bucket(RLRun.model_validate(run), shape)

    assert reason(needed) is None
    assert f"weight_sync.bucket_bytes: rows of this model have {needed} bytes" in str(reason(needed - 1))
    assert reason(needed - 1, "lora") is None, "an adapter's are the trainer's to check"
    assert reason(needed - 1, weight_sync={"bucket_bytes": needed - 1, "backend": "store"}) is None
    assert reason(needed - 1, colocate=True) is None and reason(needed - 1, sampler="vllm") is None


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_samples_are_asked_for_again_only_where_they_may_have_been_drawn_before_a_proof(in_flight: str) -> None:
    """Under another key, which the same policies give again after a kill."""
    rollouts = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 4, "off_policy_steps": 1}
    run = {"kind": "rl", "model": "/m", "rollouts": rollouts | {"weight_sync": {"in_flight": in_flight}}}
    start = RLStart.model_validate({"run_id": "rl-1", "run": run, "shape": "cpu"})
    stored = Artifact(uri="file:///a", sha256="0" * 64)
    data = RolloutData(prompts=stored, num_steps=4, probe=(1, 2))

    def key(num_refuted: int) -> str:
        policies = [Policy(after_step=n, version=n, adapter=stored, num_refuted=num_refuted * n) for n in (0, 1)]
        place = LeasedSampler(run_id="rl-1", fence=Fence(epoch=1, attempt=1), worker_id="w")
        return step_samples(start, stored, data, policies, 2, place).key

    assert key(1) == key(1)
    assert len({key(0), key(1), key(2)}) == (1 if in_flight == "finish" else 3)


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_prompts_that_may_be_carried_over_are_the_same_samples(in_flight: str) -> None:
    """While they are drawn policies come and go, and their key stays, unless one that came failed its proof."""
    rollouts = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 9, "off_policy_steps": 1}
    rollouts |= {"weight_sync": {"in_flight": in_flight}}
    stored = [Artifact(uri=f"file:///{n}", sha256=str(n) * 64) for n in range(6)]
    data = RolloutData(prompts=stored[0], num_steps=9, probe=(1, 2))

    def key(carries: bool, known: range, refuted: int | None = None) -> str:
        run = {"kind": "rl", "model": "/m", "rollouts": rollouts | {"carry_over": carries}}
        start = RLStart.model_validate({"run_id": "rl-1", "run": run, "shape": "cpu"})
        policies = [Policy(after_step=n, version=n, adapter=stored[n], num_refuted=int(n == refuted)) for n in known]
        place = LeasedSampler(run_id="rl-1", fence=Fence(epoch=1, attempt=1), worker_id="w")
        return step_samples(start, stored[0], data, policies, 4, place).key

    assert key(True, range(2, 4)) == key(False, range(2, 4)) == key(True, range(2, 6)) == key(True, range(1, 5))
    assert key(True, range(1, 5), refuted=1) == key(True, range(2, 5)), "it was drawn again before these began"
    assert (key(True, range(2, 5), refuted=4) == key(True, range(2, 5))) == (in_flight == "finish")


def test_a_step_says_how_far_behind_its_prompts_were_and_what_it_left() -> None:
    rollouts = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 9, "off_policy_steps": 1, "carry_over": True}
    run = RLRun.model_validate({"kind": "rl", "model": "/m", "rollouts": rollouts | {"prompts_per_step": 4}})
    # Of step 2's prompts, which began with the first policy, one; of step 6's, with the policy after step 4, three.
    taken = [BegunPrompts(step=2, key="", groups=(3,)), BegunPrompts(step=6, key="", groups=(0, 1, 3))]
    left = CarriedOver(next=8, left={3: (1,), 6: (2,), 7: (0, 1, 2, 3)})
    assert admitted_metrics(run, 6, taken, left) == {
        "group_lag_mean": (5 + 3 * 1) / 4,
        "group_lag_max": 5,
        "carried_groups": 2,
    }


def test_steps_are_drawn_from_the_tokens_that_a_run_leaves_and_held_out_prompts_from_all() -> None:
    rollouts = {"prompts": {"uri": "/data"}, "grader": GRADER, "steps": 4, "top_p": 0.8, "top_k": 20}
    rollouts |= {"held_out": {"prompts": {"uri": "/held-out"}}}
    run = {"kind": "rl", "model": "/m", "rollouts": rollouts}
    with pytest.raises(ValidationError, match=r"set loss\.old to trainer"):
        RLRun.model_validate(run)
    loss = {"kind": "ppo", "old": "trainer"}
    start = RLStart.model_validate({"run_id": "rl-1", "run": run | {"loss": loss}, "shape": "cpu"})
    stored = Artifact(uri="file:///a", sha256="0" * 64)
    policy = Policy(after_step=0, version=0, adapter=stored)
    place = LeasedSampler(run_id="rl-1", fence=Fence(epoch=1, attempt=1), worker_id="w")
    data = RolloutData(prompts=stored, num_steps=4, probe=(1, 2))
    asked = step_samples(start, stored, data, [policy], 1, place).sampling
    assert (asked.top_p, asked.top_k, asked.temperature) == (0.8, 20, 1.0)
    held_out = DatasetSource(uri="/held-out")
    asked = held_out_samples(start, stored, stored, [policy], policy, place, held_out).sampling
    assert (asked.top_p, asked.top_k, asked.temperature) == (1.0, -1, 0.0)


def test_a_mixture_of_prompts_makes_the_steps_of_its_epochs_and_sets_are_told_by_name() -> None:
    def artifact(digit: str) -> Artifact:
        return Artifact(uri=f"file:///{digit}", sha256=digit * 64)

    def rendered(digit: str, num_prompts: int, of_sources: tuple[int, ...] = ()) -> Prompts:
        given = {"prompts": artifact(digit), "probe": (1, 2), "report_uri": "r", "num_too_long": 0}
        return Prompts(**given, num_prompts=num_prompts, num_of_sources=of_sources)

    own = {"prompts": [{"uri": "file:///a", "epochs": 2}, {"uri": "file:///b", "name": "b"}], "prompts_per_step": 4}
    own |= {"grader": GRADER, "epochs": 1, "held_out": {"sets": {"x": "file:///x", "y": "file:///y"}}}
    run = RLRun.model_validate({"model": "/m", "rollouts": own})
    parts = [rendered("1", 10), rendered("2", 5)]
    mixed = mix_prompts_request(run.rollouts.prompts, parts)
    assert mixed is not None
    assert [(part.name, part.prompts) for part in mixed.parts] == [("1", artifact("1")), ("b", artifact("2"))]
    assert mix_prompts_request(RLRun(model="/m", rollouts=own | {"prompts": "file:///a"}).rollouts.prompts, []) is None
    assert list(held_out_sources(run)) == ["eval-x", "eval-y"]

    data = rollout_data(run, rendered("3", 15, (10, 5)), [rendered("4", 2), rendered("5", 2)])
    assert data.num_steps == 6, "10 twice and 5 once, by 4, without the rest"
    assert data.evaluations == {"x": artifact("4"), "y": artifact("5")} and data.held_out is None
    assert RolloutData.model_validate_json(data.model_dump_json()) == data
    alone = RolloutData(prompts=artifact("3"), num_steps=1, probe=(1, 2), held_out=artifact("4"))
    assert "sources" not in alone.model_dump_json() and alone.evaluations == {"": artifact("4")}

    start = RLStart.model_validate({"run_id": "rl-1", "run": run.model_dump(), "shape": "cpu"})
    place = LeasedSampler(run_id="rl-1", fence=Fence(epoch=1, attempt=1), worker_id="w")
    policies = [Policy(after_step=0, version=0, adapter=artifact("6"))]
    keys = {
        step_samples(start, artifact("7"), each, policies, 1, place).key
        for each in (data, data.model_copy(update={"sources": ()}))
    }
    assert len(keys) == 2, "the same prompts in another order are other samples"

    def found(mean: float | None, num: int) -> tuple[Sampled, GradeSummary]:
        summary = GradeSummary(num_samples=num, num_graded=num, num_failed=0, mean=mean, std=mean, reasons=())
        return Sampled(
            completions=artifact("8"), samples=artifact("9"), num_samples=num, num_cut_off=1, num_tokens=6
        ), summary

    told = held_out_metrics({"x": found(1.0, 2), "y": found(0.0, 6)})
    assert (told["eval_x_reward_mean"], told["eval_y_reward_mean"], told["eval_reward_mean"]) == (1.0, 0.0, 0.25)
    assert told["eval_x_truncation_rate"] == 0.5 and "eval_truncation_rate" not in told
    assert held_out_metrics({"": found(0.5, 2)}) == {
        **{"eval_samples": 2, "eval_ungraded": 0, "eval_truncation_rate": 0.5, "eval_response_tokens_mean": 3},
        **{"eval_reward_mean": 0.5, "eval_reward_std": 0.5},
    }


_OF_OTHERS = 3  # Temporal's own


async def test_a_run_that_is_further_comes_first_in_the_queue(temporal_address: str, tmp_path: Path) -> None:
    """As Temporal was told: the smaller the number, the sooner. Its tenant's share stays what it is."""
    async with started(temporal_address, tmp_path) as stack:
        handle = await stack.start(is_tracked=False)

        async def is_prepared() -> bool:
            return (await handle.query(SFTWorkflow.status)).phase == "waiting_for_worker"

        await eventually(is_prepared, "it is prepared")
        scheduled = [
            event.activity_task_scheduled_event_attributes
            async for event in handle.fetch_history_events()
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        await handle.terminate()
    turns = {each.activity_type.name: each.priority.priority_key or _OF_OTHERS for each in scheduled}
    assert turns["pack"] < turns["tokenize"] < turns["download"] == turns["begin"] == _OF_OTHERS
    assert not any(each.priority.fairness_key for each in scheduled), "inherited from the run"
