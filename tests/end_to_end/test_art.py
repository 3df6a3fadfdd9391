"""Training through OpenPipe ART's own client, on the real stack: chats first, then groups of its answers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.dev import Connection
from shared.jobs.job import Job
from shared.jobs.packed import Units
from tests.art_clients import run_with_art
from tests.depth import one_of
from tests.end_to_end.conftest import CLIENT_FILES
from tests.end_to_end.stack import Stack

pytestmark = [pytest.mark.slow, one_of(CLIENT_FILES, "art")]


@pytest.fixture(scope="module")
def told(
    stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    connection = stack.connection
    folder = tmp_path_factory.mktemp("art")
    taught = stack.cli(
        *("submit", "sft", "--json", "--model", str(tiny_model), "--dataset", str(chat_dataset), "--full"),
        *("--steps", "24", "--batch-size", "32", "--learning-rate", "0.01", "--schedule", "constant"),
        *("--max-tokens", "128", "--wait"),
    ).json["adapter"]
    address = [connection.api_url, connection.api_key, str(tiny_model), str(chat_dataset), str(folder), taught]
    done = run_with_art("0.5.18", ["-m", "tests.end_to_end.art_session", *address], folder, 500, **wandb(connection))
    return json.loads(done.stdout.splitlines()[-1])


def wandb(connection: Connection) -> dict[str, str]:
    """Where a client's wandb package logs the artifact with the data of `train_sft`."""
    return {"WANDB_BASE_URL": f"{connection.api_url}/wandb", "WANDB_MODE": "online"}


def test_a_name_is_one_model(told: dict[str, Any]) -> None:
    assert told["id"] == told["made"]["id"]
    assert told["entity"] == "default"
    assert told["made"]["longshore"]["rank"] == 4


def test_an_untrained_model_answers_with_logprobs(told: dict[str, Any]) -> None:
    content = told["untrained"]["logprobs"]["content"]
    assert 1 <= len(content) <= 8
    assert all(token["logprob"] <= 0 for token in content)
    assert told["untrained"]["message"]["content"] != told["trained"]["message"]["content"]


def test_supervised_jobs_tell_every_step(told: dict[str, Any]) -> None:
    kinds = [event["type"] for event in told["sft"]]
    assert kinds == ["training_started", *["gradient_step"] * 64, "training_ended"]
    assert told["sft"][0]["data"]["num_sequences"] == 64
    losses = [event["data"]["loss"] for event in told["sft"][1:-1]]
    assert losses[-1] < losses[0]
    assert {event["data"]["learning_rate"] for event in told["sft"][1:-1]} == {0.02}
    assert len({event["id"] for event in told["sft"]}) == 66


def test_every_train_is_a_step_of_the_model(told: dict[str, Any]) -> None:
    assert told["steps"] == [0, 1]
    assert [result["step"] for result in told["results"]] == [2, 3, 4]
    assert told["results"][0]["artifact"] == "default/harbour/Quay Clerk:step2"
    for result in told["results"]:
        metrics = result["metrics"]
        assert {"loss/train", "loss/grad_norm", "loss/entropy", "reward", "reward_std_dev"} <= metrics.keys(), metrics
        assert metrics["loss/learning_rate"] == pytest.approx(1e-4)
        assert math.isfinite(metrics["loss/grad_norm"]), "equal answers with opposite rewards cancel, to 0 exactly"
        assert 0.4 < metrics["reward"] < 1.6
        assert 0 <= metrics["trajectory_is_short"] <= 1


def test_no_trajectory_is_lost_for_its_tokens_and_none_is_stale(told: dict[str, Any]) -> None:
    """At temperature 1 a text's own tokens are seldom those that were drawn."""
    for result in told["results"]:
        metrics = result["metrics"]
        assert (metrics["broken_trajectories"], metrics["dropped_trajectories"]) == (0, 0), metrics
        assert (metrics["trained_trajectories"], metrics["remembered_turns"]) == (12, 18)
        assert metrics["staleness_mean"] == metrics["staleness_max"] == 0


def test_the_client_s_own_train_sft_teaches_its_data(told: dict[str, Any]) -> None:
    before, after = told["learned"]["taught"]
    assert after == before + 1


def test_the_reward_of_what_can_be_learned_rises(told: dict[str, Any]) -> None:
    """Half of the answers are streamed: openai's client keeps their ids. None has logprobs, so that ids alone count."""
    steps = told["learned"]["metrics"]
    print("reward by step", [round(metrics["reward"], 3) for metrics in steps])
    for metrics in steps:
        assert (metrics["broken_trajectories"], metrics["remembered_turns"]) == (0, 32), metrics
        assert metrics["staleness_mean"] == metrics["staleness_max"] == 0
    assert min(metrics["reward"] for metrics in steps[-2:]) > steps[0]["reward"] + 0.2


