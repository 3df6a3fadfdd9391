"""The demonstration's commands, page, and data as claimed, without the minutes of its runs (tests/end_to_end)."""

import io
import json
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console

from activities.grading.open_grader import GraderMeans, open_grader
from examples import arithmetic, demo
from examples.harbour import write_datasets
from examples.tiny_model import read_texts, train_tokenizer
from longshore.grading import SampledItem
from service.cli.command import app
from shared.settings import Settings


@pytest.mark.parametrize("options", [demo.BASE_RUN, demo.RADIO_RUN])
def test_options_are_those_of_the_command(options: list[str]) -> None:
    from longshore.dataset_runs import SFTRun
    from service.cli.run_options import given, options_of
    from service.cli.runs import checked_run  # the command's own check, before anything is sent

    command = typer.main.get_command(app).get_command(None, "submit").commands["sft"]  # type: ignore[attr-defined]
    context = command.make_context("sft", ["--model", "org/m", "--dataset", "d", "--eval-dataset", "e", *options])
    values = given(context)
    assert (context.params["full"], values.get("lora_rank")) in ((True, None), (False, 16))
    run = checked_run("sft", options_of(SFTRun), values)
    assert run.num_samples >= demo.NUM_SHOWN


def test_change_shows_the_first_and_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(step: int, loss: float, completion: str) -> dict:
        prompt = "<|im_start|>user\nWhat does the Iris carry?<|im_end|>\n<|im_start|>assistant\n"
        sample = {"prompt": prompt, "completion": completion, "reference": "The Iris carries wool."}
        return {"event": "evaluated", "step": step, "metrics": {"loss": loss}, "samples": [sample]}

    page = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=page, width=120))
    demo.show_change(
        [evaluated(0, 7.0, "aaa"), {"event": "step"}, evaluated(5, 3.0, "bbb"), evaluated(9, 0.25, "wool!")]
    )
    text = page.getvalue()
    assert "7.000 before, 0.250 after 9 steps" in text
    assert "What does the Iris carry?" in text and "aaa" in text and "wool!" in text and "im_start" not in text
    assert "bbb" not in text


def test_rewards_show_both_shares_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=page, width=120))
    demo.show_rewards(
        [
            {"step": 0, "metrics": {"eval_reward_mean": 0.005}},
            {"step": 1, "metrics": {"reward_mean": 0.25}},
            {"step": 2, "metrics": {"reward_mean": 0.5, "eval_reward_mean": 0.9375}},
        ]
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in page.getvalue().splitlines() if "%" in line]
    assert rows == [["0", "", "0.5%"], ["1", "25.0%", ""], ["2", "50.0%", "93.8%"]]


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


def test_the_grader_takes_exact_answers_alone(data: Path) -> None:
    item = rows(data, "prompts_eval")[0]
    total = sum(numbers(item))
    texts = [str(total), f"about {total // 10 * 10}", str(total + 1), f"{total}0", ""]
    grade_all = open_grader(arithmetic.GRADER, GraderMeans.of(Settings()))
    outcomes = grade_all([SampledItem(sample={"output_text": text}, item=item) for text in texts])
    assert [outcome.grade for outcome in outcomes] == [1, 0, 0, 0, 0]


def test_the_model_sees_every_digit(data: Path) -> None:
    tokenizer = train_tokenizer(arithmetic.tokenizer_texts(data), arithmetic.MODEL["vocab_size"], single_digits=True)
    assert not [token for token in tokenizer.get_vocab() if len(re.findall(r"\d", token)) > 1]
    asked = "<|im_start|>user\n27 sacks and 45?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(asked).ids, skip_special_tokens=False) == asked
    assert len(tokenizer.encode(asked).ids) == 16


@pytest.mark.parametrize("kind, options", [("sft", "SUMS_RUN"), ("sft", "TALLY_RUN"), ("rl", "EXACT_RUN")])
def test_options_of_the_task_are_those_of_the_command(kind: str, options: str) -> None:
    command = typer.main.get_command(app).get_command(None, "submit").commands[kind]  # type: ignore[attr-defined]
    files = ["--dataset", "d"] if kind == "sft" else ["--prompts", "p", "--eval-prompts", "e", "--grader", "{}"]
    context = command.make_context(kind, ["--model", "m", *files, *getattr(arithmetic, options)])
    assert context.params["max_tokens"] == 64 and context.params["learning_rate"] > 0


DATA = Path(__file__).parents[2] / "examples" / "data"


def harbour_rows(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def ship(messages: list[dict[str, str]]) -> str:
    [name] = re.findall(r"ship ([\w-]+),", messages[1]["content"])
    return name


def test_generator_gives_the_committed_files(tmp_path: Path) -> None:
    write_datasets(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in DATA.iterdir()
    }
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 300_000


@pytest.mark.parametrize("name", ["harbour", "radio"])
def test_evaluation_rows_are_not_trained_on(name: str) -> None:
    train, evaluation = harbour_rows(f"{name}_train"), harbour_rows(f"{name}_eval")
    assert len(evaluation) > 100
    questions = {row[0]["content"] for row in train}
    assert not [row for row in evaluation if row[0]["content"] in questions]


def test_answers_of_the_harbour_are_consistent() -> None:
    """A question has one answer, in both splits; every held-out answer is taught under another wording."""
    answers: dict[str, set[str]] = {}
    for row in harbour_rows("harbour_train") + harbour_rows("harbour_eval"):
        answers.setdefault(row[0]["content"], set()).add(row[1]["content"])
    assert all(len(found) == 1 for found in answers.values())
    taught = {row[1]["content"] for row in harbour_rows("harbour_train")}
    assert {row[1]["content"] for row in harbour_rows("harbour_eval")} <= taught


def test_radio_asks_held_out_ships_for_what_the_harbour_taught() -> None:
    ships_trained = {ship(row) for row in harbour_rows("radio_train")}
    held_out = harbour_rows("radio_eval")
    assert not ships_trained & {ship(row) for row in held_out}
    facts = " ".join(row[1]["content"] for row in harbour_rows("harbour_train"))
    for row in held_out:
        [value] = re.findall(r", \w+ ([\w-]+)\. Over\.$", row[1]["content"])
        assert ship(row) in facts and value in facts


def test_read_texts_reads_messages_and_lines(tmp_path: Path) -> None:
    plain, chat = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo\n")
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "three"}]}) + "\n")
    assert list(read_texts([plain, chat])) == ["one", "two", "three"]
