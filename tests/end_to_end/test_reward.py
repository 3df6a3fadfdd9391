"""Pairs and scores in, a published reward model out, through every process; and what it cannot be."""

import math
import random
from pathlib import Path

import pytest

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack
from tests.end_to_end.test_dpo import published

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), one_of(DRAWN_FILES, "reward")]

WORDS = ("crates", "ropes", "tide", "harbour", "cargo", "sails", "anchor", "pier")


def answers(number: int) -> tuple[str, str, str]:
    """A question, and two answers of which the first has more of the letter z."""
    draw = random.Random(number)
    few, many = sorted(draw.sample(range(7), 2))
    texts = ((["z"] * count + draw.choices(WORDS, k=7 - count)) for count in (many, few))
    return f"Say {draw.choice(WORDS)} {number}.", *(" ".join(draw.sample(words, 7)) for words in texts)


def pairs(numbers: range) -> list[dict]:
    rows = [dict(zip(("prompt", "chosen", "rejected"), answers(number), strict=True)) for number in numbers]
    return [row | ({"margin": 0.5} if place % 2 else {}) for place, row in enumerate(rows)]


def scored(numbers: range) -> list[dict]:
    rows = [(prompt, answer) for prompt, *both in map(answers, numbers) for answer in both]
    return [{"prompt": p, "completion": a, "zs": a.count("z") / 7, "short": len(a) / 50} for p, a in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    for name, rows in (("pairs", pairs), ("scores", scored)):
        jsonl(folder / f"{name}.jsonl", rows(range(256)))
        jsonl(folder / f"{name}-held-out.jsonl", rows(range(1000, 1064)))
    return folder


def submit(stack: Stack, model: Path | str, folder: Path, data: str, *more: str) -> Answer:
    return stack.cli(
        *("submit", "reward", "--wait", "--json", "--model", str(model), "--dataset", str(folder / f"{data}.jsonl")),
        *("--eval-dataset", str(folder / f"{data}-held-out.jsonl"), "--max-tokens", "256", "--batch-size", "32"),
        *more,
    )


@pytest.fixture(scope="module")
def trained(stack: Stack, tiny_model: Path, folder: Path) -> Answer:
    more = ("--steps", "60", "--learning-rate", "0.01", "--center", "0.01", "--name", "more-z")
    return submit(stack, tiny_model, folder, "pairs", *more)


def rewards(model: Path, folder: Path, rows: list[tuple[str, str]], num_scalars: int, is_lora: bool) -> list:
    """The rewards that transformers computes with a published reward model, [rows, scalars]."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    load = AutoModelForSequenceClassification.from_pretrained
    found = PeftModel.from_pretrained(load(model, num_labels=num_scalars), folder) if is_lora else load(folder)
    told = []
    for prompt, answer in rows:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            told.append(found.eval()(ids).logits[0].tolist())
    return told


def test_held_out_pairs_are_told_apart_and_peft_computes_the_same(stack, trained, tiny_model, folder) -> None:
    told = stack.cli("metrics", trained.json["run_id"], "--json").json
    last = told["evaluations"][-1]["metrics"]
    assert trained.json["run_id"].startswith("reward-") and last["preference_accuracy"] >= 0.95
    assert told["evaluations"][0]["metrics"]["preference_accuracy"] < 0.8
    rows = pairs(range(1000, 1064))
    both = [(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    reward = [values[0] for values in rewards(tiny_model, published(trained), both, 1, is_lora=True)]
    leads = [one - other for one, other in zip(reward[::2], reward[1::2], strict=True)]
    assert last["preference_accuracy"] == sum(lead > 0 for lead in leads) / len(leads)
    assert last["reward_margin"] == pytest.approx(sum(leads) / len(leads), rel=1e-4)
    assert last["reward_chosen"] == pytest.approx(sum(reward[::2]) / len(leads), rel=1e-4)
    loss = [
        math.log1p(math.exp(row.get("margin", 0.0) - lead)) + 0.01 * (2 * one - lead) ** 2
        for row, lead, one in zip(rows, leads, reward[::2], strict=True)
    ]
    assert last["loss"] == pytest.approx(sum(loss) / len(loss), rel=1e-4)
    assert 0 <= last["calibration_error"] < 0.5
    card = (published(trained) / "README.md").read_text()
    assert "A reward model by Longshore" in card and "| objective | bradley_terry |" in card


def test_scores_are_learned_by_names_with_all_weights(stack, tiny_model, folder) -> None:
    fields = ("--objective", "squared_error", "--score-fields", "zs", "--score-fields", "short", "--full")
    answer = submit(stack, tiny_model, folder, "scores", *fields, "--steps", "30", "--learning-rate", "0.001")
    told = stack.cli("metrics", answer.json["run_id"], "--json").json
    before, after = (told["evaluations"][place]["metrics"]["loss"] for place in (0, -1))
    assert after < 0.5 * before
    rows = scored(range(1000, 1064))
    asked = [(row["prompt"], row["completion"]) for row in rows]
    found = rewards(tiny_model, published(answer), asked, 2, is_lora=False)
    errors = [
        (value - row[name]) ** 2
        for row, values in zip(rows, found, strict=True)
        for value, name in zip(values, ("zs", "short"), strict=True)
    ]
    assert after == pytest.approx(sum(errors) / len(errors), rel=1e-3)


def test_a_reward_model_is_no_language_model(stack, trained) -> None:
    with stack.http() as http:
        shown = http.get("/api/v1/models/more-z").json()
        assert shown["rewards"] == ["reward"] and shown["kind"] == "adapter"
        chat = {"model": "more-z", "messages": [{"role": "user", "content": "Say tide 1."}]}
        asked = http.post("/v1/chat/completions", json=chat)
    assert asked.status_code == 400 and "more-z is a reward model (1 scalar a sequence)" in asked.text


def test_a_run_goes_on_from_a_reward_model_in_its_shape(stack, trained, tiny_model, folder) -> None:
    again = submit(stack, "more-z", folder, "pairs", "--steps", "1", "--learning-rate", "1e-9")
    told = stack.cli("metrics", again.json["run_id"], "--json").json
    before = trained.json["metrics"]["eval_reward_margin"]
    assert told["evaluations"][0]["metrics"]["reward_margin"] == pytest.approx(before, rel=1e-5)


def test_labels_of_turns_are_learned_at_the_tokens_that_end_them(stack, tiny_model, folder, tmp_path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    def row(number: int) -> dict:
        prompt, *both = answers(number)
        said = [("user", prompt), ("assistant", both[number % 2]), ("user", "More."), ("assistant", both[0])]
        return {"messages": [{"role": r, "content": c} for r, c in said], "labels": [number % 2 == 0, True]}

    jsonl(tmp_path / "turns.jsonl", [row(number) for number in range(32)])
    held_out = [row(number) for number in range(1000, 1016)]
    jsonl(tmp_path / "turns-held-out.jsonl", held_out)
    fields = ("--objective", "squared_error", "--per-turn", "--steps", "20", "--learning-rate", "0.01")
    answer = submit(stack, tiny_model, tmp_path, "turns", *fields)
    told = stack.cli("metrics", answer.json["run_id"], "--json").json
    before, after = (told["evaluations"][place]["metrics"] for place in (0, -1))
    assert after["loss"] < 0.9 * before["loss"] and after["target_tokens"] == 2 * len(held_out)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    base = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=1)
    model, errors = PeftModel.from_pretrained(base, published(answer)).eval(), []
    for each in held_out:
        ids = tokenizer(tokenizer.apply_chat_template(each["messages"], tokenize=False), add_special_tokens=False)
        ids = ids["input_ids"]
        ends = [place for place, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|im_end|>")]
        with torch.no_grad():
            value_T = model(torch.tensor([ids])).logits[0, :, 0]
        errors += [(float(value_T[end]) - label) ** 2 for end, label in zip(ends[1::2], each["labels"], strict=True)]
    assert after["loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-3)
