"""Clients that have ended, or do something else for long, keep nobody out, and lose nothing."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import temporalio.client

from longshore.client import Client
from longshore.commands import Datum, Forward
from longshore.training import Lora, SessionRun
from tests.art_clients import run_with_art
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.stack import Stack, started, wait_until
from tests.end_to_end.test_tinker import started as tinker_program
from tests.end_to_end.test_tinker import told_by

pytestmark = pytest.mark.slow
MOST = 2
_ART = """
import asyncio, json, pathlib, sys, time
import art
url, key, base, folder = sys.argv[1:]

async def main():
    backend = art.ServerlessBackend(api_key=key, base_url=f"{url}/v1")
    model = art.TrainableModel(name="left", project="harbour", base_model=base, base_path=folder)
    await model.register(backend)
    question = {"role": "user", "content": "How many crates are on quay 3?"}
    async def group():
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[question], n=4, max_tokens=8, temperature=1.0)
        return art.TrajectoryGroup(art.Trajectory(messages_and_choices=[question, choice], reward=float(place))
            for place, choice in enumerate(answer.choices))
    await backend.train(model, [await group()], learning_rate=1e-4)
    pathlib.Path(folder, "waits").touch()
    while not pathlib.Path(folder, "go").exists():
        time.sleep(0.1)
    await backend.train(model, [await group()], learning_rate=1e-4)
    print(json.dumps(await model.get_step()))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    clients = {"LONGSHORE_CLIENTS__IDLE_S": "2", "LONGSHORE_CLIENTS__AWAY_S": "4"}
    quotas = {"LONGSHORE_QUOTAS__CONCURRENT_RUNS": str(MOST)}
    with started(tmp_path_factory.mktemp("hasty"), **QUICK, **clients, **quotas) as stack:
        yield stack


def rows(stack: Stack) -> list[dict[str, Any]]:
    connection = stack.connection
    headers = {"authorization": f"Bearer {connection.api_key}"}
    answer = httpx.get(f"{connection.api_url}/api/v1/runs", headers=headers, timeout=300, trust_env=False)
    return answer.raise_for_status().json()["runs"]


def test_killed_and_waiting_clients_of_tinker_keep_nobody_out_and_lose_nothing(
    hasty: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    programs = []
    for number in range(MOST + 2):  # each comes while those before it do nothing
        file = str(go if number == 0 else tmp_path / "never")
        if number:
            wait_until(lambda: hasty.cli("usage", "--json").json["concurrent_runs"] < MOST, "there is a place")
        programs.append(tinker_program(hasty, tiny_model, "waits", file))
        assert programs[-1].stdout.readline() == "waits\n", programs[-1].stderr.read()[-3000:]
        if number:
            programs[-1].kill()
            programs[-1].wait()
    wait_until(lambda: {row["state"] for row in rows(hasty)} == {"paused"}, "all are paused")
    assert [row["client_away"] for row in rows(hasty)] == [True] * (MOST + 2)
    shown = hasty.cli("get", rows(hasty)[0]["run_id"])
    assert "its client sent nothing" in shown.stdout + shown.stderr
    go.touch()
    told = told_by(programs[0])
    assert told["before"] == told["after"] > told["trained"]
    wait_until(lambda: {row["state"] for row in rows(hasty)} == {"paused"}, "it is paused again")


def test_a_client_of_art_goes_on_with_its_own_run_and_optimizer(hasty: Stack, tiny_model: Path, tmp_path: Path) -> None:
    connection = hasty.connection

    arguments = [connection.api_url, connection.api_key, str(tiny_model), str(tmp_path)]
    with ThreadPoolExecutor() as threads:
        art = threads.submit(run_with_art, "0.5.18", ["-c", _ART, *arguments], tmp_path, 500)
        wait_until((tmp_path / "waits").exists, "it waits")
        wait_until(lambda: any(row["kind"] == "rl" and row["state"] == "paused" for row in rows(hasty)), "it is paused")
        (tmp_path / "go").touch()
        assert json.loads(art.result().stdout.splitlines()[-1]) == 2
    [run] = [row for row in rows(hasty) if row["kind"] == "rl"]
    assert run["policy_version"] == 2


def test_a_command_that_comes_while_its_session_is_paused_is_done(hasty: Stack, tiny_model: Path) -> None:
    """It is neither dropped nor lost: the service resumes the session once the state is saved."""
    connection = hasty.connection

    def pause(run_id: str) -> None:
        async def signal() -> None:
            client = await temporalio.client.Client.connect(connection.temporal_address)
            await client.get_workflow_handle(run_id).signal("pause_for_client")

        asyncio.run(signal())

    with Client(connection.api_url, connection.api_key) as client:
        run = SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=64)
        session = client.sessions.open(run)
        data = (Datum(tokens=tuple(range(3, 15))),)
        scores = []
        for _ in range(3):
            scores.append(session.send(Forward(data=data)).result(300).data)
            pause(session.id)
        assert scores[0] and scores[1:] == scores[:-1]
    hasty.cli("cancel", session.id)
