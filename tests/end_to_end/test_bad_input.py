"""What a user sees who sent something that cannot work: place and rule, its exit code, no trace, no retry storm."""

import json
import shutil
from collections.abc import Callable
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
        ([], ["empty"]),
        ([GOOD, GOOD, '{"messages": [', GOOD], ["data.jsonl:3", "json"]),
        ([GOOD, chat(("pirate", "Arr"), ("assistant", "Yes."))], ["data.jsonl:2", "role", "pirate"]),
        ([GOOD, chat(("user", "Hello?"))], ["data.jsonl:2", "assistant"]),
        ([chat(("user", "long " * 400), ("assistant", "yes"))] * 4, ["max_tokens", "4"]),
        ([{"colour": "red"}], ["data.jsonl:1", "colour"]),
    ],
    ids=["empty", "invalid JSON", "wrong role", "no assistant turn", "all rows too long", "no known format"],
)
def test_a_dataset_that_cannot_be_used(
    stack: Stack, tiny_model: Path, tmp_path: Path, rows: list[object], words: list[str]
) -> None:
    answer = submit(stack, tiny_model, jsonl(tmp_path / "data.jsonl", rows))
    assert_refused(answer, *words)
    if answer.code == 100:  # else it was refused before there was a run
        assert stack.most_attempts(answer.json["run_id"]) == 1, "a user's mistake is not retried"


def unknown_family(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def no_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def truncated_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (unknown_family, ["mamba9", "qwen3"]),
        (no_tokenizer, ["tokenizer.json"]),
        (no_chat_template, ["chat template"]),
        (truncated_weights, ["model.safetensors"]),
        (shutil.rmtree, ["model"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_model_that_cannot_be_used(
    stack: Stack, tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    damage(model)
    assert_refused(submit(stack, model, jsonl(tmp_path / "data.jsonl", [GOOD] * 8)), *words)


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


def test_two_model_layout_rules_are_named(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "data.jsonl", [GOOD] * 8)
    assert_refused(submit(stack, tiny_model, data, "--tp", "3"), "tp=3 does not divide")


def test_an_unknown_run_has_its_own_exit_code(stack: Stack) -> None:
    for command in ("get", "watch", "events", "metrics", "checkpoints", "cancel"):
        answer = stack.cli(command, "sft-nobody", check=False)
        assert answer.code == 102, answer
        assert "sft-nobody" in answer.stderr
