"""A dataset and a teacher in, a published student out, through every process of the real system."""

import json
from pathlib import Path

import pytest

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES, QUICK
from tests.end_to_end.runs import jsonl, pair
from tests.end_to_end.stack import Answer, Stack, started
from tests.end_to_end.test_dpo import encode, make_adapter, peft_model, published
from tests.megatron_worker.sampler_process import NAME, running

pytestmark = [pytest.mark.slow, one_of(DRAWN_FILES, "distillation")]


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


def submit(stack: Stack, model: Path, folder: Path, teacher: str, *more: str) -> Answer:
    return stack.cli(
        *("submit", "distill", "--wait", "--json", "--model", str(model), "--dataset", str(folder / "train.jsonl")),
        *("--eval-dataset", str(folder / "held-out.jsonl"), "--teacher", teacher, "--max-tokens", "256"),
        *("--steps", "12", "--batch-size", "16", "--learning-rate", "0.01", *more),
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


def test_rows_name_their_teachers(stack: Stack, tiny_model: Path, folder: Path) -> None:
    """Half of the rows name the teacher, and half the base, which the student is already: its loss is half as great."""
    for name in ("train", "held-out"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        jsonl(
            folder / f"{name}-named.jsonl", [row | {"teacher": "far"} if i % 2 else row for i, row in enumerate(lines)]
        )
        jsonl(folder / f"{name}-far.jsonl", [row for i, row in enumerate(lines) if i % 2])
    found = {}
    for rows_of, more in (("far", ()), ("named", ("--teachers", json.dumps({"far": "base"})))):
        fields = ("--dataset", str(folder / f"train-{rows_of}.jsonl"), "--tokens", "drawn", "--samples", "0")
        held_out = ("--eval-dataset", str(folder / f"held-out-{rows_of}.jsonl"), "--steps", "2")
        answer = submit(stack, tiny_model, folder, f"file://{folder}/teacher", *fields, *held_out, *more)
        told = stack.cli("metrics", answer.json["run_id"], "--json").json
        found[rows_of] = told["evaluations"][0]["metrics"]["loss"]
    card = (published(answer) / "README.md").read_text()
    assert "| teacher far | the base model |" in card
    assert 0 < found["named"] < 0.8 * found["far"]


def test_a_student_is_taught_on_what_it_draws_without_a_grader(
    stack: Stack, tiny_model: Path, folder: Path, tmp_path: Path
) -> None:
    """The adapter is the student here, and the base its teacher. Few drawn tokens alone say little of a divergence."""
    prompts = jsonl(tmp_path / "prompts.jsonl", [row["input"] for row in map(pair, range(8))])
    for algorithm, measure in (("gkd", "loss"), ("distill", "kl_reference")):
        answer = stack.cli(
            *("submit", "rl", "--wait", "--json", "--model", str(tiny_model), "--prompts", str(prompts)),
            *("--initial-adapter", f"file://{folder}/teacher", "--lora-rank", "4", "--lora-alpha", "8"),
            *("--algorithm", algorithm, "--steps", "3", "--prompts-per-step", "8", "--group-size", "2"),
            *("--max-completion-tokens", "8", "--max-tokens", "256", "--learning-rate", "0.01"),
        )
        steps = stack.cli("steps", answer.json["run_id"], "--json").json
        assert [step["state"] for step in steps] == ["done"] * 3, steps
        found = [step["metrics"][measure] for step in steps]
        assert min(found) > 0 and steps[0]["metrics"]["grad_norm"] > 0, (algorithm, found)
        assert algorithm == "distill" or found[-1] < found[0], found


def test_a_model_that_a_server_tells_of_teaches_as_one_on_the_worker(
    tiny_model: Path, folder: Path, tmp_path: Path
) -> None:
    options = ["--initial-adapter", f"file://{folder}/teacher", "--lora-rank", "4", "--lora-alpha", "8"]
    options += ["--tokens", "top_k", "--top-k", "16"]
    with running(tiny_model, tmp_path) as ready:
        url = f"{ready.url}/v1"
        keys = {"tutor": {"url": url, "key": ready.api_key}}
        settings = {"LONGSHORE_GRADING__SERVER_KEYS": json.dumps(keys)}
        with started(tmp_path / "stack", **QUICK, **settings) as stack:
            by_url = submit(stack, tiny_model, folder, url, "--teacher-model", NAME, "--teacher-key", "tutor", *options)
            by_slot = submit(stack, tiny_model, folder, "base", *options)
            ours, theirs = (stack.cli("metrics", x.json["run_id"], "--json").json for x in (by_url, by_slot))
            for one, other in zip(ours["evaluations"], theirs["evaluations"], strict=True):
                assert one["metrics"]["loss"] == pytest.approx(other["metrics"]["loss"], abs=1e-5)
            assert ours["evaluations"][-1]["metrics"]["loss"] < 0.5 * ours["evaluations"][0]["metrics"]["loss"]
        files = [path for path in (tmp_path / "stack").rglob("*") if path.is_file() and not path.is_symlink()]
        assert len(files) > 50 and not [path for path in files if ready.api_key.encode() in path.read_bytes()]
