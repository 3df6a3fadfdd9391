"""One stack for the tests of this folder, patient enough for a loaded machine and quick to notice a death.

It is of the package's scope: an idle stack takes its part of the machine, so it stops when a process goes on to tests
of other folders, and starts again if the process comes back.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.spans import Receiver, receiver
from tests.activities.groups import random_groups
from tests.end_to_end.runs import Groups, jsonl
from tests.end_to_end.stack import Answer, Stack, metrics_port, started

QUICK = {
    "LONGSHORE_HEARTBEAT_TIMEOUT_S": "5",
    "LONGSHORE_WORKER_IDLE_S": "8",
    "LONGSHORE_SERVING__IDLE_S": "4",  # a run that samples waits for the sampler that answered the last question
    "LONGSHORE_CANCEL_GRACE_S": "30",
    "LONGSHORE_CPU_THREADS": "1",
    "LONGSHORE_SAMPLING__WEIGHTS_ADDRESS": "127.0.0.1",
    "LONGSHORE_AGENTS__PROGRAMS": json.dumps([sys.prefix]),
}

# What a stack is trusted with, and test_secrets.py looks for in everything that it leaves behind.
SECRETS = {
    "LONGSHORE_GRADING__SCORE_MODEL_KEY": "canary-of-the-judge-5d1c7a",
    "LONGSHORE_SAMPLING__API_KEY": "canary-of-the-sampler-9e02bf",
    "WANDB_API_KEY": "0123456789abcdefcanary0123456789abcdef00",
    "AWS_SECRET_ACCESS_KEY": "canary/of/aws/77aa31",
    "HF_TOKEN": "canary-of-the-hub-c40d18",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=canary-of-the-traces-1f6b30",
    "TOKEN_OF_SOMETHING_ELSE": "canary-of-a-stranger-2b90ce",
}

# A grader of something that an untrained model's samples differ in: how many letters of the answer are an e.
LETTERS = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n",
}

# A name that Tinker's cookbook knows a renderer for. On the stack it is the tiny model's.
TINKER_MODEL = "Qwen/Qwen3-8B"
ROLLOUT_STEPS = 3
CLIENT_FILES = ("art", "tinker", "openai")  # so of these: tests/service drives their clients in each run
DRAWN_FILES = (
    "objectives",
    "distillation",
    "reward",
    "reward_grader",
    "sweeps",
    "local_rl",
    "mixtures",
    "two_workers",
)  # a run of the suite tries one of them

_HERE = Path(__file__).parent
# Of a test, with its share of fixtures: it ends what hangs. Beside much else a run of seconds takes minutes.
_TIMEOUT_S = 2400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="package")
def traces() -> Iterator[Receiver]:
    """Whatever the processes of `stack` send of their traces."""
    with receiver() as opened:
        yield opened


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, traces: Receiver) -> Iterator[Stack]:
    named = {"LONGSHORE_TINKER__MODELS": json.dumps({TINKER_MODEL: str(tiny_model)})}
    priced = {"LONGSHORE_PRICES__GPU_HOUR": "36"}  # a cent a second
    seen = {"LONGSHORE_METRICS__PORT": str(metrics_port()), "OTEL_BSP_SCHEDULE_DELAY": "500"}
    seen["OTEL_EXPORTER_OTLP_ENDPOINT"] = traces.endpoint
    codec = {"LONGSHORE_TEMPORAL_CODEC": "true"}
    options = {**QUICK, **SECRETS, **named, **priced, **codec, **seen}
    with started(tmp_path_factory.mktemp("stack"), **options) as opened:
        yield opened


@pytest.fixture(scope="package")
def fresh_stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """One to be disturbed, where nothing is found that was made on the other: samples and bins are found by content."""
    root = tmp_path_factory.mktemp("fresh")
    (root / "held").mkdir()
    held = {"PYTHONPATH": str(_HERE / "held_phases"), "PYTHON_HELD_PHASES": str(root / "held")}
    held["LONGSHORE_SEPARATE_HOSTS"] = "true"  # so that each role is killed alone; on `stack` all die together
    held["LONGSHORE_TINKER__MODELS"] = json.dumps({TINKER_MODEL: str(tiny_model)})
    held["LONGSHORE_PRICES__GPU_HOUR"] = "36"
    held["LONGSHORE_WANDB_MODE"] = "disabled"  # tests/chaos kills its writer; here it would be started for each run
    with started(root, **QUICK, **held) as opened:
        yield opened


@pytest.fixture(scope="session")
def chat_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 one-turn chats about a harbour."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How many crates are on quay {n}?"},
                {"role": "assistant", "content": f"{n * 7 % 50} crates."},
            ]
        }
        for n in range(256)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def options(tiny_model: Path, chat_dataset: Path) -> list[str]:
    """60 steps, seconds long, a checkpoint every 10."""
    return [
        *("submit", "sft", "--json", "--model", str(tiny_model), "--dataset", str(chat_dataset)),
        *("--steps", "60", "--batch-size", "32", "--max-tokens", "256", "--checkpoint-every", "10", "--seed", "7"),
    ]


@pytest.fixture(scope="session")
def sft_options(options: list[str]) -> list[str]:
    """The run that the kill tests disturb."""
    return [*options, "--lora-rank", "4", "--learning-rate", "0.01"]


@pytest.fixture(scope="package")
def undisturbed(stack: Stack, sft_options: list[str]) -> Answer:
    """The run as it ends when nothing happens to it."""
    return stack.cli(*sft_options, "--wait")


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """The file of a step: four groups of four, in two mini-batches twice over."""
    folder = tmp_path_factory.mktemp("groups")
    return lambda number: str(jsonl(folder / f"{number}.jsonl", random_groups(seed=number)))


@pytest.fixture(scope="session")
def rl_options(tiny_model: Path) -> list[str]:
    """A run whose steps a client sends."""
    loss = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "kl": {"coefficient": 0.01}, "old": "trainer"}
    return [
        *("submit", "rl", "--json", "--model", str(tiny_model), "--loss", json.dumps(loss), "--lora-rank", "4"),
        *("--learning-rate", "0.01", "--warmup", "3", "--mini-batches", "2", "--epochs", "2", "--max-tokens", "64"),
        *("--seed", "7", "--idle", "20"),
    ]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prompts to train on and others to evaluate by, as chats."""
    folder = tmp_path_factory.mktemp("prompts")
    files = {}
    for name, numbers in (("train", range(40)), ("eval", range(40, 48))):
        path = folder / f"{name}.jsonl"
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}], "number": n} for n in numbers)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = str(path)
    return files


@pytest.fixture(scope="session")
def rollout_options(tiny_model: Path, prompts: dict[str, str]) -> list[str]:
    return [
        *("submit", "rl", "--json", "--model", str(tiny_model), "--prompts", prompts["train"]),
        *("--eval-prompts", prompts["eval"], "--eval-every", "2", "--grader", json.dumps(LETTERS)),
        *(
            "--steps",
            str(ROLLOUT_STEPS),
            "--prompts-per-step",
            "4",
            "--group-size",
            "4",
            "--max-completion-tokens",
            "12",
        ),
        *("--loss", "reinforce", "--lora-rank", "4", "--learning-rate", "0.01", "--max-tokens", "64", "--seed", "7"),
    ]
