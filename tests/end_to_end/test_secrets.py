"""Secrets that a stack is given are used, and then searched for in everything that it has written: nowhere."""

import asyncio
import json
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from service.dev import Connection
from shared.settings import Settings
from tests.end_to_end.conftest import SECRETS
from tests.end_to_end.stack import Stack, wait_until
from tests.files_below import files_below
from tests.opened import on_the_wire, opened, payloads_of

pytestmark = pytest.mark.slow

NAME = "canary-run"
SAID = {what: f"canary-of-{what}-e71c9" for what in ("prompt", "answer", "setting", "error", "schedule", "note")}
SIGNATURE = "canary-signature-41b6"
TOKEN = "canary-token-in-a-path-08c4"
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def connection(stack: Stack) -> Connection:
    return stack.connection


@pytest.fixture(scope="module")
def secrets(stack: Stack, connection: Connection, tiny_model: Path, chat_dataset: Path) -> dict[str, str]:
    """All of them, by what they are; each has been used by the time that a test sees it."""
    found = {**SECRETS, "the first key": connection.api_key}
    with _http(connection, connection.api_key) as admin:
        found["a key"] = _made(admin.post("/keys", json={"title": "canary"}))["key"]
        hook = {"url": f"https://longshore.invalid/{TOKEN}"}
        found |= {"a webhook's token": TOKEN, "a webhook's secret": _made(admin.post("/webhooks", json=hook))["secret"]}
        signed = httpx.post(
            f"{connection.api_url}/login", data={"key": found["a key"], "after": "/"}, trust_env=False, timeout=300
        )
        found["a session"] = signed.cookies["longshore_session"]
        admin.get("/runs", params={"api_key": found["a key"]})
        httpx.get(
            f"{connection.api_url}/api/v1/runs", headers={"authorization": f"Basic {found['a key']}"}, timeout=300
        )
    with _http(connection, found["a key"]) as api:
        run: dict[str, Any] = {
            "name": NAME,
            "model": tiny_model.as_uri(),
            "steps": 2,
            "batch_size": 2,
            "max_tokens": 256,
        }
        trained = _made(api.post("/runs/sft", json=run | {"dataset": {"uri": chat_dataset.as_uri()}}))["run_id"]
        # Refused by the download, in words that a user, a log and a workflow's history keep.
        uri = f"http://127.0.0.1:9/rows.jsonl?X-Amz-Signature={SIGNATURE}"
        refused = _made(api.post("/runs/sft", json=run | {"dataset": {"uri": uri}}))["run_id"]
        states = [_ended(api, run_id)["state"] for run_id in (trained, refused)]
        assert states == ["succeeded", "failed"]
        _say(api, run, chat_dataset)
    return found


def _say(api: httpx.Client, run: dict[str, Any], data: Path) -> None:
    """Have words of a user's in everything that goes through Temporal."""
    row = {"messages": [{"role": "user", "content": SAID["prompt"]}, {"role": "assistant", "content": SAID["answer"]}]}
    good, bad = data.with_name("good.jsonl"), data.with_name("bad.jsonl")
    good.write_text(json.dumps(row) + "\n")
    bad.write_text(json.dumps({SAID["error"]: 1}) + "\n")
    shown = _made(api.post("/preview", json={"source": {"uri": good.as_uri()}, "model_uri": run["model"]}))
    assert SAID["answer"] in json.dumps(shown)
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "{{sample.output_text}}"}
    sample = {"sample": {"output_text": SAID["answer"]}, "item": {"prompt": SAID["prompt"]}}
    asked = {"grader": grader | {"reference": SAID["setting"]}, "sample": sample}
    assert _made(api.post("/graders/run", json=asked))["grade"] == 0
    failed = _made(api.post("/runs/sft", json=run | {"dataset": {"uri": bad.as_uri()}}))["run_id"]
    assert SAID["error"] in _ended(api, failed)["problem"]["message"]
    scheduled = {
        "name": SAID["schedule"],
        "run": run | {"kind": "sft", "dataset": {"uri": data.as_uri()}},
        "every_s": 6000,
    }
    _made(api.post("/schedules", json=scheduled))
    _made(api.post(f"/schedules/{SAID['schedule']}/pause", json={"note": SAID["note"]}))


