"""Runs that are resumed when bytes are not what they were: the base model's, or those of their own checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from tests.activities.groups import random_groups
from tests.depth import one_of
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import halt

pytestmark = pytest.mark.slow
CHANGED = ("the base", "the base between steps", "checkpoints")


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def interrupted(stack: Stack, options: list[str], num_checkpoints: int = 1) -> str:
    """A run that was paused when it had so many checkpoints."""
    run_id = stack.cli(*options).json["run_id"]
    wait_until(lambda: len(checkpoints(stack, run_id)) >= num_checkpoints, "checkpoints")
    halt(stack, run_id, "pause")
    assert stack.cli("watch", run_id, "--json", check=False).json["status"] == "paused"
    return run_id


def checkpoints(stack: Stack, run_id: str) -> list[Path]:
    """Folders of the checkpoints that stand, the newest last."""
    return sorted(
        path.parent for path in (stack.root / "store" / "runs" / run_id).glob("checkpoints/*/*/manifest.json")
    )


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "a-model"))


@one_of(CHANGED, "the base")
def test_a_run_is_not_resumed_on_another_base_model(
    stack: Stack, sft_options: list[str], tiny_model: Path, model: Path
):
    options = [str(model) if option == str(tiny_model) else option for option in sft_options]
    run_id = interrupted(stack, options)
    flip(model / "model.safetensors")
    stack.cli("resume", run_id)
    ended = stack.cli("watch", run_id, "--json", check=False)
    assert (ended.code, ended.json["problem"]["kind"]) == (100, "invalid_input")
    assert "not the one that the run began with: model.safetensors changed" in ended.json["problem"]["message"]


@one_of(CHANGED, "the base between steps")
def test_a_client_s_rl_run_is_not_trained_on_another_base_model_between_its_steps(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("".join(json.dumps(one) + "\n" for one in random_groups(seed=1)))
    submit = ("submit", "rl", "--json", "--model", str(model), "--max-tokens", "64", "--idle", "1")
    step = ("--wait", "--json")
    paused, going_on = (stack.cli(*submit).json["run_id"] for _ in range(2))
    for run_id in (paused, going_on):
        assert stack.cli("step", run_id, str(groups), "--key", "one", *step).json["state"] == "done"
    stack.cli("pause", paused)
    stack.cli("watch", paused, check=False)
    flip(model / "model.safetensors")
    stack.cli("step", going_on, str(groups), "--key", "two", *step, check=False)
    stack.cli("resume", paused)
    for run_id, kind in ((going_on, "corrupt_artifact"), (paused, "invalid_input")):
        ended = stack.cli("watch", run_id, "--json", check=False).json
        assert (ended["status"], ended["problem"]["kind"]) == ("failed", kind)
        assert "model.safetensors" in ended["problem"]["message"]


@one_of(CHANGED, "checkpoints")
def test_damaged_checkpoints_are_passed_over_and_the_run_says_so(
    stack: Stack, sft_options: list[str], undisturbed: Answer
) -> None:
    """The newest has a flipped byte in its weights, which a worker finds; the one before it half a manifest."""
    run_id = interrupted(stack, [*sft_options, "--keep-checkpoints", "5"], num_checkpoints=3)
    *_, before, newest = checkpoints(stack, run_id)
    flip(newest / "weights" / "adapter_model.safetensors")
    (before / "manifest.json").write_bytes((before / "manifest.json").read_bytes()[:99])
    stack.cli("resume", run_id)
    ended = stack.cli("watch", run_id, "--json", check=False)
    assert ended.json["status"] == "succeeded", ended
    assert stack.adapter_sha256(ended) == stack.adapter_sha256(undisturbed)
    of_weights, of_manifest = ended.json["notices"]
    assert "adapter_model.safetensors: the file's SHA-256 is not the manifest's; the run goes on from" in of_weights
    assert f"{before.name}/manifest.json: the file is damaged" in of_manifest
    assert of_weights in stack.cli("get", run_id).stdout
