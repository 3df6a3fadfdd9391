"""KTO, ORPO and SimPO from a dataset file through every process of the real system; the same in plain PEFT."""

from pathlib import Path
from typing import Any

import pytest

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES
from tests.end_to_end.runs import jsonl, pair
from tests.end_to_end.stack import Answer, Stack
from tests.end_to_end.test_dpo import encode, make_adapter, peft_model, submit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), one_of(DRAWN_FILES, "objectives")]

OBJECTIVES = ("kto", "orpo", "simpo")
BETA, GAMMA, ROWS, STEPS = 0.2, 0.4, 8, 3
OPTIONS = {
    "kto": ("--desirable-weight", "1.5", "--undesirable-weight", "0.5", "--reference", "base"),
    "orpo": (),
    "simpo": ("--gamma", str(GAMMA), "--rpo-alpha", "0.3"),
}
Encoded = tuple[list[int], int]  # all ids, and how many are the prompt's


def labelled(number: int) -> dict[str, Any]:
    """An answer in crates is good, one in sacks bad: a row of TRL's unpaired form."""
    row, is_good = pair(number), number % 2 == 0
    answer = row["preferred_output" if is_good else "non_preferred_output"]
    return {"prompt": row["input"]["messages"], "completion": answer, "label": is_good}


def rows_of(objective: str, numbers: range) -> list[dict[str, Any]]:
    return [labelled(n) if objective == "kto" else pair(n) for n in numbers]


@one_of(OBJECTIVES, "kto")
def test_kto(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    told = agrees(stack, tiny_model, tmp_path, "kto")
    held_out = told["evaluations"][-1]["metrics"]
    assert {"loss", "kl", "label_accuracy", "reward_chosen", "reward_rejected"} <= held_out.keys()
    two = metrics_of(stack, train(stack, tiny_model, tmp_path, "kto", "--dp", "2"))
    for part in ("steps", "evaluations"):
        for ours, other in zip(told[part], two[part], strict=True):
            for name in ("loss", "kl", "label_accuracy"):
                assert other["metrics"][name] == pytest.approx(ours["metrics"][name], rel=1e-4, abs=1e-5), (part, name)


@one_of(OBJECTIVES, "orpo")
def test_orpo(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    agrees(stack, tiny_model, tmp_path, "orpo")


@one_of(OBJECTIVES, "simpo")
def test_simpo(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    told = agrees(stack, tiny_model, tmp_path, "simpo")
    assert {"loss", "nll_chosen", "preference_accuracy"} <= told["evaluations"][-1]["metrics"].keys()


def start(stack: Stack, model: Path, data: Path, objective: str, *more: str) -> Answer:
    return submit(
        *(stack, model, data, "--objective", objective, "--steps", str(STEPS), "--batch-size", str(ROWS)),
        *("--beta", str(BETA), "--learning-rate", "0.002", "--schedule", "constant", *OPTIONS[objective], *more),
    )


def train(stack: Stack, model: Path, folder: Path, objective: str, *more: str) -> Answer:
    """From an adapter that PEFT made, with all rows in each step."""
    if not (folder / "adapter").exists():
        make_adapter(model, folder / "adapter")
    data = jsonl(folder / f"{objective}.jsonl", rows_of(objective, range(ROWS)))
    held_out = jsonl(folder / f"held-out-{objective}.jsonl", rows_of(objective, range(200, 206)))
    adapter = ("--initial-adapter", f"file://{folder}/adapter", "--eval-dataset", str(held_out))
    return start(stack, model, data, objective, *adapter, *more)


def metrics_of(stack: Stack, answer: Answer) -> Any:
    return stack.cli("metrics", answer.json["run_id"], "--json").json


def agrees(stack: Stack, model: Path, folder: Path, objective: str) -> Any:
    """Train, and hold the steps and the last evaluation against PEFT's in float64. Returns the run's metrics."""
    import torch

    told = metrics_of(stack, train(stack, model, folder, objective))
    adapted = peft_model(model, folder / "adapter")
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.002, weight_decay=0.0)
    numbers, held_out = range(ROWS), range(200, 206)
    for step in told["steps"]:
        optimizer.zero_grad()
        loss = loss_of(adapted, model, objective, numbers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        ours = step["metrics"]
        assert ours["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(norm.item(), rel=2e-3)
    with torch.no_grad():
        after = loss_of(adapted, model, objective, held_out).item()
    assert told["evaluations"][-1]["metrics"]["loss"] == pytest.approx(after, rel=1e-4)
    assert told["steps"][-1]["metrics"]["loss"] < told["steps"][0]["metrics"]["loss"]
    return told


# Written again without Longshore: the papers' equations.


def logprobs(model: Any, row: Encoded) -> Any:
    """Log-probabilities of an answer's tokens."""
    import torch

    ids, asked = row
    logits = model(torch.tensor([ids])).logits[0, asked - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[asked:])[:, None])[:, 0]


def loss_of(model: Any, folder: Path, objective: str, numbers: range) -> Any:
    import torch
    from torch.nn.functional import logsigmoid

    encoded = [encode(folder, pair(n)) for n in numbers]
    if objective == "kto":
        return kto(model, [both[n % 2] for both, n in zip(encoded, numbers, strict=True)], numbers)
    losses = []
    for both in encoded:
        chosen, rejected = (logprobs(model, row).mean() for row in both)
        if objective == "simpo":
            losses.append(-logsigmoid(BETA * chosen - BETA * rejected - GAMMA) - 0.3 * chosen)
        else:
            odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen, rejected)]
            losses.append(-chosen - BETA * logsigmoid(odds[0] - odds[1]))
    return torch.stack(losses).mean()


def kto(model: Any, rows: list[Encoded], numbers: range) -> Any:
    """Each prompt's other answer is that of the row before it."""
    import torch

    def ratio(row: Encoded) -> Any:
        with torch.no_grad(), model.disable_adapter():
            base = logprobs(model, row).sum()
        return logprobs(model, row).sum() - base

    with torch.no_grad():
        others = [([*ids[:n], *rows[k - 1][0][rows[k - 1][1] :]], n) for k, (ids, n) in enumerate(rows)]
        baseline = torch.stack([ratio(row) for row in others]).mean().clamp(min=0)
    losses = [
        1.5 * (1 - torch.sigmoid(BETA * (ratio(row) - baseline)))
        if number % 2 == 0
        else 0.5 * (1 - torch.sigmoid(BETA * (baseline - ratio(row))))
        for row, number in zip(rows, numbers, strict=True)
    ]
    return torch.stack(losses).mean()
