"""The demonstration's commands and its page, without the minutes of its runs (tests/end_to_end has real runs)."""

import io

import pytest
import typer
from rich.console import Console

from examples import demo
from service.cli.main import app


@pytest.mark.parametrize("options", [demo.BASE_RUN, demo.RADIO_RUN])
def test_options_are_those_of_the_command(options: list[str]) -> None:
    from service.cli.commands.submit import checked_run  # the command's own check, before anything is sent
    from service.cli.run_options import given, options_of
    from shared.runs.dataset_runs import SFTRun

    command = typer.main.get_command(app).get_command(None, "submit").commands["sft"]  # type: ignore[attr-defined]
    context = command.make_context("sft", ["--model", "org/m", "--dataset", "d", "--eval-dataset", "e", *options])
    values = given(context)
    assert (context.params["full"], values.get("lora_rank")) in ((True, None), (False, 16))
    run = checked_run("sft", options_of(SFTRun), values)
    assert run.num_samples >= demo.NUM_SHOWN


def test_change_shows_the_first_and_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(step: int, loss: float, completion: str) -> dict:
        prompt = "<|im_start|>user\nWhat does the Iris carry?<|im_end|>\n<|im_start|>assistant\n"
        sample = {"prompt": prompt, "completion": completion, "reference": "The Iris carries wool."}
        return {"event": "evaluated", "step": step, "metrics": {"loss": loss}, "samples": [sample]}

    page = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=page, width=120))
    demo.show_change(
        [evaluated(0, 7.0, "aaa"), {"event": "step"}, evaluated(5, 3.0, "bbb"), evaluated(9, 0.25, "wool!")]
    )
    text = page.getvalue()
    assert "7.000 before, 0.250 after 9 steps" in text
    assert "What does the Iris carry?" in text and "aaa" in text and "wool!" in text and "im_start" not in text
    assert "bbb" not in text


def test_rewards_show_both_shares_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=page, width=120))
    demo.show_rewards(
        [
            {"step": 0, "metrics": {"eval_reward_mean": 0.005}},
            {"step": 1, "metrics": {"reward_mean": 0.25}},
            {"step": 2, "metrics": {"reward_mean": 0.5, "eval_reward_mean": 0.9375}},
        ]
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in page.getvalue().splitlines() if "%" in line]
    assert rows == [["0", "", "0.5%"], ["1", "25.0%", ""], ["2", "50.0%", "93.8%"]]
