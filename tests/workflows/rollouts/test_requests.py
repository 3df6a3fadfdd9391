"""Requests of a run's own rollouts: what is refused once the model's shape is known, and what is asked again."""

import pytest
from pydantic import ValidationError

from longshore.fields import Artifact
from shared.models.shape import ModelShape
from shared.runs.requests import RLRun
from shared.runs.start import RLStart
from shared.runs.status import Policy
from shared.serving import LeasedSampler
from shared.storage.paths import Fence
from workflows.rollouts.requests import held_out_samples, step_samples, too_small_a_bucket

SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=1024, num_heads=4, num_kv_heads=2, ffn_size=3072, vocab_size=512
)
EXPERTS = SHAPE.model_copy(update={"family": "qwen3_moe", "num_experts": 8, "ffn_size": 0, "expert_ffn_size": 256})
GRADER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "a"}


@pytest.mark.parametrize(
    ("shape", "dtype", "needed"),
    [(SHAPE, "bfloat16", 6144), (SHAPE, "float32", 12288), (EXPERTS, "float32", 4096)],
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

    def key(num_refuted: int) -> str:
        policies = [Policy(after_step=n, version=n, adapter=stored, num_refuted=num_refuted * n) for n in (0, 1)]
        place = LeasedSampler(run_id="rl-1", fence=Fence(epoch=1, attempt=1), worker_id="w")
        return step_samples(start, stored, stored, policies, 2, place).key

    assert key(1) == key(1)
    assert len({key(0), key(1), key(2)}) == (1 if in_flight == "finish" else 3)


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
    asked = step_samples(start, stored, stored, [policy], 1, place).sampling
    assert (asked.top_p, asked.top_k, asked.temperature) == (0.8, 20, 1.0)
    asked = held_out_samples(start, stored, stored, [policy], policy, place).sampling
    assert (asked.top_p, asked.top_k, asked.temperature) == (1.0, -1, 0.0)
