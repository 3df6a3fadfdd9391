"""Agents play while everything under them is killed at random: does one of them get another answer?

    python -m tests.chaos.agents [--kills 200] [--agents 4] [--seed N]
    python -m tests.chaos.agents --runs [--kills 200] [--minutes 60] [--seed N]

Six episodes of six turns are played undisturbed. Then agents play the same ones again and again, asking until they are
answered, while processes of the stack are killed. The last line counts episodes that were equal to the undisturbed
ones, answer for answer; the status is 1 if one was not, or if a turn was lost or counted twice.

With `--runs`, two RL runs in turn play the episodes: one with an environment, whose observations tell what it has seen,
and one with a program in a box. Each run must publish the undisturbed run's weights, and have the same episodes, none
lost or twice; and each reward is computed again from what the policy has said.
"""

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from examples.tiny_model import make_tiny_model
from longshore.environments import Course
from longshore.runs import RLRun
from tests import conftest  # noqa: F401  (nothing reaches a real account)
from tests.activities.sampling.test_agents import TALKS
from tests.chaos.trial import Disturber, ended, forget, patiently, submit, weights_sha256
from tests.end_to_end.conftest import QUICK, TINKER_MODEL
from tests.end_to_end.stack import Stack, started
from tests.end_to_end.test_episodes import played
from tests.end_to_end.victims import (
    a_box,
    a_rank,
    control_host,
    gpu_host,
    sampler,
    sampler_host,
    sandboxes,
    signal_all,
    temporal_server,
    web_service,
)
from tests.megatron_worker.rows import talking_model

NUM_SEEDS = 6
VICTIMS = (web_service, sampler, sampler_host, control_host, temporal_server)
OF_NO_RUN = (web_service, temporal_server, control_host, sandboxes, a_box)
STEPS, PROMPTS, GROUP = 3, 2, 4
TELLS = """
class Environment:
    def reset(self, item, seed):
        self.num = 0

    def step(self, answer):
        self.num += 1
        length = len(answer["content"])
        return {"reward": 1 / (1 + length), "observation": f"That was {length}.", "done": self.num == 4}
"""
VERIFIES = """python3 -c "print(open('said.txt').read().count('e'))" > /logs/verifier/reward.txt"""
PATIENCE_S = 1500.0


class Player:
    """Plays episodes on a stack, and compares them with the first ones of their seeds."""

    def __init__(self, stack: Stack) -> None:
        headers = {"authorization": f"Bearer {stack.connection.api_key}"}
        self._api = httpx.Client(base_url=f"{stack.connection.api_url}/api/v1", headers=headers, timeout=300)
        self._undisturbed = {seed: self._play(seed) for seed in range(NUM_SEEDS)}
        self.counts = Counter[str]()

    def play(self, seed: int) -> None:
        is_equal = self._play(seed) == self._undisturbed[seed]
        self.counts["equal" if is_equal else "different"] += 1

    def _play(self, seed: int) -> tuple[list[str], Any]:
        asked = {"model": TINKER_MODEL, "seed": seed, "sampling": {"max_tokens": 24}}
        episode = self._ask("/episodes", asked)
        answers = played(episode["url"], threading.Event())
        return answers, self._ask(f"/episodes/{episode['episode_id']}/end")["end"]

    def _ask(self, path: str, body: Any = None) -> Any:
        while True:
            try:
                answer = self._api.post(path, json=body)
                if answer.is_success:
                    return answer.json()
            except httpx.TransportError:
                pass
            time.sleep(0.2)


