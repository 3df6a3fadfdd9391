"""A critic on its own worker, through every process of the real system: the bits of one worker."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES, LETTERS
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.test_rollouts import steps_of
from tests.end_to_end.victims import ranks, signal_all

pytestmark = [pytest.mark.slow, one_of(DRAWN_FILES, "two_workers")]

STEPS = 5


def of_lease(stack: Stack, name: str) -> list[psutil.Process]:
    """The ranks of the worker that has this lease."""
    found = []
    for rank in ranks(stack):
        command = rank.cmdline()
        if "--root" in command and Path(command[command.index("--root") + 1], "leases", f"{name}.json").exists():
            found.append(rank)
    return found


def _kill_in_the_next_step(stack: Stack, run_id: str, lease: str) -> None:
    """Kill a rank of the worker that has this lease, after one more step."""
    before = len(steps_of(stack, run_id))
    found = wait_until(lambda: of_lease(stack, lease) if len(steps_of(stack, run_id)) > before else None, lease)
    signal_all(found[:1], signal.SIGKILL)


def test_a_critic_beside_its_policy_on_one_host_and_on_two_whose_workers_are_killed(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(20)]
    prompts = jsonl(tmp_path / "prompts.jsonl", rows)
    options = [
        *("submit", "rl", "--json", "-m", str(tiny_model), "--prompts", str(prompts), "--grader", json.dumps(LETTERS)),
        *("--algorithm", "ppo", "--lora-rank", "4", "--group-size", "4", "--prompts-per-step", "4", "--seed", "7"),
        *("--max-completion-tokens", "16", "--max-tokens", "64", "--epochs", "2", "--steps", str(STEPS)),
        *("--critic-value-scale", "running", "--critic-warmup-steps", "1"),
    ]

    def submitted(*more: str) -> str:
        return str(stack.cli(*options, *more).json["run_id"])

    def bits(run_id: str) -> tuple[str, Sequence[dict[str, float]]]:
        answer = stack.cli("watch", run_id, "--json")
        assert answer.json["status"] == "succeeded", answer
        told = [step["metrics"] for step in steps_of(stack, run_id)]
        names = ("loss", "critic_loss", "critic_grad_norm", "value_mean", "explained_variance")
        return stack.adapter_sha256(answer), [{n: one[n] for n in names if n in one} for one in told]

    expected = bits(submitted())
    in_turn = submitted("--critic-own-worker")
    assert bits(in_turn) == expected
    with stack.another_host("gpu"):
        beside = submitted("--critic-own-worker")
        _kill_in_the_next_step(stack, beside, f"{beside}.critic")
        _kill_in_the_next_step(stack, beside, beside)
    assert bits(beside) == expected  # its last steps without the second host
    checkpoints = [step.get("critic_checkpoint") for step in steps_of(stack, beside)]
    assert [each is not None for each in checkpoints] == [False] + [True] * (STEPS - 1)  # none in the warm-up
    assert all(f"runs/{beside}/critic/" in each["artifact"]["uri"] for each in checkpoints[1:])
