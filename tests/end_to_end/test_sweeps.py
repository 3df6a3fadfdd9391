"""A sweep through every process of the real system: the best is published; whoever is killed, it ends alike."""

from pathlib import Path

import pytest

from tests.depth import drawn, one_of
from tests.end_to_end.conftest import DRAWN_FILES
from tests.end_to_end.runs import weights
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import Victim, a_rank, control_host, gpu_host, kill, temporal_server, web_service

pytestmark = [pytest.mark.slow, one_of(DRAWN_FILES, "sweeps")]
VICTIMS = (a_rank, control_host, gpu_host, temporal_server, web_service)


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


def outcome(view: dict) -> list[tuple]:
    return [(t["number"], t["values"], t["state"], t["value"]) for t in view["trials"]]


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


@pytest.mark.parametrize("victim", drawn(VICTIMS, 1), ids=lambda victim: victim.__name__)
def test_a_kill_changes_nothing(stack: Stack, asked: list[str], undisturbed: Answer, victim: Victim) -> None:
    again = [each for each in asked if each not in ("--wait", "--json")]
    sweep_id = stack.cli(*again).stdout.strip()
    shown = ("sweep", "show", sweep_id, "--json")
    wait_until(lambda: any(t["step"] for t in stack.cli(*shown, check=False).json["trials"]), "a trial has begun")
    kill(stack, victim)

    def ended() -> dict | None:
        answer = stack.cli(*shown, check=False)
        return answer.json if answer.code == 0 and answer.json["state"] != "running" else None

    view = wait_until(ended, "the sweep's end")
    assert outcome(view) == outcome(undisturbed.json)
    assert view["version"] > undisturbed.json["version"]
    assert weights(view) == weights(undisturbed.json)
