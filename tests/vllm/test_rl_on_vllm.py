"""Server-driven RL whose samples a leased vLLM draws: the adapter, or all weights, are proved at every step."""

import json
from collections.abc import Iterator

import pytest

from tests.end_to_end.stack import Stack, started
from tests.megatron_worker.rows import distinct_model
from tests.vllm.environment import ENVIRONMENT, VLLM_COMMAND, needs_vllm

pytestmark = needs_vllm
STEPS = 8
LETTERS = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {
        "LONGSHORE_SAMPLING__VLLM_COMMAND": VLLM_COMMAND,
        "LONGSHORE_HEARTBEAT_TIMEOUT_S": "5",
        "LONGSHORE_CPU_THREADS": "1",
    }
    with started(tmp_path_factory.mktemp("stack"), **settings, **ENVIRONMENT) as stack:
        yield stack


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model's heads have 32 dimensions, since vLLM's attention for CPUs has none for 16."""
    folder = tmp_path_factory.mktemp("given")
    model = distinct_model(folder / "model", head_dim=32)
    files = {}
    for name, numbers in (("train", range(40)), ("eval", range(40, 72))):
        files[name] = folder / f"{name}.jsonl"
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in numbers)
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("submit", "rl", "--json", "--model", str(model), "--prompts", str(files["train"]), "--sampler", "vllm"),
        *("--eval-prompts", str(files["eval"]), "--eval-temperature", "1", "--grader", json.dumps(LETTERS)),
        *("--steps", str(STEPS), "--prompts-per-step", "16", "--group-size", "8", "--max-completion-tokens", "12"),
        *("--loss", "reinforce", "--max-tokens", "128", "--seed", "7", "--wait", "--timeout", "1200"),
    ]


TRAINED = {
    "adapters": ("--lora-rank", "4", "--learning-rate", "0.02"),
    "weights": ("--full", "--learning-rate", "0.002"),
    "adapters while samples go on": (
        *("--lora-rank", "4", "--learning-rate", "0.02"),
        *("--off-policy-steps", "1", "--sync-in-flight", "continue"),
    ),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_a_run_learns_and_every_step_is_proved(stack: Stack, options: list[str], trained: str) -> None:
    run = stack.cli(*options, *TRAINED[trained], timeout_s=1300).json
    assert run["status"] == "succeeded", run
    folder = stack.root / "store" / "runs" / run["run_id"] / "steps"
    steps = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert len(steps) == STEPS + 1
    differences = [step["metrics"]["probe_difference_max"] for step in steps[1:]]
    rewards = [step["metrics"]["reward_mean"] for step in steps[1:]]
    held_out = [step["metrics"]["eval_reward_mean"] for step in (steps[0], steps[-1])]
    print("probe", differences, "reward", rewards, "held out", held_out)
    assert max(differences) < 1e-4
    assert all(step["metrics"]["sync_used"] == 0 for step in steps[1:]), "vLLM loads from the store"
    assert held_out[1] > held_out[0] and (rewards[-2] + rewards[-1]) / 2 > 2 * rewards[0]
    assert _samplers(stack, run["run_id"]) == {"vllm"}


def _samplers(stack: Stack, run_id: str) -> set[str]:
    """The samplers that the record of a run names."""
    record = json.loads((stack.root / "store" / "runs" / run_id / "run.json").read_text())
    return {record["run"]["rollouts"]["sampler"]}
