"""Server-driven RL through every process of the real system: sampled, graded, trained and published, to the bit."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.stack import Stack

pytestmark = pytest.mark.slow

NUM_STEPS = 3
# How many letters of the answer are an e: something that an untrained model's samples differ in.
GRADER = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    text = sample['output_text']\n    return text.count('e') / 8\n",
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prompts to train on and others to evaluate by, as chats."""
    folder = tmp_path_factory.mktemp("prompts")
    files = {}
    for name, numbers in (("train", range(40)), ("eval", range(40, 48))):
        path = folder / f"{name}.jsonl"
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}], "number": n} for n in numbers)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = str(path)
    return files


@pytest.fixture(scope="module")
def rollout_options(tiny_model: Path, prompts: dict[str, str]) -> list[str]:
    return [
        *("submit", "rl", "--json", "--model", str(tiny_model), "--prompts", prompts["train"]),
        *("--eval-prompts", prompts["eval"], "--eval-every", "2", "--grader", json.dumps(GRADER)),
        *("--steps", str(NUM_STEPS), "--prompts-per-step", "4", "--group-size", "4", "--max-completion-tokens", "12"),
        *("--loss", "reinforce", "--lora-rank", "4", "--learning-rate", "0.01", "--max-tokens", "64", "--seed", "7"),
    ]


def steps_of(stack: Stack, run_id: str) -> list[dict]:
    folder = stack.root / "store" / "runs" / run_id / "steps"
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def weights(adapter: str) -> bytes:
    return Path(adapter.removeprefix("file://"), "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, rollout_options: list[str]) -> dict:
    return stack.cli(*rollout_options, "--wait", "--timeout", "150").json


def test_it_samples_grades_trains_and_publishes(stack: Stack, undisturbed: dict) -> None:
    assert undisturbed["status"] == "succeeded"
    steps = steps_of(stack, undisturbed["run_id"])
    assert [(step["step"], step["state"], step["policy_version"]) for step in steps] == [
        (n, "done", n) for n in range(NUM_STEPS + 1)
    ]
    assert steps[-1]["adapter"] == undisturbed["adapter"]
    for step in steps[1:]:
        metrics = step["metrics"]
        assert metrics["trajectories"] == 16
        assert metrics["probe_difference_max"] < 1e-4
        assert {
            *("reward_mean", "reward_std", "truncation_rate", "packing_factor", "grad_norm"),
            *("sampling_seconds", "grading_seconds", "training_seconds", "publishing_seconds"),
        } <= set(metrics)
    assert [step["step"] for step in steps if "eval_reward_mean" in step["metrics"]] == [0, 2, NUM_STEPS]
