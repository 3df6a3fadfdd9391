"""Client-driven RL through every process of the real system: what is trained once stays trained, to the bit."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.activities.groups import group
from tests.end_to_end.runs import Groups, train, weights
from tests.end_to_end.stack import Stack, wait_until

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


def test_steps_of_a_policy_are_done_again_to_the_bit(stack: Stack, undisturbed: list[dict]) -> None:
    last = undisturbed[-1]
    told = stack.cli("verify", f"{last['name']}:v{last['version']}", "--retrain", "--json").json
    assert told["retrained"]["equal"], told["retrained"]


def test_everything_is_killed_in_the_middle_and_the_last_adapter_has_the_same_bits(
    fresh_stack: Stack, rl_options: list[str], groups: Groups, undisturbed: list[dict]
) -> None:
    """N steps, every process killed while the next one trains, the stack started anew, N more."""
    stack = fresh_stack
    run_id = stack.cli(*rl_options).json["run_id"]
    half = NUM_STEPS // 2
    steps = [train(stack, run_id, groups, number) for number in range(1, half + 1)]
    stack.cli("step", run_id, groups(half + 1), "--key", f"key-{half + 1}")
    wait_until(lambda: _in_job(stack, run_id, half + 1), "the next step's job", every_s=0.01)
    _kill_everything(stack)
    stack.cli("dev", "--detach", "--root", str(stack.root))
    steps += [train(stack, run_id, groups, number) for number in range(half + 1, NUM_STEPS + 1)]
    assert [step["state"] for step in steps] == ["done"] * NUM_STEPS
    assert [weights(step) for step in steps] == [weights(step) for step in undisturbed]
    assert stack.cli("get", run_id, "--json").json["policy_version"] == NUM_STEPS
    stack.cli("finish", run_id)


def _in_job(stack: Stack, run_id: str, step: int) -> bool:
    logs = list(stack.host_paths.workers.glob(f"*/outputs/{run_id}/{step:06d}/*/log.jsonl"))
    return any('"event":"step"' in log.read_text() for log in logs if log.exists())


def _kill_everything(stack: Stack) -> None:
    """Until nothing is left: a supervisor that dies last may have started something."""
    while victims := [p for p in stack.processes() if p.pid != os.getpid()]:
        for process in victims:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(victims, timeout=5)


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
