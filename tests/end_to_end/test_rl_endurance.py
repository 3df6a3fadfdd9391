"""Client-driven RL over many steps of 64 trajectories under random kills: every accepted step is trained exactly once.

    LONGSHORE_TEST_RL_STEPS=200 python -m pytest tests/end_to_end/test_rl_endurance.py

Without the variable it is a shorter run of the same kind.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longshore.losses import Reinforce
from longshore.training import Lora
from service.cli.client import CliClient
from service.dev.connection import Connection
from shared.runs.requests import RLRun
from shared.runs.status import StepStatus
from tests.activities.groups import random_groups, write_groups
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    control_host,
    gpu_host,
    kill,
    temporal_server,
    web_service,
)

pytestmark = pytest.mark.slow

NUM_STEPS = int(os.environ.get("LONGSHORE_TEST_RL_STEPS") or 8)
VICTIMS: list[Victim] = [a_rank, gpu_host, control_host, web_service, temporal_server]
_STEPS_A_KILL = 4


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The file of each step: eight groups of eight."""
    folder = tmp_path_factory.mktemp("groups")
    return [
        write_groups(folder / f"{number}.jsonl", *random_groups(seed=number, num_groups=8, size=8))
        for number in range(NUM_STEPS)
    ]


def _train(stack: Stack, model: Path, groups: list[str], done: Callable[[int], None]) -> tuple[str, list[StepStatus]]:
    """Every step of a run to its end, one after the other; each is sent until it is accepted, and then once more."""
    connection = Connection.read(stack.root)
    assert connection is not None
    run = RLRun(
        model=model.as_uri(), loss=Reinforce(), trainable=Lora(rank=4), learning_rate=1e-3, max_tokens=64, idle_s=30
    )
    steps = []
    with CliClient(connection.api_url, connection.api_key, patience_s=90) as client:
        run_id = client.submit(run, "endurance").run_id
        for number, uri in enumerate(groups):
            step = client.train_step(run_id, f"key-{number}", uri)
            step = client.train_step(run_id, f"key-{number}", uri)
            end = time.monotonic() + 200
            while not step.is_final:
                assert time.monotonic() < end, step
                step = client.step(run_id, step.step, wait_s=10)
            steps.append(step)
            done(number + 1)
        # What is shown of a run is what was last seen of it while the host of its workflow is being started again.
        wait_until(lambda: client.run(run_id).policy_version == len(groups), "the run is shown at its last step")
    return run_id, steps


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, tiny_model: Path, groups: list[str]) -> list[StepStatus]:
    run_id, steps = _train(stack, tiny_model, groups, lambda number: None)
    stack.cli("finish", run_id)
    return steps


def test_every_accepted_step_is_trained_exactly_once(
    fresh_stack: Stack,
    tiny_model: Path,
    groups: list[str],
    undisturbed: list[StepStatus],
    chance: random.Random,
) -> None:
    dying: list[threading.Timer] = []

    def strike(number: int) -> None:
        """Somewhere within the next step, once in a while."""
        if number % _STEPS_A_KILL == _STEPS_A_KILL // 2:
            timer = threading.Timer(chance.uniform(0, 1.5), kill, (fresh_stack, chance.choice(VICTIMS), 0))
            timer.start()
            dying.append(timer)

    run_id, steps = _train(fresh_stack, tiny_model, groups, strike)
    for timer in dying:
        timer.join()
    wait_until(lambda: fresh_stack.cli("ls", check=False).code == 0, "the service is back, if it was killed last")
    fresh_stack.cli("finish", run_id)
    paths = sorted((fresh_stack.root / "store" / "runs" / run_id / "steps").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    assert len(dying) == len(range(_STEPS_A_KILL // 2, NUM_STEPS + 1, _STEPS_A_KILL))
    expected = [(n, "done", n, n) for n in range(1, NUM_STEPS + 1)]
    assert [(s.step, s.state, s.policy_version, s.optimizer_step) for s in steps] == expected
    assert [(r["step"], r["state"], r["policy_version"], r["optimizer_step"]) for r in records] == expected
    assert [_weights(step) for step in steps] == [_weights(step) for step in undisturbed]


def _weights(step: StepStatus) -> str:
    """Of the adapter's weights, as the published manifest has it."""
    assert step.adapter is not None
    manifest = json.loads(Path(step.adapter.removeprefix("file://"), "manifest.json").read_bytes())
    return next(entry["sha256"] for entry in manifest["files"] if entry["path"] == "adapter_model.safetensors")
