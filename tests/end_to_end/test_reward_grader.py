"""RL against a reward model that was trained and published here: what it learns, and where it scores."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES, LETTERS
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack
from tests.end_to_end.test_dpo import published
from tests.end_to_end.test_reward import rewards
from tests.end_to_end.test_rollouts import steps_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), one_of(DRAWN_FILES, "reward_grader")]

NUM_STEPS, PROMPTS_A_STEP, GROUP_SIZE = 8, 8, 16


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def reward_model(stack: Stack, tiny_model: Path, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Of two texts like those of an untrained model it prefers the one with more of the letter e."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(3)
    plain = [number for number in range(len(tokenizer)) if number not in tokenizer.all_special_ids]
    with_e = [number for number in plain if "e" in tokenizer.decode([number])]

    def text(share: float) -> str:
        return tokenizer.decode([draw.choice(with_e if draw.random() < share else plain) for _ in range(12)])

    def pair(number: int) -> dict[str, str]:
        return {"prompt": f"Name ship {number}.", "chosen": text(0.5), "rejected": text(0.0)}

    for name, count in (("train", 1024), ("held-out", 64)):
        jsonl(folder / f"{name}.jsonl", [pair(draw.randrange(60)) for _ in range(count)])
    return stack.cli(
        *("submit", "reward", "--wait", "--json", "--model", str(tiny_model), "--name", "likes-e"),
        *("--dataset", str(folder / "train.jsonl"), "--eval-dataset", str(folder / "held-out.jsonl")),
        *("--max-tokens", "256", "--batch-size", "32", "--steps", "60", "--learning-rate", "0.01"),
    )


def grader(**fields: str) -> str:
    return json.dumps({"type": "reward_model", "name": "e", "model": "likes-e"} | fields)


@pytest.fixture(scope="module")
def submitted(stack: Stack, tiny_model: Path, prompts: dict[str, str], reward_model: Answer) -> Callable[..., Answer]:
    def submit(grader: str, *more: str) -> Answer:
        return stack.cli(
            *("submit", "rl", "--json", "--model", str(tiny_model), "--grader", grader, "--algorithm", "grpo"),
            *("--prompts", prompts["train"], "--eval-prompts", prompts["eval"], "--steps", str(NUM_STEPS)),
            *(
                "--prompts-per-step",
                str(PROMPTS_A_STEP),
                "--group-size",
                str(GROUP_SIZE),
                "--lora-targets",
                "v_proj,down_proj,lm_head",
            ),
            *("--max-completion-tokens", "12", "--max-tokens", "64", "--learning-rate", "0.02", "--seed", "7", *more),
        )

    return submit


@pytest.fixture(scope="module")
def undisturbed(submitted) -> Answer:
    return submitted(grader(), "--wait")


def trajectories(step: dict) -> list[dict]:
    groups = Path(step["groups"].removeprefix("file://")).read_text().splitlines()
    return [each for group in groups for each in json.loads(group)["trajectories"]]


def answer_of(trajectory: dict, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = [i for i, sampled in zip(trajectory["token_ids"], trajectory["sampled"], strict=True) if sampled]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_a_run_against_it_improves_the_true_reward(stack, undisturbed, reward_model, tokenizer) -> None:
    told = stack.cli("metrics", reward_model.json["run_id"], "--json").json
    assert told["evaluations"][-1]["metrics"]["preference_accuracy"] >= 0.95
    steps = steps_of(stack, undisturbed.json["run_id"])
    true = [
        sum(answer_of(each, tokenizer).count("e") for each in trajectories(step)) / PROMPTS_A_STEP / GROUP_SIZE
        for step in steps[1:]
    ]
    print("letters e a sample:", [round(mean, 2) for mean in true])
    assert true[-1] > 3 * true[0]
    held_out = [step["metrics"]["eval_reward_mean"] for step in steps if "eval_reward_mean" in step["metrics"]]
    assert held_out[-1] > held_out[0] and all(step["metrics"]["eval_ungraded"] == 0 for step in (steps[0], steps[-1]))


def test_grades_are_what_transformers_and_peft_compute(stack, undisturbed, reward_model, tiny_model, tokenizer) -> None:
    some = trajectories(steps_of(stack, undisturbed.json["run_id"])[1])[:24]
    rows = []
    for each in some:
        prompt = tokenizer.decode(each["token_ids"][: each["sampled"].index(True)])
        asked = prompt[prompt.index("Name ship") : prompt.index(".") + 1]
        rows.append((asked, answer_of(each, tokenizer)))
    expected = [values[0] for values in rewards(tiny_model, published(reward_model), rows, 1, is_lora=True)]
    assert [each["reward"] for each in some] == pytest.approx(expected, abs=1e-5)


def another_base(tiny_model: Path, folder: Path) -> Path:
    base = Path(shutil.copytree(tiny_model, folder / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"of": "the reward model"}))
    return base


@pytest.mark.deep
def test_with_one_sampler_host_the_samplers_take_turns(stack, submitted, tiny_model, tmp_path) -> None:
    """The run gives back the sampler that it holds when the other has not come for a minute."""
    alone = submitted(grader(), "--steps", "1", "--wait")
    run = submitted(grader(base=str(another_base(tiny_model, tmp_path))), "--steps", "1", "--wait")
    assert stack.adapter_sha256(run) == stack.adapter_sha256(alone)


def test_beside_other_graders_only_their_sum_differs(stack, submitted, undisturbed) -> None:
    """On the sampler of the policy, which shares its device with the trainer and sleeps meanwhile."""
    parts = {"e": json.loads(grader()), "none": LETTERS}
    both = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "e + 0 * none"}
    run = submitted(json.dumps(both), "--colocate", "--wait")
    assert stack.adapter_sha256(run) == stack.adapter_sha256(undisturbed)
