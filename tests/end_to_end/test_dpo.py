"""Preference pairs in, a published adapter out, through every process of the real system; the same in plain PEFT."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.depth import one_of
from tests.end_to_end.runs import jsonl, pair
from tests.end_to_end.stack import Answer, Stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

VARIANTS = ("another reference", "two ranks", "every weight")  # of which a run of the suite tries one
LORA_RANK, LORA_ALPHA, BETA, LEARNING_RATE, STEPS = 4, 8.0, 0.2, 0.002, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    jsonl(folder / "train.jsonl", [pair(number) for number in range(96)])
    jsonl(folder / "held-out.jsonl", [pair(number) for number in range(200, 232)])
    return folder


def submit(stack: Stack, model: Path, dataset: Path, *more: str, check: bool = True) -> Answer:
    return stack.cli(
        *("submit", "dpo", "--wait", "--json", "--model", str(model), "--dataset", str(dataset)),
        *("--max-tokens", "256", "--lora-rank", str(LORA_RANK), "--lora-alpha", str(LORA_ALPHA), *more),
        check=check,
    )


@pytest.fixture(scope="module")
def trained(stack: Stack, tiny_model: Path, folder: Path) -> Answer:
    return submit(
        *(stack, tiny_model, folder / "train.jsonl", "--eval-dataset", str(folder / "held-out.jsonl")),
        *("--steps", "20", "--batch-size", "32", "--learning-rate", "0.005", "--samples", "1", "--name", "preferred"),
    )


def test_the_preference_is_learned_and_holds_on_held_out_pairs(stack: Stack, trained: Answer) -> None:
    told = stack.cli("metrics", trained.json["run_id"], "--json").json
    first, last = told["steps"][0]["metrics"], told["steps"][-1]["metrics"]
    assert trained.json["run_id"].startswith("dpo-") and trained.json["steps"] == 20
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["preference_accuracy"] >= 0.9 and last["reward_margin"] > 0.5 and last["loss"] < 0.5
    before, after = told["evaluations"][0], told["evaluations"][-1]
    assert before["metrics"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert after["metrics"]["preference_accuracy"] >= 0.9
    assert after["samples"][0]["prompt"].startswith("How much") and "crates" in after["samples"][0]["reference"]
    assert trained.json["metrics"]["eval_preference_accuracy"] == after["metrics"]["preference_accuracy"]


def test_the_card_names_the_objective(trained: Answer) -> None:
    card = (published(trained) / "README.md").read_text()
    assert "Direct preference optimisation (DPO) by Longshore" in card and "tags: [longshore, dpo]" in card
    assert "| beta | 0.1 |" in card and "| reference | the base model |" in card


def test_a_few_steps_are_those_of_transformers_and_peft(
    stack: Stack, tiny_model: Path, folder: Path, tmp_path: Path
) -> None:
    """From an adapter that PEFT made: first against itself, then against the base model, from which it is away."""
    import torch

    start = tmp_path / "adapter"
    make_adapter(tiny_model, start)
    data = jsonl(tmp_path / "few.jsonl", [pair(number) for number in range(8)])
    rows = [encode(tiny_model, pair(number)) for number in range(8)]
    for reference in (None, "base"):
        answer = submit(
            *(stack, tiny_model, data, "--initial-adapter", f"file://{start}", "--steps", str(STEPS)),
            *("--batch-size", "8", "--learning-rate", str(LEARNING_RATE), "--schedule", "constant"),
            *("--beta", str(BETA), "--label-smoothing", "0.1", *(("--reference", reference) if reference else ())),
        )
        ours = [step["metrics"] for step in stack.cli("metrics", answer.json["run_id"], "--json").json["steps"]]
        model = peft_model(tiny_model, start)
        theirs = plain_loop(model, rows, against_base=reference == "base")
        assert [m["loss"] for m in ours] == pytest.approx([loss for loss, _, _ in theirs], rel=1e-4)
        assert [m["grad_norm"] for m in ours] == pytest.approx([norm for _, norm, _ in theirs], rel=2e-3)
        assert [m["reward_margin"] for m in ours] == pytest.approx([m for _, _, m in theirs], rel=1e-3, abs=1e-5)
        assert (ours[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)) == (reference is None)
        after = peft_model(tiny_model, published(answer))
        with torch.no_grad():
            apart = [float(margin(after, row)) - float(margin(model, row)) for row in rows]
        assert max(map(abs, apart)) < 5e-3


@one_of(VARIANTS, "another reference")
def test_another_adapter_can_be_the_reference(stack: Stack, tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    import torch
    from torch.nn.functional import logsigmoid

    make_adapter(tiny_model, tmp_path / "adapter")
    data = jsonl(tmp_path / "few.jsonl", [pair(number) for number in range(4)])
    reference = f"file://{tmp_path}/adapter"
    answer = submit(stack, tiny_model, data, "--reference", reference, "--steps", "1", "--batch-size", "4")
    model, rows = peft_model(tiny_model, tmp_path / "adapter"), [encode(tiny_model, pair(n)) for n in range(4)]
    with torch.no_grad():
        loss = -logsigmoid(-0.1 / BETA * torch.stack([margin(model, row) for row in rows])).mean()
    assert answer.json["metrics"]["loss"] == pytest.approx(float(loss), abs=1e-5) != math.log(2)
    assert f"| reference | `{reference}` |" in (published(answer) / "README.md").read_text()


@one_of(VARIANTS, "two ranks")
def test_two_ranks_learn_and_evaluate_as_one(stack: Stack, tiny_model: Path, folder: Path) -> None:
    """Pairs dealt out over ranks, also the held-out ones, whose reference each rank scores for its own."""
    options = ["--eval-dataset", str(folder / "held-out.jsonl"), "--steps", "4", "--batch-size", "32", "--lr", "0.002"]
    runs = [submit(stack, tiny_model, folder / "train.jsonl", *options, "--dp", dp) for dp in ("1", "2")]
    one, two = (stack.cli("metrics", run.json["run_id"], "--json").json for run in runs)
    for part in ("steps", "evaluations"):
        for ours, other in zip(one[part], two[part], strict=True):
            for name in ("loss", "reward_margin", "reward_chosen", "preference_accuracy"):
                assert other["metrics"][name] == pytest.approx(ours["metrics"][name], rel=1e-4, abs=1e-5), (part, name)


@one_of(VARIANTS, "every weight")
def test_every_weight_can_be_trained(stack: Stack, tiny_model: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer = stack.cli(
        *("submit", "dpo", "--full", "--wait", "--json", "--model", str(tiny_model), "--max-tokens", "256"),
        *("--dataset", str(folder / "train.jsonl"), "--steps", "10", "--batch-size", "32", "--lr", "0.0005"),
    )
    told = [step["metrics"] for step in stack.cli("metrics", answer.json["run_id"], "--json").json["steps"]]
    assert told[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert told[-1]["preference_accuracy"] >= 0.9
    assert AutoModelForCausalLM.from_pretrained(published(answer)).config.model_type == "qwen3"


# Written again without Longshore: transformers' template and tokenizer, PEFT's adapter, the paper's equation, AdamW.


def published(answer: Answer) -> Path:
    return Path(answer.json["adapter"].removeprefix("file://"))


def make_adapter(model: Path, folder: Path) -> None:
    """An adapter that is not zero, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=LORA_RANK, lora_alpha=int(LORA_ALPHA), target_modules=linears, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    adapted.save_pretrained(folder)


