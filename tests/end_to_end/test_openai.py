"""Fine-tuning through OpenAI's own client, on the real stack: trained, looked at, downloaded, asked, gone on with."""

import csv
import io
import json
import math
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.storage.artifacts import sha256_file
from tests.depth import drawn, one_of
from tests.end_to_end.conftest import CLIENT_FILES, TINKER_MODEL
from tests.end_to_end.stack import Stack

pytestmark = [pytest.mark.slow, one_of(CLIENT_FILES, "openai"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
VERSIONS = drawn(("openai-1", "openai-2", "openai-3"), 0, always=["openai-3"])


@pytest.fixture(scope="module")
def sessions(
    stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """One of each version, at the same time."""
    connection = stack.connection
    address = [f"{connection.api_url}/v1", connection.api_key]

    def session(version: str) -> dict[str, Any]:
        client = ROOT / ".venv" / "clients" / version
        assert client.is_dir(), "the clients are not installed: requirements/clients.sh"
        folder = tmp_path_factory.mktemp(version)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.end_to_end.openai_session", *address),
                *(str(tiny_model), str(chat_dataset), str(folder)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(client), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(len(VERSIONS)) as threads:
        return dict(zip(VERSIONS, threads.map(session, VERSIONS), strict=True))


@pytest.fixture(params=VERSIONS)
def session(request: pytest.FixtureRequest, sessions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return sessions[request.param]


def test_a_job_succeeds(session: dict[str, Any]) -> None:
    job = session["job"]
    assert job["status"] == "succeeded", job["error"]
    assert job["fine_tuned_model"] == f"quay-{session['version']}:v1"
    assert job["created_at"] <= job["finished_at"]
    assert job["trained_tokens"] > 6 * 16 * 20
    assert job["longshore"]["estimated_tokens"] == pytest.approx(job["trained_tokens"], rel=0.05)
    assert job["longshore"]["estimated_tokens"] >= job["trained_tokens"]
    assert job["hyperparameters"]["batch_size"] == 16
    assert job["fine_tuned_model"].split(":")[0] in session["models"]


def test_its_events_tell_every_step(session: dict[str, Any]) -> None:
    events = session["events"]
    steps = step_data(events)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["train_loss"] < steps[0]["train_loss"]
    assert any("full_valid_loss" in event["data"] for event in events)
    assert events[0]["message"] == "The job has successfully completed"
    assert events[-1]["message"].startswith("Created fine-tuning job")
    assert len({event["id"] for event in events}) == len(events) > 10
    times = [event["created_at"] for event in events]
    assert times == sorted(times, reverse=True)
    rows = session["metrics"].splitlines()
    assert rows[0].startswith("step,train_loss,valid_loss")
    assert float(rows[-1].split(",")[1]) == pytest.approx(steps[-1]["train_loss"])


def test_its_checkpoints_are_models(session: dict[str, Any]) -> None:
    checkpoints = session["checkpoints"]
    assert [item["step_number"] for item in checkpoints] == [6, 4, 2]
    assert checkpoints[0]["fine_tuned_model_checkpoint"] == session["job"]["fine_tuned_model"]
    assert checkpoints[1]["fine_tuned_model_checkpoint"] == f"{session['job']['id']}:step-4"
    assert checkpoints[1]["metrics"]["train_loss"] > 0


def test_its_adapter_is_downloaded(session: dict[str, Any], stack: Stack, tmp_path: Path) -> None:
    tar = Path(session["tar"]["path"])
    assert tar.stat().st_size == session["tar"]["bytes"]
    with tarfile.open(tar) as archive:
        archive.extractall(tmp_path, filter="data")
    published = Path(session["job"]["longshore"]["adapter"].removeprefix("file://"))
    [weights] = tmp_path.rglob("adapter_model.safetensors")
    assert sha256_file(weights) == sha256_file(published / "adapter_model.safetensors")


def test_it_answers_as_transformers_would(session: dict[str, Any], tiny_model: Path) -> None:
    adapter = session["job"]["longshore"]["adapter"]
    assert session["answer"] == session["streamed"] == transformers_answer(tiny_model, adapter)
    for said in map(json.loads, session["formed"]):
        assert said["crates"] in range(10) and said["port"] in ("north", "south") and len(said) == 2
    [call] = session["forced"]
    assert (call["name"], json.loads(call["arguments"])["port"] in ("north", "south")) == ("tide", True)
    assert session["earlier"] != session["answer"], "after two steps it says something else"


def test_settings_of_a_chat_do_what_they_say(session: dict[str, Any]) -> None:
    told = session["by_settings"]
    first, again = told["seeded"]
    assert first == again and first[0]["text"] != first[1]["text"], "n samples, the same by the same seed"
    assert all(logprob <= 0 for one in first for logprob in one["logprobs"])
    assert told["likeliest"][0]["text"] == session["answer"], "of one token there is no choice"
    assert len(set(told["biased"][0]["tokens"])) == 1 and len(told["biased"][0]["tokens"]) == 24
    assert len(set(told["penalized"][0]["tokens"])) > len(set(told["plain"][0]["tokens"]))
    ended = [json.loads(one["text"]) for one in told["objects"] if one["end"] == "stop"]
    assert ended and all(isinstance(one, dict) for one in ended)
    assert all(one["text"].startswith("{") for one in told["objects"])


def test_responses_say_what_chats_say(session: dict[str, Any]) -> None:
    told = session["responded"]
    assert told["text"] == told["deltas"] == told["streamed"] == session["answer"]
    assert told["status"] in (["incomplete", "max_output_tokens"], ["completed", None])
    assert told["usage"][0] == told["usage"][1] and told["usage"][0]["output_tokens"] <= 8
    assert told["numbers"] == list(range(len(told["types"])))
    opening = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert told["types"][:4] == opening
    done = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert told["types"][-4:] == [*done, f"response.{told['status'][0]}"]
    name, arguments = told["call"]
    assert name == "tide" and json.loads(arguments)["port"] in ("north", "south")
    assert told["call_types"][2:-1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert told["after"]
    (before, why), (store, _), (reference, _) = told["refusals"]
    assert (before, store, reference) == ("previous_response_id", "store", "input.0")
    assert why == "nothing is stored here: send the whole conversation as input"


def test_a_base_model_answers_by_the_name_that_the_installation_gives_it(
    session: dict[str, Any], tiny_model: Path
) -> None:
    assert session["base"] == [transformers_answer(tiny_model), TINKER_MODEL]
    assert TINKER_MODEL in session["models"]
    embeddings, batches, unknown = session["not_here"]
    assert embeddings.startswith("there is nothing at POST /v1/embeddings: of OpenAI's operations some are served")
    assert batches.startswith("there is nothing at GET /v1/batches")
    assert unknown == "there is no published model Qwen/Qwen3-9B"


def computed_model(tiny_model: Path, adapter: str | None = None) -> Any:
    """A model by transformers, with the adapter at a URI by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return PeftModel.from_pretrained(model, adapter.removeprefix("file://")) if adapter else model


def transformers_answer(tiny_model: Path, adapter: str | None = None) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": "How many crates are on quay 3?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = computed_model(tiny_model, adapter)
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_job_goes_on_from_what_another_made(sessions: dict[str, dict[str, Any]]) -> None:
    session = sessions[VERSIONS[-1]]
    job, continued = session["job"], session["continued"]
    assert continued["status"] == "succeeded", continued["error"]
    assert continued["model"] == job["fine_tuned_model"]
    assert continued["fine_tuned_model"] == f"quay-{session['version']}:v2"
    first, second = (validation_losses(events)[0] for events in (session["events"], session["continued_events"]))
    assert second < first, "what it begins with has learnt already"
    assert second == pytest.approx(validation_losses(session["events"])[-1])


def test_a_dpo_job_learns_what_is_preferred(session: dict[str, Any], tiny_model: Path) -> None:
    told = session["dpo"]
    job = told["job"]
    assert job["status"] == "succeeded", job["error"]
    assert job["id"].startswith("dpo-") and job["fine_tuned_model"] == f"crates-{session['version']}:v1"
    assert job["method"]["type"] == "dpo" and job["method"]["dpo"]["hyperparameters"]["beta"] == 0.2
    steps = step_data(told["events"])
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["train_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["train_loss"] < steps[0]["train_loss"]
    assert steps[-1]["reward_margin"] > 0
    before, after = validation_losses(told["events"])
    assert before == pytest.approx(math.log(2), abs=1e-6)
    assert after < before
    assert [float(row["train_loss"]) for row in table(told["metrics"]) if row["train_loss"]] == pytest.approx(
        [step["train_loss"] for step in steps]
    )
    assert told["answer"] == transformers_answer(tiny_model, job["longshore"]["adapter"])


def test_a_reinforcement_job_is_graded_and_answers(session: dict[str, Any], tiny_model: Path) -> None:
    told = session["reinforcement"]
    job = told["job"]
    assert job["status"] == "succeeded", job["error"]
    assert job["id"].startswith("rl-") and job["fine_tuned_model"].startswith(f"tallies-{session['version']}:v")
    assert job["method"]["reinforcement"]["grader"]["name"] == "crates"
    assert job["method"]["reinforcement"]["hyperparameters"]["eval_interval"] == 2
    assert job["trained_tokens"] > 0
    graded = [event["data"] for event in reversed(told["events"]) if "train_mean_reward" in (event["data"] or {})]
    assert [step["step"] for step in graded] == [1, 2]
    assert all(0 <= step["train_mean_reward"] <= 1 for step in graded)
    assert all(math.isfinite(step.get("grad_norm", 0.0)) for step in graded), "equal answers say nothing, and may come"
    held_out = [
        event["data"]["step"] for event in reversed(told["events"]) if "valid_mean_reward" in (event["data"] or {})
    ]
    assert held_out == [0, 2]
    assert told["events"][0]["message"] == "The job has successfully completed"
    assert any(row["train_loss"] for row in table(told["metrics"])) and "rollout_reward_mean" in told["metrics"]
    assert told["answer"] == transformers_answer(tiny_model, job["longshore"]["adapter"])


def step_data(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each optimizer step came to, oldest first."""
    return [event["data"] for event in reversed(events) if "train_loss" in (event["data"] or {})]


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def validation_losses(events: list[dict[str, Any]]) -> list[float]:
    return [e["data"]["full_valid_loss"] for e in reversed(events) if "full_valid_loss" in (e["data"] or {})]