def test_what_is_trained_is_what_was_drawn_to_the_bit(told: dict[str, Any], stack: Stack) -> None:
    first, second = told["runs"][1:]
    reports = [*(f"{first['run_id']} {step}" for step in (1, 2)), f"{second['run_id']} 1"]
    for drawn, report in zip(told["drawn"], reports, strict=True):
        trained = trained_sequences(stack, *report.split())
        for answer in drawn:
            row = list(zip(answer["ids"], np.float32(answer["logprobs"]), strict=True))
            assert any(row == one[k : k + len(row)] for one in trained for k in range(len(one))), answer
        assert sum(map(len, trained)) == sum(len(answer["ids"]) for answer in drawn), "and nothing else"


def trained_sequences(stack: Stack, run_id: str, step: str) -> list[list[tuple[int, np.float32]]]:
    """Labels and the sampler's logprobs of every sequence of a train step, as its worker got them."""
    jobs = (stack.root / "store" / "runs" / run_id / "logs" / f"{int(step):06d}").glob("*/job.json")
    job = Job.model_validate_json(next(jobs).read_bytes())
    with Units(Path(job.plan.data.units.uri.removeprefix("file://"))) as units:
        found: dict[tuple[int, int], list[tuple[int, np.float32]]] = {}
        for unit in range(units.header.num_units):
            table = units.read_bin([unit])
            for n in range(len(table.label_N)):
                row = int(table.label_N[n]), table.old_logprob_N[n]
                found.setdefault((unit, int(table.sequence_N[n])), []).append(row)
    return list(found.values())


def test_steps_of_one_kind_are_one_run(told: dict[str, Any]) -> None:
    sft, first, second = told["runs"]
    assert [run["kind"] for run in (sft, first, second)] == ["sft", "rl", "rl"]
    assert (first["policy_version"], first["state"]) == (2, "succeeded"), "ended by the job of other settings"
    assert (second["policy_version"], second["state"]) == (1, "running")
    assert (first["run"]["advantages"], second["run"]["advantages"]) == ("group_normalized", "group_mean")
    assert first["run"]["loss"]["kind"] == "cispo"
    assert sft["run"]["initial_adapter"] is None
    assert first["run"]["initial_adapter"] == sft["adapter"], "each goes on from what was there"
    assert second["run"]["initial_adapter"] == first["adapter"]


def test_checkpoints_are_asked_by_step_and_deleted(told: dict[str, Any]) -> None:
    assert [one["step"] for one in told["checkpoints"]] == [1, 2, 3, 4]
    assert told["checkpoints"][0]["metrics"]["loss"] > 0
    assert told["checkpoints"][3]["metrics"]["reward_mean"] == pytest.approx(told["results"][2]["metrics"]["reward"])
    assert told["first"]["message"]["content"]
    assert told["left"] == [4, 1]


def test_what_is_refused_names_the_field(told: dict[str, Any]) -> None:
    found = {case: (refusal["status"], refusal["param"]) for case, refusal in told["refusals"].items()}
    assert found == {"artifact": (400, "training_data_url"), "newest": (400, "steps")}


def test_a_failure_is_told_in_words(told: dict[str, Any]) -> None:
    assert "no trajectory can be trained" in told["failed"]


@pytest.mark.deep
def test_a_newer_client_trains_with_its_defaults_on_messages_and_on_what_it_captured(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    connection = stack.connection
    address = [connection.api_url, connection.api_key, str(tiny_model), str(tmp_path)]
    command = ["-m", "tests.end_to_end.art_newer_session", *address]
    done = run_with_art("0.5.23", command, tmp_path, 500, **wandb(connection))
    told = json.loads(done.stdout.splitlines()[-1])
    assert [result["step"] for result in told["results"]] == [1, 2]
    for result, turns in zip(told["results"], (4, 8), strict=True):
        metrics = result["metrics"]
        assert metrics["broken_trajectories"] == metrics["dropped_trajectories"] == 0, metrics
        assert (metrics["trained_trajectories"], metrics["remembered_turns"]) == (4, turns)
        assert metrics["staleness_mean"] == metrics["staleness_max"] == 0
    assert told["taught"] == 3
    assert told["token"].startswith("token_id:"), "as it asked by return_tokens_as_token_ids"
    assert "kl_penalty_coef" in told["refused"]
