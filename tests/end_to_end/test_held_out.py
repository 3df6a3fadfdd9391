"""Held-out prompts of a run on a dataset: sampled from its checkpoints and graded, before, during and after training.

Nothing of that changes a bit of what is trained, and the grades decide which weights are published, and when it ends.
"""

import json
from pathlib import Path

import pytest

from longshore.dataset_runs import SFTRun
from longshore.metrics import metric_of
from longshore.training import Lora
from shared.storage.artifacts import sha256_file
from tests.end_to_end.conftest import LETTERS
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import kill, ranks

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


def test_the_best_by_its_grades_is_published_and_the_run_ends_when_it_gets_no_better(
    stack: Stack, tiny_model: Path, chat_dataset: Path, prompts: dict[str, str]
) -> None:
    """Rates that learn, then others that ruin what was learned; again with a killed worker, cancelled and resumed."""
    source = "def grade(sample, item):\n    return sum(c in ' crates.' for c in sample['output_text'][:16]) / 16\n"
    run = SFTRun.model_validate(
        {
            **{"model": str(tiny_model), "dataset": chat_dataset.as_uri(), "seed": 7, "trainable": Lora(rank=4)},
            **{"steps": 60, "batch_size": 64, "max_tokens": 256, "checkpoint_every": 5, "schedule": "constant"},
            **{"learning_rate": 3.0, "learning_rates": [0.01] * 16 + [3.0] * 44},
            **{"keep": "best", "early_stop": {"patience": 2, "metric": "eval_reward_mean"}},
            "rollouts": {
                "held_out": {"prompts": Path(prompts["eval"]).as_uri(), "every_steps": 4},
                "grader": {"type": "python", "name": "like-the-data", "source": source},
                "max_completion_tokens": 24,
            },
        }
    )
    with stack.client() as client:
        first = client.runs.wait(client.runs.submit(run).run_id, 600)
        again = client.runs.submit(run).run_id
        saved = stack.root / "store" / "runs" / again / "checkpoints"
        wait_until(lambda: any(saved.glob("*/*/manifest.json")), "a checkpoint")
        kill(stack, ranks)
        wait_until(lambda: (now := client.runs.get(again)).phase == "evaluating" and now.step >= 4, "it is evaluated")
        client.runs.cancel(again)
        wait_until(lambda: client.runs.get(again).state == "cancelled", "it is cancelled")
        client.runs.resume(again)
        second = client.runs.wait(again, 600)
    rewards = rewards_of(stack, first.run_id)
    assert rewards == rewards_of(stack, second.run_id)
    steps = [step for step in rewards if step]
    best = max(steps, key=lambda step: (rewards[step], -step))
    assert (first.state, first.step, steps[-1]) == ("succeeded", best + 8, best + 8) and best + 8 < 60, (first, rewards)
    for end in (first, second):
        assert (end.state, end.step) == ("succeeded", best + 8), end
        assert (end.metrics["best_step"], end.metrics["best_eval_reward_mean"]) == (best, rewards[best])
        assert end.notices[-1] == f"the weights after step {best} are published: eval_reward_mean was best there"
    files = [Path(end.adapter.removeprefix("file://"), "adapter_model.safetensors") for end in (first, second)]
    checkpoints = stack.root / "store" / "runs" / first.run_id / "checkpoints"
    files += checkpoints.glob(f"*/step-{best:08d}/weights/adapter_model.safetensors")
    assert len({sha256_file(file) for file in files}) == 1 and len(files) >= 3