def peft_model(model: Path, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model).double()
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).double().eval()


@cache
def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def encode(model: Path, row: dict[str, Any]) -> list[tuple[list[int], int]]:
    """For both answers: all ids, up to the answer's end of turn, and how many are the prompt's."""
    tokenizer, prompt = tokenizer_of(model), row["input"]["messages"]

    def ids_of(messages: list[Any], asks: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return tokenizer(text.rstrip("\n") if not asks else text, add_special_tokens=False)["input_ids"]

    asked = ids_of(prompt, True)
    found = [ids_of([*prompt, *row[field]], False) for field in ("preferred_output", "non_preferred_output")]
    assert all(ids[: len(asked)] == asked for ids in found)
    return [(ids, len(asked)) for ids in found]


def margin(model: Any, row: list[tuple[list[int], int]]) -> Any:
    """beta times how much more than the base the model prefers the chosen answer."""
    with model.disable_adapter():
        base = preference(model, row).detach()
    return BETA * (preference(model, row) - base)


def preference(model: Any, row: list[tuple[list[int], int]]) -> Any:
    """Log-probability of the chosen answer less that of the rejected one."""
    import torch

    scores = []
    for ids, asked in row:
        logits = model(torch.tensor([ids])).logits[0, asked - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[asked:])[:, None]).sum())
    return scores[0] - scores[1]


def plain_loop(model: Any, rows: list[Any], *, against_base: bool) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and mean margin of each step."""
    import torch
    from torch.nn.functional import logsigmoid

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    with torch.no_grad():
        if against_base:
            with model.disable_adapter():
                references = [preference(model, row) for row in rows]
        else:
            references = [preference(model, row) for row in rows]
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        margins = torch.stack(
            [BETA * (preference(model, row) - base) for row, base in zip(rows, references, strict=True)]
        )
        loss = (-0.9 * logsigmoid(margins) - 0.1 * logsigmoid(-margins)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item(), margins.mean().item()))
    return found
