"""RL from a client, on the real stack: what is learnt, and what is refused of its groups and inputs."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.metrics import metric_of
from tests.activities.groups import random_groups
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


ASKED = [{"role": "user", "content": "how many crates are on the quay?"}]
ANSWERS = ["42 crates.", "He carries a sack of grain.", "The ship waits for the tide.", "answer: 12"]


def conversation(model: Path, answer: str, reward: float) -> dict[str, Any]:
    """A chat completion's choice behind its question, with the logprobs of the answer's own tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
    content = [{"token": tokenizer.decode([i]), "logprob": -6.0} for i in ids]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"messages": [*ASKED, choice | {"message": {"role": "assistant", "content": answer}}], "reward": reward}


def trained_on(stack: Stack, run_id: str, folder: Path, groups: list[dict[str, Any]]) -> dict[str, Any]:
    path = folder / f"{run_id}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in groups))
    return stack.cli("step", run_id, str(path), "--wait", "--json").json


def submitted(stack: Stack, model: Path, *options: str) -> str:
    rl = ("submit", "rl", "--json", "--model", str(model), "--lora-rank", "4", "--max-tokens", "64", "--lr", "0.01")
    return stack.cli(*rl, *options).json["run_id"]


def test_conversations_are_trained_and_the_adapter_is_another_runs_reference(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    first = submitted(stack, tiny_model, "--algorithm", "dr_grpo")
    group = {"trajectories": [conversation(tiny_model, text, float(k)) for k, text in enumerate(ANSWERS)]}
    step = trained_on(stack, first, tmp_path, [group])
    assert step["state"] == "done", step
    assert (step["metrics"]["truncation_rate"], step["metrics"]["trained_trajectories"]) == (0.0, 4.0)
    kl = {"coefficient": 0.1, "reference": step["adapter"]}
    stack.cli("finish", first)  # else the next run waits until this one, idle, gives its worker back
    near = submitted(stack, tiny_model, "--algorithm", "dapo", "--loss", json.dumps({"kl": kl}))
    found = trained_on(stack, near, tmp_path, random_groups(seed=1))
    assert found["state"] == "done", found
    assert found["metrics"]["kl_reference"] > 1e-6, "the reference is another model than the base that begins"
    stack.cli("finish", near)
    missing = {"coefficient": 0.1, "reference": step["adapter"].replace("v000001", "v000009")}
    far = submitted(stack, tiny_model, "--loss", json.dumps({"kind": "ppo", "kl": missing}))
    view = stack.cli("watch", far, "--json", check=False)
    assert view.json["status"] == "failed"
    problem = "v000009: this is in Longshore's own store, but nothing was completed there"
    assert problem in view.json["problem"]["message"]
