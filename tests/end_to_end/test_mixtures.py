"""A mixture of datasets and several evaluations, through every process of the real system."""

import json
from pathlib import Path

import pytest

from longshore import local
from tests.depth import one_of
from tests.end_to_end.conftest import DRAWN_FILES
from tests.end_to_end.local_runs import files
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Stack
from tests.end_to_end.test_distillation import rows

pytestmark = [pytest.mark.slow, one_of(DRAWN_FILES, "mixtures")]


def test_a_mixture_is_trained_in_its_shares_and_each_evaluation_is_told(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    for name, numbers in (("a", range(40)), ("b", range(100, 107)), ("held", range(200, 208)), ("more", range(8))):
        jsonl(tmp_path / f"{name}.jsonl", rows(numbers))
    told = [
        *("submit", "sft", "--wait", "--json", "-m", str(tiny_model), "--lora-rank", "4", "--max-tokens", "256"),
        *(
            "-d",
            f"{tmp_path}/a.jsonl:0.75",
            "-d",
            json.dumps({"uri": f"{tmp_path}/b.jsonl", "name": "b", "weight": 0.25}),
        ),
        *("--eval", f"held={tmp_path}/held.jsonl", "--eval", f"more={tmp_path}/more.jsonl", "--eval-every", "2"),
        *("--steps", "4", "--batch-size", "8", "--keep", "best", "--best-by", "eval_held_loss"),
    ]
    answer = stack.cli(*told).json
    metrics = stack.cli("metrics", answer["run_id"], "--json").json
    steps = [row["metrics"] for row in metrics["steps"]]
    assert [(step["examples_1"], step["examples_b"]) for step in steps] == [(6, 2)] * 4
    evaluations = {row["step"]: row["metrics"] for row in metrics["evaluations"]}
    assert set(evaluations) == {0, 2, 4} and all(m["held_loss"] > 0 < m["more_loss"] for m in evaluations.values())
    assert answer["metrics"]["eval_more_loss"] == evaluations[4]["more_loss"]
    assert answer["metrics"]["best_eval_held_loss"] == min(evaluations[step]["held_loss"] for step in (2, 4))
    with stack.client() as client:
        report = client.runs.report(answer["run_id"]).dataset
        assert report is not None and [each["num_kept"] for each in report["sources"]] == [40, 7]
        run = client.runs.get(answer["run_id"]).run
        estimate = client.estimate(run)
        assert (estimate.steps, estimate.examples, estimate.is_exact) == (4, 47, False)
    card = (Path(answer["adapter"].removeprefix("file://")) / "README.md").read_text()
    assert "a.jsonl`, `" in card
    alone = local.train(run, tmp_path / "local", threads=1)
    assert files(alone.adapter) == files(answer["adapter"])
