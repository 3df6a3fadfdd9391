"""Agents that are trained through addresses of their own, on the real stack: what they drew is what is trained."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.chat.trajectories import AnswerRecord
from tests.depth import drawn
from tests.end_to_end.conftest import TINKER_MODEL
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import (
    Victim,
    control_host,
    kill,
    sampler,
    sampler_host,
    temporal_server,
    web_service,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CLIENTS = [ROOT / ".venv" / "clients" / name for name in ("openai-3", "anthropic-2")]


@pytest.fixture
def api(stack: Stack) -> httpx.Client:
    headers = {"authorization": f"Bearer {stack.connection.api_key}"}
    return httpx.Client(base_url=f"{stack.connection.api_url}/api/v1", headers=headers, timeout=300)


def begun(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    asked = {"model": TINKER_MODEL, "sampling": {"temperature": 1.0, "max_tokens": 12}} | fields
    return api.post("/episodes", json=asked).raise_for_status().json()


def agent(address: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.agent_session", address, TINKER_MODEL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*CLIENTS, ROOT]))},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def records(stack: Stack, *answer_ids: str) -> list[AnswerRecord]:
    """What the store has of answers."""
    found = [next((stack.root / "store" / "answers").rglob(f"{answer_id}.json")) for answer_id in answer_ids]
    return [AnswerRecord.model_validate_json(path.read_bytes()) for path in found]


def test_what_agents_drew_is_what_is_trained(stack: Stack, api: httpx.Client, tmp_path: Path, tiny_model: Path) -> None:
    episodes = [begun(api, seed=seed) for seed in (1, 1, 2, 3)]
    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(agent, [episode["url"] for episode in episodes]))
    for one in told:
        assert one["is_same"], "the same question has the same answer"
        assert one["counted"] == one["titled"]["usage"]["input_tokens"] and one["responded"]
    texts = [one["first"]["choices"][0]["message"]["content"] for one in told]
    assert texts[0] == texts[1] != texts[2], "an episode's seed draws the same; the agent's temperature of 0 does not"

    ended = [api.post(f"/episodes/{episode['episode_id']}/end").raise_for_status().json() for episode in episodes]
    end = {"num_turns": 3, "num_side_turns": 1, "num_later_turns": 1, "num_continuing": 1}
    assert [one["end"] for one in ended] == [end] * 4
    run_id = (
        api.post(
            "/runs/rl",
            json={
                "model": str(tiny_model),
                "trainable": {"kind": "lora", "rank": 4},
                "max_tokens": 256,
                "learning_rate": 0.01,
                "broken": "refuse",
            },
        )
        .raise_for_status()
        .json()["run_id"]
    )
    trajectories = [{"episode": one["episode_id"], "reward": float(n)} for n, one in enumerate(episodes)]
    groups = tmp_path / "groups.jsonl"
    groups.write_text(json.dumps({"trajectories": trajectories}) + "\n")
    step = stack.cli("step", run_id, str(groups), "--wait", "--json").json
    stack.cli("finish", run_id)
    assert step["state"] == "done", step

    ends = [stack.root / "store" / "episodes" / "default" / one["episode_id"] / "end.json" for one in episodes]
    counted = [json.loads(path.read_bytes())["answer_ids"] for path in ends]
    for one, ids in zip(told, counted, strict=True):
        assert ids[:2] == [one["first"]["id"], one["streamed"][0]]
    answers = [record for ids in counted for record in records(stack, *ids)]
    assert step["metrics"]["response_tokens"] == sum(len(record.choices[0].token_ids) for record in answers)
    assert step["metrics"]["remembered_turns"] == len(answers) == 12
    assert step["metrics"]["episode_branches"] == 8, "two turns, the second on the first one's ids; and the response"
    for first, second in zip(answers[::3], answers[1::3], strict=True):
        before = first.prompt_ids + first.choices[0].token_ids
        assert second.prompt_ids[: len(before)] == before


PROGRAM = """
import json, os, urllib.request
def ask(path, body):
    request = urllib.request.Request(path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": "How many?"}]
model = os.environ["OPENAI_MODEL"]
ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": model, "messages": messages})
told = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", {"model": model, "max_tokens": 4, "messages": messages})
print("said", told["type"])
raise SystemExit(3)
"""


def test_a_program_is_run_as_an_agent(stack: Stack, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    command = ("episode", "run", TINKER_MODEL, "--max-tokens", "8", "--json", "--", sys.executable, str(program))
    ran = stack.cli(*command, check=False)
    assert (ran.code, ran.json["state"], ran.json["end"]["num_turns"]) == (3, "ended", 2)
    assert "said message" in ran.stderr
    shown = stack.cli("episode", "show", ran.json["episode_id"]).stdout
    assert shown.count("user: How many?") == 2 and "--- turn 2: 4 tokens, length" in shown
    assert ran.json["episode_id"] in stack.cli("episode", "ls").stdout
    missing = stack.cli("episode", "run", TINKER_MODEL, "--", "/nowhere/agent", check=False)
    assert missing.code == 100 and "/nowhere/agent: No such file" in missing.stderr


def test_the_example_trains_and_goes_on_where_it_was(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "examples/agent.py", "--model", str(tiny_model), "--policy", TINKER_MODEL]
    command += ["--questions", str(questions), "--tasks-per-step", "2", "--group-size", "2", "--mini-batches", "1"]
    command += ["--max-completion-tokens", "4", "--steps", "2"]
    options: dict[str, Any] = {"env": {**os.environ, "LONGSHORE_ROOT": str(stack.root)}, "cwd": ROOT, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as killed:
        assert killed.stdout is not None
        first = json.loads(killed.stdout.readline())
        killed.kill()
    done = subprocess.run(command, capture_output=True, timeout=400, check=True, **options)
    [second] = map(json.loads, done.stdout.splitlines())
    assert (first["step"], second["step"]) == (1, 2)
    assert {first["state"], second["state"]} <= {"done", "skipped"}


def played(address: str, begun: threading.Event) -> list[str]:
    """An agent of six turns that asks until it is answered, as clients do. Returns the answers' texts."""
    messages, answers = [{"role": "user", "content": "How many crates are on quay 3?"}], list[str]()
    while len(answers) < 6:
        begun.set() if answers else None
        question = {"model": TINKER_MODEL, "messages": messages, "stream": len(answers) % 2 == 1}
        try:
            answer = httpx.post(f"{address}/v1/chat/completions", json=question, timeout=120)
            if answer.status_code != 200:
                time.sleep(0.2)
                continue
            answers.append(text_of(answer))
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"And {len(answers)}?"}]
    return answers


