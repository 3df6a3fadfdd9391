"""A sweep through every process of the real system: the best is published. Through kills: test_kills.py."""

from pathlib import Path

import pytest

from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES
from tests.end_to_end.runs import weights
from tests.end_to_end.stack import Answer, Stack

pytestmark = [pytest.mark.slow, one_of(DRAWN_FILES, "sweeps")]


@pytest.fixture(scope="module")
def asked(tiny_model: Path, chat_dataset: Path) -> list[str]:
    """Three rates, of which the first learns most by far, and halving after the second of four evaluations."""
    run = ("submit", "sft", "--model", str(tiny_model), "--dataset", str(chat_dataset), "--steps", "16")
    run += ("--eval-dataset", str(chat_dataset), "--eval-every", "4", "--batch-size", "8", "--lora-rank", "4")
    grid = ("-p", "learning_rate=0.01,0.0001,0.00001", "--sampler", "grid", "--halving", "8/3", "--parallel", "3")
    return ["sweep", "create", "tides", *grid, "--json", "--wait", "--", *run, "--max-tokens", "256"]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, asked: list[str]) -> Answer:
    return stack.cli(*asked)


def test_the_best_of_a_sweep_is_published_and_the_worst_is_pruned(stack: Stack, undisturbed: Answer) -> None:
    view = undisturbed.json
    assert (view["state"], view["best"], view["metric"]) == ("succeeded", 0, "eval_loss")
    assert [trial["state"] for trial in view["trials"]] == ["succeeded", "pruned", "pruned"]
    runs = [stack.cli("get", trial["run_id"], "--json").json for trial in view["trials"]]
    assert [trial["value"] for trial in view["trials"]][:1] == [runs[0]["metrics"]["eval_loss"]]
    assert {run["epoch"] for run in runs} == {1}, "each was trained on the worker that they share"
    assert weights(view) == weights(runs[0]) and "/adapters/tides/v" in view["adapter"]
    assert "tides" in stack.cli("models", "ls").stdout
    assert view["sweep_id"] in stack.cli("sweep", "ls").stdout
