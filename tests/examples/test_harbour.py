"""The example datasets: what the demonstration claims of them."""

import json
import re
from pathlib import Path

import pytest

from examples.harbour import write_datasets
from examples.tiny_model import read_texts

DATA = Path(__file__).parents[2] / "examples" / "data"


def rows(name: str) -> list[list[dict[str, str]]]:
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
    train, evaluation = rows(f"{name}_train"), rows(f"{name}_eval")
    assert len(evaluation) > 100
    questions = {row[0]["content"] for row in train}
    assert not [row for row in evaluation if row[0]["content"] in questions]


def test_answers_of_the_harbour_are_consistent() -> None:
    """A question has one answer, in both splits; every held-out answer is taught under another wording."""
    answers: dict[str, set[str]] = {}
    for row in rows("harbour_train") + rows("harbour_eval"):
        answers.setdefault(row[0]["content"], set()).add(row[1]["content"])
    assert all(len(found) == 1 for found in answers.values())
    taught = {row[1]["content"] for row in rows("harbour_train")}
    assert {row[1]["content"] for row in rows("harbour_eval")} <= taught


def test_radio_asks_held_out_ships_for_what_the_harbour_taught() -> None:
    ships_trained = {ship(row) for row in rows("radio_train")}
    held_out = rows("radio_eval")
    assert not ships_trained & {ship(row) for row in held_out}
    facts = " ".join(row[1]["content"] for row in rows("harbour_train"))
    for row in held_out:
        [value] = re.findall(r", \w+ ([\w-]+)\. Over\.$", row[1]["content"])
        assert ship(row) in facts and value in facts


def test_read_texts_reads_messages_and_lines(tmp_path: Path) -> None:
    plain, chat = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo\n")
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "three"}]}) + "\n")
    assert list(read_texts([plain, chat])) == ["one", "two", "three"]
