"""Runs of several kinds on one real worker at once: each adapter is the one that its run makes alone."""

import shutil
from pathlib import Path

import pytest

from shared.jobs.job import WorkerKey, WorkerRecord
from tests.end_to_end.runs import Groups, jsonl, pair, train, weights
from tests.end_to_end.stack import Answer, Stack, wait_until

pytestmark = pytest.mark.slow


def test_runs_beside_others_end_in_the_bits_that_they_have_alone(
    stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path: Path, rl_options: list[str], groups: Groups
) -> None:
    """The stack has one GPU host, and a run that holds it throughout: only beside it can the others be trained."""
    pairs = jsonl(tmp_path / "pairs.jsonl", [pair(number) for number in range(32)])
    common = ["--model", str(tiny_model), "--batch-size", "4", "--checkpoint-every", "5"]
    sft = ["submit", "sft", "--json", "--dataset", str(chat_dataset), *common]
    dpo = ["submit", "dpo", "--json", "--dataset", str(pairs), "--max-tokens", "256", *common]
    asked = [
        [*sft, "--steps", "12", "--lora-rank", "4", "--seed", "1", "--eval-dataset", str(chat_dataset)],
        [*sft, "--steps", "12", "--lora-rank", "64", "--seed", "2"],
        [*dpo, "--steps", "12", "--lora-rank", "16", "--seed", "3"],
    ]

    def submitted(command: list[str]) -> str:
        return stack.cli(*command).json["run_id"]

    def policy_steps() -> list[bytes]:
        run_id = submitted(rl_options)
        steps = [weights(train(stack, run_id, groups, number)) for number in (1, 2)]
        stack.cli("finish", run_id)
        ended(stack, run_id)
        return steps

    holder = submitted([*sft, "--steps", "20000", "--seed", "9"])
    wait_until(lambda: stack.cli("get", holder, "--json").json["phase"] == "training", "the first run's worker")
    run_ids = [submitted(each) for each in asked]
    steps = policy_steps()
    together = [stack.adapter_sha256(ended(stack, run_id)) for run_id in run_ids]
    status = stack.cli("get", holder, "--json").json
    assert (status["status"], status["phase"], status["epoch"]) == ("running", "training", 1)
    stack.cli("cancel", holder)
    ended(stack, holder)
    assert together == [stack.adapter_sha256(ended(stack, submitted(each))) for each in asked]
    assert steps == policy_steps()


@pytest.mark.deep
def test_a_base_that_others_have_displaced_is_still_warm(
    stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path: Path, rl_options: list[str], groups: Groups
) -> None:
    """Runs of one base, another and the first again have two workers, whichever way their jobs end."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    common = ["submit", "sft", "--json", "--dataset", str(chat_dataset), "--steps", "2", "--batch-size", "4"]

    def sft(model: Path) -> str:
        return stack.adapter_sha256(ended(stack, stack.cli(*common, "--model", str(model)).json["run_id"]))

    def workers() -> set[str]:
        records = [
            WorkerRecord.model_validate_json(path.read_bytes()) for path in stack.host_paths.workers.glob("*/*.json")
        ]
        return {record.worker_id for record in records if isinstance(record.key, WorkerKey)}

    first = sft(tiny_model)
    before = workers()
    sft(other)
    both = workers()
    assert len(both - before) <= 1 and len(both) >= 2, "the first one waits beside the second"
    assert sft(tiny_model) == first
    run_id = stack.cli(*rl_options).json["run_id"]
    train(stack, run_id, groups, 1)
    stack.cli("finish", run_id)
    ended(stack, run_id)
    sft(other)
    assert workers() == both, "one left the device at its lease's end"


def ended(stack: Stack, run_id: str) -> Answer:
    stack.cli("watch", run_id, check=False)
    return stack.cli("get", run_id, "--json")
