"""Train an agent that asks a model again until the answer is right (docs/agents.md).

    python examples/agent.py --model MODEL --policy NAME --questions questions.jsonl --steps 12

Each step plays some tasks, several times each: an episode each time. `play` is the agent. It is a program like any
other, which is given an address and a model's name, and knows nothing of training; put yours in its place. What it
returns is the episode's reward. A line of questions.jsonl has `messages`, and the `answer` that is right. NAME is what
the first step asks: a published model, or the name of the base model. Prints one line of JSON per step.

The same command again continues the same run after its last step.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from longshore import Client, EpisodeRequest, EpisodeSampling, Lora, RLRun

TRIES = 3
AT_ONCE = 16
ATTEMPTS = 3


def play(address: str, model: str, task: dict[str, Any]) -> float:
    """Ask, and ask again. A right answer earns 1, and less after each further try."""
    messages = list(task["messages"])
    with httpx.Client(base_url=address, timeout=600, trust_env=False) as client:
        for tries in range(TRIES):
            answer = client.post("/v1/chat/completions", json={"model": model, "messages": messages})
            said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
            if said.strip() == task["answer"]:
                return 1.0 - tries / TRIES
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "No. Again?"}]
    return 0.0


Play = Callable[[str, str, Any], float | None]
"""An agent: takes an address, a model's name and a task, and returns the reward; None for an attempt that broke."""


def train(play: Play, tasks: Sequence[Any], given: argparse.Namespace) -> None:
    """Train on an agent's episodes. An attempt that breaks is made again; after the third its group is left out."""
    run = RLRun(
        model=given.model,
        initial_adapter=given.initial_adapter,
        name=given.name,
        trainable=Lora(rank=given.lora_rank, alpha=2 * given.lora_rank),
        algorithm="dr_grpo",
        learning_rate=given.learning_rate,
        mini_batches=given.mini_batches,
        max_tokens=given.max_tokens,
        seed=given.seed,
    )
    with Client() as client, ThreadPoolExecutor(AT_ONCE) as threads:
        run_id = client.runs.submit(run, idempotency_key=f"agent-{given.name}-{given.seed}").run_id
        done = client.runs.steps(run_id).steps
        policy = given.name if done else given.policy
        for step in range(len(done) + 1, given.steps + 1):
            rng = random.Random(f"{given.seed} {step}")
            asked = [task for task in rng.sample(tasks, given.tasks_per_step) for _ in range(given.group_size)]
            played = threads.map(
                lambda task: episode(client, policy, given.max_completion_tokens, play, task),  # noqa: B023
                asked,
            )
            groups = in_groups(list(played), given.group_size)
            rewards = [one["reward"] for group in groups for one in group]
            for group in groups if given.shuffle_rewards else ():
                shuffled = rng.sample([one["reward"] for one in group], len(group))
                for one, reward in zip(group, shuffled, strict=True):
                    one["reward"] = reward
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"step-{step}.jsonl"
                file.write_text("".join(json.dumps({"trajectories": group}) + "\n" for group in groups))
                uploaded = client.files.upload(file)
            trained = client.runs.train(run_id, uploaded.uri, key=f"step-{step}", wait_s=60)
            while not trained.is_final:
                trained = client.runs.step(run_id, trained.step, wait_s=60)
            policy = given.name if trained.version is not None else policy
            told = {"step": step, "reward": round(sum(rewards) / len(rewards), 4), "state": trained.state}
            told |= {"problem": trained.problem.message} if trained.problem else {}
            print(json.dumps(told), flush=True)
        client.runs.finish(run_id)


def episode(client: Client, policy: str, max_tokens: int, play: Play, task: Any) -> dict[str, Any] | None:
    """Let an agent play, again if it breaks. Returns its trajectory; None if it broke each time."""
    for _ in range(ATTEMPTS):
        made = client.episodes.begin(EpisodeRequest(model=policy, sampling=EpisodeSampling(max_tokens=max_tokens)))
        assert made.url is not None
        reward = play(made.url, policy, task)
        client.episodes.end(made.episode_id)
        if reward is not None:
            return {"episode": made.episode_id, "reward": reward}
    return None


def in_groups(played: Sequence[dict[str, Any] | None], size: int) -> list[list[dict[str, Any]]]:
    """Return the complete groups: without some attempts a group would have another mean reward."""
    groups = [played[n : n + size] for n in range(0, len(played), size)]
    whole = [[one for one in group if one is not None] for group in groups]
    return [group for group in whole if len(group) == size]


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of `train`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model that is trained, as a run takes it")
    parser.add_argument("--initial-adapter", help="an adapter to begin with")
    parser.add_argument("--policy", required=True, help="the name that the first step's agents ask")
    parser.add_argument("--name", default="agent", help="the name under which the policy is published")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512, help="of a branch of an episode")
    parser.add_argument("--max-completion-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="within each group: nothing can be learned")
    return parser


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=Path, required=True)
    given = parser.parse_args()
    train(play, [json.loads(line) for line in given.questions.read_text().splitlines()], given)


if __name__ == "__main__":
    main()