def text_of(answer: httpx.Response) -> str:
    """The text of an answer. Raises TransportError: its stream did not end."""
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    if events[-1] != "[DONE]" or "error" in events[-2]:
        raise httpx.ReadError("the stream broke off")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("victim", drawn([web_service, sampler_host, sampler, control_host, temporal_server], 2))
def test_an_episode_goes_on_through_a_kill_to_the_bit(stack: Stack, api: httpx.Client, victim: Victim) -> None:
    undisturbed, disturbed = (begun(api, seed=9, sampling={"max_tokens": 40}) for _ in range(2))
    expected = played(undisturbed["url"], threading.Event())
    with ThreadPoolExecutor(1) as thread:
        has_begun = threading.Event()
        playing = thread.submit(played, disturbed["url"], has_begun)
        assert has_begun.wait(120)
        kill(stack, victim)
        assert playing.result(300) == expected
    ended = []
    for episode in (undisturbed, disturbed):
        wait_until(lambda: api.post(f"/episodes/{episode['episode_id']}/end").status_code == 200, "its end")  # noqa: B023
        ended.append(api.get(f"/episodes/{episode['episode_id']}").json()["end"])
    assert ended[0] == ended[1] and ended[0]["num_turns"] == 6
    paths = [stack.root / "store" / "episodes" / "default" / one["episode_id"] for one in (undisturbed, disturbed)]
    ids = [json.loads((path / "end.json").read_bytes())["answer_ids"] for path in paths]
    drawn_ids = [[record.choices[0].token_ids for record in records(stack, *each)] for each in ids]
    assert drawn_ids[0] == drawn_ids[1]


def test_an_answer_has_the_room_that_is_left(api: httpx.Client) -> None:
    episode = begun(api, sampling={"max_tokens": 100_000})
    with httpx.Client(base_url=episode["url"], timeout=300) as asking:

        def asked(length: int, path: str, **more: Any) -> httpx.Response:
            messages = [{"role": "user", "content": "z" * length}]
            return asking.post(path, json={"model": TINKER_MODEL, "messages": messages} | more)

        counted = asked(1000, "/v1/messages/count_tokens").json()["input_tokens"]
        told = asked(1000 + 4090 - counted, "/v1/chat/completions", max_tokens=50).raise_for_status().json()
        assert told["usage"]["total_tokens"] <= 4096 and told["usage"]["prompt_tokens"] == 4090
        full = asked(5000, "/v1/chat/completions")
        assert full.status_code == 400 and "do not fit into 4096 tokens" in full.text


def test_an_address_is_good_for_its_episode_alone(stack: Stack, api: httpx.Client) -> None:
    episode = begun(api, max_turns=2)
    question = {"model": TINKER_MODEL, "messages": [{"role": "user", "content": "Hm?"}]}
    with httpx.Client(base_url=episode["url"], timeout=300) as asking:
        answers = [asking.post("/v1/chat/completions", json=question | {"user": str(n)}) for n in range(2)]
        assert answers[0].json() == answers[1].json(), "a label of the client's makes no other question"
        other = [question | {"messages": [{"role": "user", "content": said}]} for said in "ab"]
        assert [asking.post("/v1/chat/completions", json=one).status_code for one in other] == [200, 400]
        assert asking.post("/v1/chat/completions", json=question | {"n": 2}).status_code == 400
        for path in ("/v1/files", "/v1/models", "/api/v1/runs", "/v1/messages/batches", "/login"):
            assert asking.get(path).status_code in (401, 404)
            assert asking.post(path, json={}).status_code in (401, 404)
    forged = (episode["url"][:-1] + "-", episode["url"].replace("ep-", "ep-0", 1)[:-1])
    for url in forged:
        assert httpx.post(f"{url}/v1/chat/completions", json=question).status_code in (401, 404)
    secret = episode["url"].rpartition("~")[2]
    assert (
        httpx.get(f"{stack.connection.api_url}/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code
        == 401
    )
    assert api.post(f"/episodes/{episode['episode_id']}/end").json()["end"]["num_turns"] == 2
    assert httpx.post(f"{episode['url']}/v1/chat/completions", json=question).status_code == 401
    logs = "".join(path.read_text(errors="replace") for path in (stack.root / "logs").glob("*.log"))
    assert secret not in logs and episode["episode_id"] in logs
