"""What a user sees who sent something that cannot work: place and rule, its exit code, no trace, no retry storm."""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.stack import Answer, Stack

pytestmark = pytest.mark.slow


def submit(stack: Stack, model: Path | str, dataset: Path | str, *more: str) -> Answer:
    return stack.cli(
        *("submit", "sft", "--wait", "--json", "--model", str(model), "--dataset", str(dataset)),
        *("--max-tokens", "128", *(more if "--steps" in more else ("--steps", "2", "--batch-size", "4", *more))),
        check=False,
    )


def assert_refused(answer: Answer, *words: str) -> None:
    said = answer.stdout + answer.stderr
    assert answer.code in (2, 100), answer
    assert "Traceback" not in said
    for word in words:
        assert word.lower() in said.lower(), (word, said)


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(*turns: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = chat(("user", "How many crates?"), ("assistant", "Seven."))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, GOOD, '{"messages": [', GOOD], ["data.jsonl:3", "json"]),
        ([chat(("user", "long " * 400), ("assistant", "yes"))] * 4, ["max_tokens", "4"]),
    ],
    ids=["invalid JSON", "all rows too long"],
)
def test_a_dataset_that_cannot_be_used(
    stack: Stack, tiny_model: Path, tmp_path: Path, rows: list[object], words: list[str]
) -> None:
    """Each rule on rows is tested where rows are read (tests/activities/formats, tests/activities/tokenizing)."""
    answer = submit(stack, tiny_model, jsonl(tmp_path / "data.jsonl", rows))
    assert_refused(answer, *words)
    if answer.code == 100:  # else it was refused before there was a run
        assert stack.most_attempts(answer.json["run_id"]) == 1, "a user's mistake is not retried"


def test_a_model_that_cannot_be_used(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    """Each rule on models: tests/activities/models/test_resolve_model.py."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(submit(stack, model, jsonl(tmp_path / "data.jsonl", [GOOD] * 8)), "model.safetensors")


def test_an_adapter_that_is_missing_or_corrupted(
    stack: Stack, tiny_model: Path, undisturbed: Answer, tmp_path: Path
) -> None:
    data = jsonl(tmp_path / "data.jsonl", [GOOD] * 8)
    assert_refused(
        submit(stack, tiny_model, data, "--initial-adapter", f"file://{tmp_path}/nowhere"), "nowhere", "adapter"
    )
    damaged = tmp_path / "adapter"
    shutil.copytree(undisturbed.json["adapter"].removeprefix("file://"), damaged)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    assert_refused(
        submit(stack, tiny_model, data, "--lora-rank", "4", "--initial-adapter", f"file://{damaged}"),
        "adapter_model.safetensors",
    )


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    """One row whose weight overflows, which seed 3 puts into a later step."""
    poison = chat(("user", "How many crates?"), ("assistant", "Seven."))
    poison["messages"][1]["weight"] = 3e38  # type: ignore[index]
    data = jsonl(tmp_path / "data.jsonl", [GOOD] * 63 + [poison])
    answer = submit(
        stack, tiny_model, data, "--steps", "8", "--batch-size", "8", "--checkpoint-every", "1", "--seed", "3"
    )
    assert_refused(answer, "the loss is", "learning rate", "broken rows")
    checkpoints = stack.cli("checkpoints", answer.json["run_id"], "--json").json
    assert checkpoints[-1]["step"] == answer.json["steps"] > 0, "the last good checkpoint stays"
