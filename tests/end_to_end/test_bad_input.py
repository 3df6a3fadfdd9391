"""What a user sees who sent something that cannot work, or resumed a run whose inputs have changed since."""

import json
import shutil
from pathlib import Path

import pytest

from tests.activities.groups import random_groups
from tests.depth import one_of
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import halt

pytestmark = pytest.mark.slow


def submit(stack: Stack, model: Path | str, dataset: Path | str, *more: str) -> Answer:
    return stack.cli(
        *("submit", "sft", "--wait", "--json", "--model", str(model), "--dataset", str(dataset)),
        *("--max-tokens", "128", *(more if "--steps" in more else ("--steps", "2", "--batch-size", "4", *more))),
        check=False,
    )


def assert_refused(answer: Answer, *words: str) -> None:
    said = answer.stdout + answer.stderr
    assert answer.code in (2, 100), answer
    assert "Traceback" not in said
    for word in words:
        assert word.lower() in said.lower(), (word, said)


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(*turns: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = chat(("user", "How many crates?"), ("assistant", "Seven."))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, GOOD, '{"messages": [', GOOD], ["data.jsonl:3", "json"]),
        ([chat(("user", "long " * 400), ("assistant", "yes"))] * 4, ["max_tokens", "4"]),
    ],
    ids=["invalid JSON", "all rows too long"],
)
def test_a_dataset_that_cannot_be_used(
    stack: Stack, tiny_model: Path, tmp_path: Path, rows: list[object], words: list[str]
) -> None:
    """Each rule on rows is tested where rows are read (tests/activities/formats, tests/activities/tokenizing)."""
    answer = submit(stack, tiny_model, jsonl(tmp_path / "data.jsonl", rows))
    assert_refused(answer, *words)
    if answer.code == 100:  # else it was refused before there was a run
        assert stack.most_attempts(answer.json["run_id"]) == 1, "a user's mistake is not retried"


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    """One row whose weight overflows, which seed 3 puts into a later step."""
    poison = chat(("user", "How many crates?"), ("assistant", "Seven."))
    poison["messages"][1]["weight"] = 3e38  # type: ignore[index]
    data = jsonl(tmp_path / "data.jsonl", [GOOD] * 63 + [poison])
    answer = submit(
        stack, tiny_model, data, "--steps", "8", "--batch-size", "8", "--checkpoint-every", "1", "--seed", "3"
    )
    assert_refused(answer, "the loss is", "learning rate", "broken rows")
    checkpoints = stack.cli("checkpoints", answer.json["run_id"], "--json").json
    assert checkpoints[-1]["step"] == answer.json["steps"] > 0, "the last good checkpoint stays"


CHANGED = ("the base", "checkpoints")


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
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "a-model"))


@one_of(CHANGED, "the base")
def test_a_client_s_rl_run_is_not_trained_on_another_base_model_between_its_steps(
    stack: Stack, own_model: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("".join(json.dumps(one) + "\n" for one in random_groups(seed=1)))
    submit = ("submit", "rl", "--json", "--model", str(own_model), "--max-tokens", "64", "--idle", "1")
    step = ("--wait", "--json")
    paused, going_on = (stack.cli(*submit).json["run_id"] for _ in range(2))
    for run_id in (paused, going_on):
        assert stack.cli("step", run_id, str(groups), "--key", "one", *step).json["state"] == "done"
    stack.cli("pause", paused)
    stack.cli("watch", paused, check=False)
    flip(own_model / "model.safetensors")
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
