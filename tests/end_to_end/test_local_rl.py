"""The loop without Temporal beside a server: the same run gives the same steps, metrics and weights. With experts."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from examples import demo, local_rl
from examples.tiny_model import make_tiny_model
from shared.runs.requests import RLRun, RunRecord
from shared.runs.status import StepStatus
from shared.storage.artifacts import sha256_file
from tests.conftest import CORPUS
from tests.depth import drawn
from tests.end_to_end.conftest import LETTERS
from tests.end_to_end.stack import Stack

FAMILIES = drawn(["qwen3_moe", "qwen3_5_moe"], 1)
pytestmark = [pytest.mark.slow, pytest.mark.drawn]


@pytest.fixture(scope="module", params=FAMILIES)
def record(request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run that a server has ended: experts, sampled a step ahead, with two optimizer steps a train step."""
    folder = tmp_path_factory.mktemp("prompts")
    model = make_tiny_model(folder / "model", CORPUS, family=request.param)
    for name, numbers in (("train", range(20)), ("eval", range(20, 24))):
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = stack.cli(
        *("submit", "rl", "--json", "--model", str(model), "--grader", json.dumps(LETTERS)),
        *("--prompts", f"{folder}/train.jsonl", "--eval-prompts", f"{folder}/eval.jsonl", "--eval-every", "2"),
        *("--steps", "3", "--prompts-per-step", "4", "--group-size", "4", "--max-completion-tokens", "12"),
        *("--off-policy-steps", "1", "--mini-batches", "2", "--algorithm", "grpo", "--temperature", "0.8"),
        *("--lora-rank", "4", "--learning-rate", "0.01", "--max-tokens", "64", "--seed", "7"),
        "--wait",
    )
    return RunRecord.model_validate_json((_folder(stack, answer.json["run_id"]) / "run.json").read_bytes())


def test_steps_are_the_servers(stack: Stack, record: RunRecord, tmp_path: Path) -> None:
    paths = sorted((_folder(stack, record.run_id) / "steps").iterdir())
    server = [StepStatus.model_validate_json(path.read_bytes()) for path in paths]
    assert isinstance(record.run, RLRun)
    local = list(local_rl.train(record.run, tmp_path, record.threads_per_rank))
    assert [step.step for step in local] == [0, 1, 2, 3]
    assert local[-1].metrics["staleness_max"] == 1
    for ours, theirs in zip(local, server, strict=True):
        assert ours.state == theirs.state == "done"
        assert _told(ours) == _told(theirs)
        assert ours.step == 0 or ours.metrics["probe_difference_max"] < 1e-4
    assert _weights_sha256(local[-1]) == _weights_sha256(server[-1])
    weights = load_file(_weights(local[-1]))
    trained = [name for name, weight in weights.items() if ".lora_B." in name and weight.any()]
    assert {name.split(".mlp.experts.")[1][0] for name in trained if ".mlp.experts." in name} == set("0123")


def test_the_api_tells_every_step_from_the_beginning(
    stack: Stack, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROOT", stack.root)
    told = demo.steps_of({"run_id": record.run_id})
    assert [step["step"] for step in told] == [0, 1, 2, 3]
    assert [step["step"] for step in told if "eval_reward_mean" in step["metrics"]] == [0, 2, 3]


def _folder(stack: Stack, run_id: str) -> Path:
    return stack.root / "store" / "runs" / run_id


def _told(step: StepStatus) -> dict[str, float]:
    """The metrics that do not depend on how fast or where it was done."""
    told = step.metrics.items()
    return {n: v for n, v in told if not n.startswith("sync_") and not n.endswith(("_s", "_seconds", "_bytes"))}


def _weights_sha256(step: StepStatus) -> str:
    return sha256_file(_weights(step))


def _weights(step: StepStatus) -> Path:
    assert step.adapter is not None
    return Path(step.adapter.removeprefix("file://"), "adapter_model.safetensors")
