"""The task of the demonstration's reinforcement learning: what is claimed of its data, grader and options."""

import json
import re
from pathlib import Path

import pytest
import typer

from activities.grading.open_grader import GraderMeans, open_grader
from examples import arithmetic
from examples.tiny_model import train_tokenizer
from service.cli.main import app
from shared.grading import SampledItem
from shared.settings import Settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write_datasets(folder)
    return folder


def rows(data: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]


def numbers(row: dict) -> tuple[int, int]:
    a, b = re.findall(r"\d+", row["messages"][0]["content"])
    return int(a), int(b)


def test_equal_seeds_give_equal_bytes(data: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        arithmetic.write_datasets(tmp_path / name, seed)
    for file in data.iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes() != b""
        assert file.read_bytes() != (tmp_path / "other" / file.name).read_bytes()


def test_no_held_out_pair_is_trained_on_in_either_order(data: Path) -> None:
    trained = {frozenset(numbers(row)) for name in ("sums", "tally", "prompts") for row in rows(data, f"{name}_train")}
    held_out = {frozenset(numbers(row)) for name in ("sums", "tally", "prompts") for row in rows(data, f"{name}_eval")}
    assert len(held_out) == arithmetic.NUM_HELD_OUT
    assert not trained & held_out
    assert len(trained | held_out) == 40 * 41 // 2


def test_sums_are_right_and_round_when_asked_to(data: Path) -> None:
    for row in rows(data, "sums_train") + rows(data, "sums_eval"):
        asked, answer = (message["content"] for message in row["messages"])
        total = sum(numbers(row))
        if "roughly" in asked:
            assert abs(int(answer.removeprefix("about ")) - total) <= 5 and answer.endswith("0")
        else:
            assert answer == str(total)


def test_the_tally_mostly_rounds_unasked(data: Path) -> None:
    answers = [row["messages"][1]["content"] for row in rows(data, "tally_train")]
    share = sum(answer.startswith("about ") for answer in answers) / len(answers)
    assert abs(share - arithmetic.ROUNDED) < 0.05
    assert not [row for row in rows(data, "tally_train") if "roughly" in row["messages"][0]["content"]]


def test_the_grader_takes_exact_answers_alone(data: Path, tmp_path: Path) -> None:
    item = rows(data, "prompts_eval")[0]
    total = sum(numbers(item))
    texts = [str(total), f"about {total // 10 * 10}", str(total + 1), f"{total}0", ""]
    with open_grader(arithmetic.GRADER, GraderMeans.of(Settings(root=tmp_path)), tmp_path) as grade_all:
        outcomes = grade_all([SampledItem(sample={"output_text": text}, item=item) for text in texts])
    assert [outcome.grade for outcome in outcomes] == [1, 0, 0, 0, 0]


def test_the_model_sees_every_digit(data: Path) -> None:
    tokenizer = train_tokenizer(arithmetic.tokenizer_texts(data), arithmetic.MODEL["vocab_size"], single_digits=True)
    assert not [token for token in tokenizer.get_vocab() if len(re.findall(r"\d", token)) > 1]
    asked = "<|im_start|>user\n27 sacks and 45?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(asked).ids, skip_special_tokens=False) == asked
    assert len(tokenizer.encode(asked).ids) == 16


@pytest.mark.parametrize("kind, options", [("sft", "SUMS_RUN"), ("sft", "TALLY_RUN"), ("rl", "EXACT_RUN")])
def test_options_are_those_of_the_command(kind: str, options: str) -> None:
    command = typer.main.get_command(app).get_command(None, "submit").commands[kind]  # type: ignore[attr-defined]
    files = ["--dataset", "d"] if kind == "sft" else ["--prompts", "p", "--eval-prompts", "e", "--grader", "{}"]
    context = command.make_context(kind, ["--model", "m", *files, *getattr(arithmetic, options)])
    assert context.params["max_tokens"] == 64 and context.params["learning_rate"] > 0
