"""Prompts that are carried over: a slow one holds no step, and is trained in the end; nothing is dropped or twice."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from activities.sampling.client import Sampler
from activities.sampling.completions import Rows, numbers_of
from shared.chat.completions import SamplerReady
from shared.storage.artifacts import sha256_file
from tests.activities.sampling.conftest import proxy_of
from tests.end_to_end.conftest import LETTERS, QUICK
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack, started, wait_until
from tests.end_to_end.test_rollouts import steps_of
from tests.end_to_end.victims import control_host, gpu_host, kill
from tests.megatron_worker.sampler_process import running

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, AHEAD = 7, 4, 4, 1


@dataclass
class Held:
    """Answers to prompts of the `slow` rows are kept back until `released` is set."""

    sampler: SamplerReady
    stack: Stack
    tokenizer: Tokenizer
    slow: frozenset[int] = frozenset()
    run_id: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    asked: set[int] = field(default_factory=set)
    most_begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, seed: int, step: int, num_slow: int) -> None:
        """The first `num_slow` prompts of a step, counted from 1, are slow in a run with this seed."""
        first = NUM_PROMPTS * (step - 1)
        slow = numbers_of(Rows(first=first, count=num_slow, seed=seed), NUM_STEPS * NUM_PROMPTS)
        self.slow, self.run_id, self.most_begun = frozenset(slow), "", 0
        self.asked.clear()
        self.released.clear()

    def said(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if body.get("n") != GROUP_SIZE:
            return answer  # to a probe
        row = int(self.tokenizer.decode(body["prompt"]).partition("ship ")[2].partition(".")[0])
        with self.lock:
            self.asked.add(row)
            # The log of a job is in the store before its policy is sampled from.
            trained = len(list((self.stack.root / "store").glob(f"runs/{self.run_id or '?'}/logs/*/*/log.jsonl")))
            self.most_begun = max(self.most_begun, len(self.asked) - NUM_PROMPTS * trained)
        if row in self.slow:
            self.released.wait(600)
        return answer


@pytest.fixture(scope="module")
def held(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("served")
    own = ("--logprobs-mode", "processed_logprobs", "--max-model-len", "256")
    with running(tiny_model, folder, *own) as sampler, proxy_of(sampler.url) as proxy:
        served = {"LONGSHORE_SAMPLING__URL": proxy.url, "LONGSHORE_SAMPLING__API_KEY": sampler.api_key}
        separate = {"LONGSHORE_SEPARATE_HOSTS": "true", "LONGSHORE_WANDB_MODE": "disabled"}
        with started(folder / "stack", **QUICK, **served, **separate) as stack:
            opened = Held(sampler, stack, Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
            proxy.said = opened.said
            yield opened
            opened.released.set()


@pytest.fixture(scope="module")
def options(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rows = [{"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(NUM_STEPS * NUM_PROMPTS)]
    prompts = jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)
    return [
        *("submit", "rl", "--json", "--model", str(tiny_model), "--prompts", str(prompts), "--loss", "ppo"),
        *("--grader", json.dumps(LETTERS), "--steps", str(NUM_STEPS), "--prompts-per-step", str(NUM_PROMPTS)),
        *("--group-size", str(GROUP_SIZE), "--max-completion-tokens", "12", "--max-tokens", "64"),
        *("--lora-rank", "4", "--learning-rate", "0.01", "--off-policy-steps", str(AHEAD), "--carry-over"),
    ]


def rows_of(step: dict[str, Any]) -> list[int]:
    lines = Path(step["groups"].removeprefix("file://")).read_text().splitlines()
    return [json.loads(line)["metadata"]["row"] for line in lines]


def trained_by_a_client(stack: Stack, options: list[str], steps: list[dict[str, Any]]) -> Answer:
    """A run of the same groups, which a client sends."""
    model = options[options.index("--model") + 1]
    own = ("--loss", "ppo", "--lora-rank", "4", "--learning-rate", "0.01", "--max-tokens", "64")
    run_id = stack.cli("submit", "rl", "--json", "--model", model, *own, *options[-2:]).json["run_id"]
    for step in steps:
        stack.cli("step", run_id, step["groups"].removeprefix("file://"), "--key", step["key"], "--wait")
    stack.cli("finish", run_id)
    return stack.cli("watch", run_id, "--json")


def adapter_of(answer: Answer) -> str:
    return sha256_file(Path(answer.json["adapter"].removeprefix("file://"), "adapter_model.safetensors"))


def test_a_slow_prompt_holds_no_step_until_it_is_the_last(held: Held, options: list[str]) -> None:
    held.begin(seed=1, step=1, num_slow=1)
    held.run_id = held.stack.cli(*options, "--seed", "1").json["run_id"]
    wait_until(lambda: len(steps_of(held.stack, held.run_id)) == NUM_STEPS - 1, "all steps but the last")
    assert not held.released.is_set()
    held.released.set()
    ended = held.stack.cli("watch", held.run_id, "--json")
    assert ended.json["status"] == "succeeded", ended
    steps = steps_of(held.stack, held.run_id)
    trained = [row for step in steps for row in rows_of(step)]
    assert sorted(trained) == list(range(NUM_STEPS * NUM_PROMPTS)), "each prompt is trained once"
    assert held.most_begun <= NUM_PROMPTS * (AHEAD + 1)
    metrics = [step["metrics"] for step in steps]
    assert [each["carried_groups"] for each in metrics] == [1.0] * (NUM_STEPS - 1) + [0.0]
    assert metrics[-1]["group_lag_max"] == metrics[-1]["staleness_max"] == NUM_STEPS - 1
    assert all(each["group_lag_max"] <= AHEAD for each in metrics[:-1])
    assert [len(step["carried"]["left"].get("1", ())) for step in steps] == [1] * (NUM_STEPS - 1) + [0]


def test_mixtures_and_evaluations_are_as_ever(held: Held, options: list[str], tmp_path: Path) -> None:
    held.begin(seed=4, step=1, num_slow=1)
    held.released.set()
    rows = [{"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(12)]
    files = {name: jsonl(tmp_path / f"{name}.jsonl", some) for name, some in (("odd", rows[1::2]), ("even", rows[::2]))}
    at = options.index("--prompts")
    mixed = [
        *options[:at],
        *(each for path in files.values() for each in ("--prompts", f"{path}:1")),
        *options[at + 2 :],
    ]
    evaluated = ("--eval-prompts", str(files["odd"]), "--eval-every", "1", "--steps", "3", "--seed", "4")
    run_id = held.stack.cli(*mixed, *evaluated).json["run_id"]
    assert held.stack.cli("watch", run_id, "--json").json["status"] == "succeeded"
    metrics = [step["metrics"] for step in steps_of(held.stack, run_id)]
    assert all("eval_reward_mean" in each for each in metrics) and len(metrics) == 4
    assert [sum(each[f"prompts_{number}"] for each in metrics[1:]) for number in (1, 2)] == [6, 6]


def test_what_a_step_takes_is_decided_once_whoever_is_killed(held: Held, options: list[str]) -> None:
    held.begin(seed=2, step=1, num_slow=2)
    run_id = held.stack.cli(*options, "--seed", "2").json["run_id"]
    decided = held.stack.root / "store" / "runs" / run_id / "admitted"
    seen: dict[str, str] = {}

    def is_decided(number: int) -> bool:
        seen.update({path.name: path.read_text() for path in decided.glob("*.json")})
        return len(seen) >= number

    for number, victim in ((1, control_host), (3, gpu_host), (4, control_host)):
        wait_until(lambda number=number: is_decided(number), f"the decision of step {number}", every_s=0.02)
        kill(held.stack, victim)
    wait_until(lambda: is_decided(5), "two more")
    held.released.set()
    ended = held.stack.cli("watch", run_id, "--json")
    assert ended.json["status"] == "succeeded", ended
    steps = steps_of(held.stack, run_id)
    assert sorted(row for step in steps for row in rows_of(step)) == list(range(NUM_STEPS * NUM_PROMPTS))
    assert len(list(decided.glob("*.json"))) == NUM_STEPS
    assert {name: (decided / name).read_text() for name in seen} == seen
    again = trained_by_a_client(held.stack, [*options, "--seed", "2"], steps)
    assert adapter_of(again) == adapter_of(ended)


def test_a_run_that_is_resumed_goes_on_with_what_was_left(held: Held, options: list[str]) -> None:
    """Also if the sampler has lost the policy that some prompts were begun with: it is still in the store."""
    held.begin(seed=3, step=3, num_slow=2)  # which begin with the policy after step 1
    run_id = held.stack.cli(*options, "--seed", "3").json["run_id"]
    wait_until(lambda: len(steps_of(held.stack, run_id)) == NUM_STEPS - 1, "all steps but the last")
    held.stack.cli("cancel", run_id)
    held.stack.cli("watch", run_id, "--json", check=False)
    before = steps_of(held.stack, run_id)
    assert [len(step["carried"]["left"].get("3", ())) for step in before[-2:]] == [2, 2]
    held.released.set()
    with Sampler(held.sampler.url, held.sampler.api_key) as sampler:
        for name, card in sampler.models().items():
            if card.parent is not None:
                sampler.unload_adapter(name)
    held.stack.cli("resume", run_id)
    ended = held.stack.cli("watch", run_id, "--json")
    assert ended.json["status"] == "succeeded", ended
    steps = steps_of(held.stack, run_id)
    assert steps[: len(before)] == before
    assert sorted(row for step in steps for row in rows_of(step)) == list(range(NUM_STEPS * NUM_PROMPTS))
    lines = Path(steps[-1]["groups"].removeprefix("file://")).read_text().splitlines()
    versions = [one["policy_version"] for line in lines for one in json.loads(line)["trajectories"]]
    assert versions.count(1) == 2 * GROUP_SIZE and steps[-1]["metrics"]["staleness_max"] == NUM_STEPS - 2
    again = trained_by_a_client(held.stack, [*options, "--seed", "3"], steps)
    assert adapter_of(again) == adapter_of(ended)