class Runs:
    """Runs of both kinds on a stack, held against the first ones."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._stack = stack
        rows = ({"prompt": f"How many crates, {number}?", "files": {"agent.py": TALKS}} for number in range(16))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rollouts = {"prompts": {"uri": (folder / "rows.jsonl").as_uri()}, "grader": None, "steps": STEPS}
        rollouts |= {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_completion_tokens": 32}
        common = {"model": str(talking_model(folder / "talker")), "trainable": {"kind": "lora", "rank": 4}, "seed": 7}
        common |= {"learning_rate": 0.01, "max_tokens": 400, "idle_s": 5, "loss": {"kind": "reinforce"}}
        agent = {"command": "python3 agent.py", "verifier": VERIFIES}
        parts: dict[str, dict[str, Any]] = {
            "environment": {"environment": {"source": TELLS, "max_turns": 4}},
            "agent": {"agent": agent},
        }
        self._runs = {kind: RLRun.model_validate({**common, "rollouts": rollouts | own}) for kind, own in parts.items()}
        self._undisturbed = {kind: self._outcome(kind) for kind in self._runs}
        self.counts = Counter[str]()
        self.wrong: list[str] = []

    def play(self, kind: str) -> None:
        forget(self._stack)
        weights, found = self._outcome(kind)
        weights_before, before = self._undisturbed[kind]
        self.counts[f"{kind} episodes"] += len(found)
        self.counts[f"{kind} runs"] += 1
        if weights != weights_before:
            self.wrong.append(f"{kind}: its weights are others")
        if found.keys() != before.keys():
            self.wrong.append(f"{kind}: episodes {found.keys() ^ before.keys()} are lost, or were not there")
        self.wrong += [f"{kind} {place}: {one}" for place, one in found.items() if one != before.get(place)]

    def _outcome(self, kind: str) -> tuple[str, dict[tuple[int, int], Any]]:
        """Return the digest of a run's weights, and its episodes by step and number."""
        run_id = submit(self._stack.root, self._runs[kind], PATIENCE_S)
        view = ended(self._stack.root, run_id, PATIENCE_S)
        found: dict[tuple[int, int], Any] = {}
        for step in range(1, STEPS + 1):
            samples = patiently(
                self._stack.root,
                lambda client: client.runs.samples(run_id, step, limit=200),  # noqa: B023
                PATIENCE_S,
            )
            assert len(samples) == PROMPTS * GROUP, f"{kind} has {len(samples)} episodes in step {step}"
            for one in samples:
                assert one.episode is not None and (step, one.number) not in found
                assert one.episode.reward == earned(kind, one.episode), (kind, step, one)
                told = one.episode.model_dump(exclude={"metrics"})  # which say that there was another attempt
                found[step, one.number] = one.group, one.text, one.item, told
        return weights_sha256(view), found


def earned(kind: str, course: Course) -> float:
    """Compute an episode's reward from its conversation."""
    said = [str(one["content"]) for one in course.messages if one["role"] == "assistant"]
    if kind == "agent":
        return float(sum(text.count("e") for text in said))
    seen = [text for text, after in zip(course.messages, course.messages[1:], strict=False) if after["role"] == "user"]
    return math.fsum(1 / (1 + len(str(one["content"]))) for one in seen)


def of_runs(folder: Path, chance: random.Random, kills: int, minutes: float) -> int:
    deadline = time.monotonic() + 60 * minutes
    warm = {"LONGSHORE_WORKER_IDLE_S": "600"}
    with started(folder / "stack", **{**QUICK, **warm}, LONGSHORE_SEPARATE_HOSTS="true") as stack:
        runs = Runs(stack, folder)
        print("undisturbed", flush=True)
        kinds = (*OF_NO_RUN, sampler, sampler_host, gpu_host, a_rank)
        disturber = Disturber(stack, chance, kills, kinds=kinds, free=OF_NO_RUN)
        while not disturber.is_spent and time.monotonic() < deadline and not runs.wrong:
            is_over = threading.Event()
            with ThreadPoolExecutor(1) as threads:
                disturbing = threads.submit(disturber.disturb, is_over.is_set)
                try:
                    for kind in ("environment", "agent"):
                        runs.play(kind)
                finally:
                    is_over.set()
                disturbing.result()
            print(json.dumps(runs.counts), flush=True)
    for what in runs.wrong[:20]:
        print(what[:2000])
    killed = dict(sorted(disturber.told.items()))
    print(json.dumps({"disturbed": disturber.told.total(), **killed, **runs.counts, "wrong": len(runs.wrong)}))
    return bool(runs.wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--agents", type=int, default=4, help="that play at once")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--runs", action="store_true", help="have runs play, instead of agents elsewhere")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further runs begin")
    options = parser.parse_args()
    if options.runs:
        print(f"seed {options.seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(of_runs(Path(folder), random.Random(options.seed), options.kills, options.minutes))
    rng, killed, is_over = random.Random(options.seed), Counter[str](), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", ["how many crates are on the quay? seven crates."] * 8)
        named = {"LONGSHORE_TINKER__MODELS": json.dumps({TINKER_MODEL: str(model)})}
        with started(Path(folder) / "stack", **QUICK, **named, LONGSHORE_SEPARATE_HOSTS="true") as stack:
            player = Player(stack)

            def play(number: int) -> None:
                while not is_over.is_set():
                    player.play(number % NUM_SEEDS)
                    number += options.agents

            with ThreadPoolExecutor(options.agents) as threads:
                playing = [threads.submit(play, number) for number in range(options.agents)]
                while killed.total() < options.kills:
                    victim = rng.choice(VICTIMS)
                    if processes := victim(stack):
                        signal_all(processes, signal.SIGKILL)
                        killed[victim.__name__] += 1
                    time.sleep(rng.uniform(0.3, 2.5))
                is_over.set()
                for each in playing:
                    each.result()
    print(json.dumps({"killed": killed, **player.counts, "seed": options.seed}))
    sys.exit(bool(player.counts["different"]))


if __name__ == "__main__":
    main()
