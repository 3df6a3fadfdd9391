"""A dataset and a teacher in, a published student out, through every process of the real system."""

from pathlib import Path

import pytest

from tests.end_to_end.runs import jsonl, pair
from tests.end_to_end.stack import Answer, Stack
from tests.end_to_end.test_bad_input import assert_refused
from tests.end_to_end.test_dpo import encode, make_adapter, peft_model, published

pytestmark = pytest.mark.slow


def rows(numbers: range) -> list[dict]:
    chosen = [pair(number) for number in numbers]
    return [{"messages": [*row["input"]["messages"], *row["preferred_output"]]} for row in chosen]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    jsonl(folder / "train.jsonl", rows(range(64)))
    jsonl(folder / "held-out.jsonl", rows(range(200, 216)))
    make_adapter(tiny_model, folder / "teacher")
    return folder


def submit(stack: Stack, model: Path, folder: Path, teacher: str, *more: str, check: bool = True) -> Answer:
    return stack.cli(
        *("submit", "distill", "--wait", "--json", "--model", str(model), "--dataset", str(folder / "train.jsonl")),
        *("--eval-dataset", str(folder / "held-out.jsonl"), "--teacher", teacher, "--max-tokens", "256"),
        *("--steps", "12", "--batch-size", "16", "--learning-rate", "0.01", *more),
        check=check,
    )


def held_out_divergence(model: Path, adapter: Path, teacher: Path) -> float:
    """Return the mean KL of teacher and student over the answers' tokens, in float64."""
    import torch

    tutor, student = peft_model(model, teacher), peft_model(model, adapter)
    total = tokens = 0.0
    for number in range(200, 216):
        ids, asked = encode(model, pair(number))[0]
        with torch.no_grad():
            theirs, own = (m(torch.tensor([ids])).logits[0, asked - 1 : -1].log_softmax(1) for m in (tutor, student))
        total += float((theirs.exp() * (theirs - own)).sum())
        tokens += len(own)
    return total / tokens


def test_the_student_comes_near_its_teacher_on_held_out_rows(stack: Stack, tiny_model: Path, folder: Path) -> None:
    answer = submit(stack, tiny_model, folder, f"file://{folder}/teacher", "--samples", "1", "--name", "student")
    told = stack.cli("metrics", answer.json["run_id"], "--json").json
    before, after = (told["evaluations"][place]["metrics"]["loss"] for place in (0, -1))
    assert answer.json["run_id"].startswith("distill-") and 0 < after < 0.5 * before
    measured = held_out_divergence(tiny_model, published(answer), folder / "teacher")
    assert after == pytest.approx(measured, rel=2e-3)
    card = (published(answer) / "README.md").read_text()
    assert "Distillation by Longshore" in card and "| divergence | forward_kl |" in card

    top = submit(stack, tiny_model, folder, f"file://{folder}/teacher", "--tokens", "top_k", "--top-k", "16")
    told = stack.cli("metrics", top.json["run_id"], "--json").json
    of_top = [told["evaluations"][place]["metrics"]["loss"] for place in (0, -1)]
    assert of_top[0] <= before and of_top[1] < 0.5 * of_top[0]


def test_what_cannot_be_a_teacher_is_named(stack: Stack, tiny_model: Path, folder: Path) -> None:
    nothing_to_learn = submit(stack, tiny_model, folder, "base", check=False)
    assert_refused(nothing_to_learn, "teacher", "the student begins as the base itself")
    nowhere = submit(stack, tiny_model, folder, f"file://{folder}/nowhere", check=False)
    assert_refused(nowhere, "nowhere")
    of_all_weights = submit(stack, tiny_model, folder, f"file://{folder}/teacher", "--full", check=False)
    assert_refused(of_all_weights, "full training changes the base")
