"""Trajectory groups for tests: small, whole, and easy to break."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from longshore.losses import PPO
from longshore.runs import RLRun


def rl_run(**changes: Any) -> RLRun:
    return RLRun.model_validate({"model": "tiny", "loss": PPO(), "max_tokens": 64, "seed": 7} | changes)


def trajectory(
    reward: float = 1.0, prompt: int = 3, answer: tuple[int, ...] = (5, 6), **changes: Any
) -> dict[str, Any]:
    """A prompt of `prompt` ids that are not sampled, and an answer."""
    ids = [*range(1, prompt + 1), *answer]
    return {
        "token_ids": ids,
        "sampled": [False] * prompt + [True] * len(answer),
        "logprobs": [None] * prompt + [-0.5 - 0.1 * i for i in range(len(answer))],
        "reward": reward,
    } | changes


def group(*rewards: float, **changes: Any) -> dict[str, Any]:
    """A trajectory for every reward; their answers differ."""
    return {"trajectories": [trajectory(r, answer=(5, 6 + i), **changes) for i, r in enumerate(rewards)]}


def write_groups(path: Path, *groups: dict[str, Any]) -> str:
    """A file of groups; returns its URI."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in groups))
    return path.as_uri()


def random_groups(seed: int, num_groups: int = 4, size: int = 4, vocab_size: int = 512) -> list[dict[str, Any]]:
    """Groups with shared prompts, answers of several lengths, and two turns in some of them."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(1, vocab_size, count)]

    def one(prompt: list[int]) -> dict[str, Any]:
        turns = [(ids(int(random.integers(2, 6))), True)]
        if random.random() < 0.5:
            turns += [(ids(2), False), (ids(2), True)]
        tokens = prompt + [i for turn, _ in turns for i in turn]
        sampled = [False] * len(prompt) + [is_sampled for turn, is_sampled in turns for _ in turn]
        logprobs = [float(-random.random()) if is_sampled else None for is_sampled in sampled]
        return {"token_ids": tokens, "sampled": sampled, "logprobs": logprobs, "reward": float(random.normal())}

    return [{"trajectories": [one(prompt) for _ in range(size)]} for prompt in (ids(6) for _ in range(num_groups))]
