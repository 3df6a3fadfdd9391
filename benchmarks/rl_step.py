"""Overhead of a train step beyond its training: a tiny model's steps of 64 trajectories on a warm worker.

    python -m benchmarks.rl_step [--steps 10]

Starts `longshore dev` in a temporary folder, submits an RL run, and sends steps one by one over the native API. A
step's cost is the time from its POST to the answer that it is done, without the upload of its groups, minus `step_s`
of its optimizer steps (measured by the worker). The first step warms the worker up and does not count. Prints JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.control_plane import stack
from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.events import Step
from longshore.losses import PPO
from longshore.runs import RLRun
from longshore.training import Lora
from longshore.views import StepStatus
from service.dev import Connection

GROUPS, GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 8, 8, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    num_steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root):
            whole, trained, steps = _measure(root, Path(folder), num_steps)
    beyond = [a - b for a, b in zip(whole, trained, strict=True)]
    result = {
        "what": "seconds of a warm train step beyond its training",
        "trajectories": GROUPS * GROUP_SIZE,
        "median": round(statistics.median(beyond), 3),
        "worst": round(max(beyond), 3),
        "seconds_whole": [round(s, 3) for s in whole],
        "seconds_training": [round(s, 3) for s in trained],
        "median_seconds_of_the_job": _median(step.metrics["training_seconds"] for step in steps),
        "median_seconds_of_publishing": _median(step.metrics["publishing_seconds"] for step in steps),
        **provenance(),
    }
    print(json.dumps(result, indent=1))


def _median(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds), 3)


def _measure(root: Path, folder: Path, num_steps: int) -> tuple[list[float], list[float], list[StepStatus]]:
    """Seconds of every step but the first, of the training in it, and the steps as they ended."""
    model = make_tiny_model(folder / "model", ["how many crates are on the quay? seven crates."] * 8)
    run = RLRun(model=model.as_uri(), loss=PPO(), trainable=Lora(rank=4), max_tokens=128, bin_tokens=2048)
    connection = Connection.read(root)
    assert connection is not None
    whole, steps = [], []
    with Client(connection.api_url, connection.api_key) as client:
        run_id = client.runs.submit(run, "run").run_id
        for number in range(num_steps + 1):
            uri = client.files.upload(write_groups(folder / f"{number}.jsonl", number)).uri
            began = time.perf_counter()
            step = client.runs.train(run_id, uri, f"key-{number}")
            while not step.is_final:
                step = client.runs.step(run_id, step.step, wait_s=30)
            whole.append(time.perf_counter() - began)
            assert step.state == "done", step.problem
            steps.append(step)
        client.runs.finish(run_id)
        events = [item.event for item in client.runs.follow(run_id)]
    trained = [event.metrics["step_s"] for event in events if isinstance(event, Step)]
    return whole[1:], trained[1:], steps[1:]


def write_groups(path: Path, seed: int) -> Path:
    """Write random trajectory groups for a train step."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(1, 200, count)]

    def trajectory(prompt: list[int]) -> dict[str, object]:
        return {
            "token_ids": prompt + ids(ANSWER_TOKENS),
            "sampled": [False] * PROMPT_TOKENS + [True] * ANSWER_TOKENS,
            "logprobs": [None] * PROMPT_TOKENS + [-5.0] * ANSWER_TOKENS,
            "reward": float(random.normal()),
        }

    groups = ({"trajectories": [trajectory(p) for _ in range(GROUP_SIZE)]} for p in map(ids, [PROMPT_TOKENS] * GROUPS))
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return path


if __name__ == "__main__":
    main()
