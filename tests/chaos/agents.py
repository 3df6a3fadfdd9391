"""Agents play while everything under them is killed at random: does one of them get another answer?

    python -m tests.chaos.agents [--kills 200] [--agents 4] [--seed N]

Six episodes of six turns are played undisturbed. Then agents play the same ones again and again, asking until they are
answered, while processes of the stack are killed. The last line counts episodes that were equal to the undisturbed
ones, answer for answer; the status is 1 if one was not, or if a turn was lost or counted twice.
"""

import argparse
import json
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
from tests import conftest  # noqa: F401  (nothing reaches a real account)
from tests.end_to_end.conftest import QUICK, TINKER_MODEL
from tests.end_to_end.stack import Stack, started
from tests.end_to_end.test_episodes import played
from tests.end_to_end.victims import control_host, sampler, sampler_host, signal_all, temporal_server, web_service

NUM_SEEDS = 6
VICTIMS = (web_service, sampler, sampler_host, control_host, temporal_server)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--agents", type=int, default=4, help="that play at once")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
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
