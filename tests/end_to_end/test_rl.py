"""Client-driven RL through every process of the real system: what is trained once stays trained, to the bit."""

import json
from pathlib import Path

import pytest

from longshore.metrics import metric_of
from tests.activities.groups import group
from tests.end_to_end.runs import Groups, train, weights
from tests.end_to_end.stack import Stack

pytestmark = pytest.mark.slow

NUM_STEPS = 4


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, rl_options: list[str], groups: Groups) -> list[dict]:
    """All steps in one run that nothing happens to."""
    run_id = stack.cli(*rl_options).json["run_id"]
    steps = [train(stack, run_id, groups, number) for number in range(1, NUM_STEPS + 1)]
    stack.cli("finish", run_id)
    stack.cli("watch", run_id)
    return steps


def test_every_step_trains_the_policy_on(undisturbed: list[dict]) -> None:
    assert [(s["step"], s["state"], s["policy_version"], s["optimizer_step"]) for s in undisturbed] == [
        (n, "done", n, 4 * n) for n in range(1, NUM_STEPS + 1)
    ]
    assert len({weights(step) for step in undisturbed}) == NUM_STEPS
    for step in undisturbed:
        assert step["metrics"]["packing_factor"] > 1
        assert {"loss", "grad_norm", "reward_mean", "step_s"} <= set(step["metrics"])
        assert [name for name in step["metrics"] if metric_of(name) is None] == []


def test_steps_of_a_policy_are_done_again_to_the_bit(stack: Stack, undisturbed: list[dict]) -> None:
    last = undisturbed[-1]
    told = stack.cli("verify", f"{last['name']}:v{last['version']}", "--retrain", "--json").json
    assert told["retrained"]["equal"], told["retrained"]


def test_the_same_key_twice_trains_once_and_with_other_groups_is_refused(
    stack: Stack, rl_options: list[str], groups: Groups, undisturbed: list[dict]
) -> None:
    run_id = stack.cli(*rl_options).json["run_id"]
    first = train(stack, run_id, groups, 1)
    assert weights(first) == weights(undisturbed[0])
    assert train(stack, run_id, groups, 1) == first
    refused = stack.cli("step", run_id, groups(2), "--key", "key-1", check=False)
    assert refused.code != 0
    assert "this key was used for" in refused.stderr
    assert stack.cli("get", run_id, "--json").json["policy_version"] == 1
    jobs = list((stack.root / "store" / "runs" / run_id / "logs").glob("*/*/job.json"))
    assert len(jobs) == 1
    stack.cli("finish", run_id)
    assert stack.cli("watch", run_id, "--json").json["adapter"] == first["adapter"]
    late = stack.cli("step", run_id, groups(2), "--key", "late", check=False)
    assert "has ended" in late.stderr


def test_groups_that_cannot_be_trained_are_told_with_place_and_rule(
    stack: Stack, rl_options: list[str], tmp_path: Path
) -> None:
    run_id = stack.cli(*rl_options).json["run_id"]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(group(0.0, 1.0)) + "\n" + json.dumps(group(0.0, float("nan"))) + "\n")
    answer = stack.cli("step", run_id, str(bad), "--wait", check=False)
    assert answer.code == 100
    assert "bad.jsonl:2: trajectories.1.reward: it is nan" in answer.stdout
    stack.cli("finish", run_id)
