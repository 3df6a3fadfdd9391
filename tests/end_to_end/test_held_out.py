"""Held-out prompts of a run on a dataset: sampled from its checkpoints and graded, before, during and after training.

Nothing of that changes a bit of what is trained, and the grades decide which weights are published, and when it ends.
"""

import json
import secrets
from pathlib import Path

import pytest

from longshore.client import Client
from longshore.metrics import metric_of
from tests.end_to_end.conftest import LETTERS
from tests.end_to_end.stack import Answer, Stack

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 20


@pytest.fixture(scope="module")
def graded_options(sft_options: list[str], prompts: dict[str, str]) -> list[str]:
    held_out = ("--eval-prompts", prompts["eval"], "--eval-prompts-every", str(EVERY), "--max-completion-tokens", "12")
    return [*sft_options, *held_out, "--grader", json.dumps(LETTERS)]


def rewards_of(stack: Stack, run_id: str) -> dict[int, float]:
    found = stack.cli("metrics", run_id, "--json").json["evaluations"]
    return {each["step"]: each["metrics"]["reward_mean"] for each in found if "reward_mean" in each["metrics"]}


def test_it_is_evaluated_before_during_and_after_and_trains_the_same_bits(
    stack: Stack, undisturbed: Answer, graded_options: list[str], chat_dataset: Path, prompts: dict[str, str]
) -> None:
    run = stack.cli(*graded_options, "--eval-dataset", str(chat_dataset), "--eval-every", "30", "--wait").json
    assert run["status"] == "succeeded" and run["steps"] == STEPS, run
    assert stack.adapter_sha256(Answer(0, json.dumps(run), "")) == stack.adapter_sha256(undisturbed)
    rewards = rewards_of(stack, run["run_id"])
    assert [*rewards] == [0, EVERY, 2 * EVERY, STEPS] and len({*rewards.values()}) > 1, rewards
    found = stack.cli("metrics", run["run_id"], "--json").json["evaluations"]
    assert [each["step"] for each in found if "loss" in each["metrics"]] == [0, 30, STEPS]
    assert [name for each in found for name in each["metrics"] if metric_of(f"eval_{name}") is None] == []
    assert run["metrics"]["eval_reward_mean"] == rewards[STEPS]
    view = stack.cli("get", run["run_id"], "--json").json
    assert [span["phase"] for span in view["timeline"]].count("evaluating") == len(rewards)
    samples = stack.cli("episodes", run["run_id"], "--json").json
    asked = [json.loads(line)["number"] for line in Path(prompts["eval"]).read_text().splitlines()]
    assert [one["item"]["number"] for one in samples] == asked
    assert sum(one["text"].count("e") / 8 for one in samples) / len(samples) == pytest.approx(rewards[STEPS])
    assert "waits at step 20 for held-out prompts" in stack.cli("logs", run["run_id"]).stdout