def _http(connection: Connection, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{connection.api_url}/api/v1", headers=headers, timeout=300, trust_env=False)


def _made(answer: httpx.Response) -> dict[str, Any]:
    assert answer.is_success, answer.text
    made: dict[str, Any] = answer.json()
    return made


def _ended(api: httpx.Client, run_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        view = api.get(f"/runs/{run_id}").json()
        return view if view["state"] in ENDED else None

    return wait_until(look, f"the end of {run_id}", every_s=0.5)


def test_no_file_of_the_stack_holds_a_secret(stack: Stack, secrets: dict[str, str]) -> None:
    """Logs, the store, job files, both databases, what hosts keep; but for the two places that must: the connection's
    file, and the service's database, which has the record of a webhook.
    """
    searched, found = set(), []
    for place, data in files_below(stack.root):
        if NAME.encode() in data:
            searched.add(place.split("/")[0])
        for what, secret in secrets.items():
            secret = secret.removeprefix("whsec_")
            if secret.encode() in data and (what, place.rpartition("/")[0]) != ("the first key", ""):
                found.append((what, place))
    allowed = {what for what, place in found if place.startswith("service/longshore.db")}
    assert [one for one in found if not one[1].startswith("service/longshore.db")] == []
    assert allowed == {"a webhook's token", "a webhook's secret"}
    assert searched >= {"store", "service"} and not any(place.startswith("temporal.db") for place in searched)
    owner_alone = (stack.root / "dev.json").stat().st_mode & 0o077
    assert owner_alone == 0


def test_a_signed_uris_query_is_in_no_log(stack: Stack, secrets: dict[str, str]) -> None:
    logs = {place: data for place, data in files_below(stack.root) if place.startswith("logs/")}
    assert len(logs) >= 4
    assert [place for place, data in logs.items() if SIGNATURE.encode() in data] == []
    result = next(d for p, d in files_below(stack.root) if p.endswith("result.json") and b"private network" in d)
    assert SIGNATURE.encode() not in result


def test_no_history_of_temporal_holds_a_secret(connection: Connection, secrets: dict[str, str]) -> None:
    histories = asyncio.run(_histories(connection))
    assert len(histories) >= 2
    assert any(NAME.encode() in data for data in histories.values())
    for workflow_id, data in histories.items():
        held = [what for what, secret in secrets.items() if secret.removeprefix("whsec_").encode() in data]
        assert held == [], workflow_id


async def _histories(connection: Connection) -> dict[str, bytes]:
    """Every event of every workflow that Temporal knows, opened by the installation's key."""
    client, settings = await Client.connect(connection.temporal_address), Settings(root=Path(connection.root))
    found = {}
    async for execution in client.list_workflows():
        history = await client.get_workflow_handle(execution.id, run_id=execution.run_id).fetch_history()
        found[execution.id] = b"".join(opened(event, settings).SerializeToString() for event in history.events)
    return found


def test_temporals_database_holds_no_word_of_a_users(
    stack: Stack, connection: Connection, secrets: dict[str, str], tiny_model: Path
) -> None:
    """Its bytes, whatever they are of: histories, memos, visibility, schedules, errors and their traces."""
    database = b"".join(data for place, data in files_below(stack.root) if place.startswith("temporal.db"))
    assert database.count(b"binary/encrypted") > 100
    words = {**SAID, "name": NAME, "model": str(tiny_model), "trace": "Traceback", "file": "activities/"}
    assert [what for what, word in words.items() if word.encode() in database] == []
    known = b"".join(asyncio.run(_histories(connection)).values())
    # All of them were there to be found: what a row is comes in a run's error, and schedules have no history of ours.
    assert [what for what in SAID if SAID[what].encode() not in known and what not in ("schedule", "note")] == []


def test_the_codec_shows_them_to_the_operator_alone(connection: Connection, secrets: dict[str, str]) -> None:
    """As Temporal's page asks: all payloads of all histories, the words of failures included."""
    payloads = [on_the_wire(each) for each in asyncio.run(_payloads(connection.temporal_address))]
    with _http(connection, connection.api_key) as operator:
        tenant = _made(operator.post("/tenants", json={"tenant": "curious"}))["key"]["key"]
        answers = [
            operator.post("/codec/decode", json={"payloads": payloads[at : at + 50]})
            for at in range(0, len(payloads), 50)
        ]
    shown = b"".join(b64decode(each["data"]) for answer in answers for each in _made(answer)["payloads"])
    assert [what for what in SAID if SAID[what].encode() not in shown and what not in ("schedule", "note")] == []
    for key, status in ((tenant, 403), ("ls-nobodys", 401)):
        with _http(connection, key) as asking:
            answer = asking.post("/codec/decode", json={"payloads": payloads[:50]})
            assert (answer.status_code, "canary" in answer.text) == (status, False)


async def _payloads(address: str) -> list[Payload]:
    client, found = await Client.connect(address), []
    async for execution in client.list_workflows():
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        async for event in handle.fetch_history_events():
            found += payloads_of(event)
    return found


def test_no_command_line_holds_a_secret(stack: Stack, secrets: dict[str, str]) -> None:
    """Command lines are everybody's to read."""
    lines = []
    for process in stack.processes():
        with suppress(psutil.NoSuchProcess):  # a worker that left since
            lines.append(" ".join(process.cmdline()))
    assert len(lines) >= 4
    assert [what for what, secret in secrets.items() if any(secret in line for line in lines)] == []
