"""`longshore import openai` from a server that answers as OpenAI documents it, and from some that do not."""

import json
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from longshore.runs import FIRST_TENANT
from shared.storage.paths import version_claim
from tests.served import ANY_PORT, Quiet, served
from tests.service.conftest import Cli, Service, put_versions
from tests.service.stand_in import PUBLISHES
from tests.waiting import wait_until

KEY = "sk-canary-of-the-account"
MODEL = "gpt-4.1-mini-2025-04-14"
TUNED = f"ft:{MODEL}:docks:{PUBLISHES}:Ab1"
CHATS = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n' * 3
GRADER = {
    "type": "string_check",
    "name": "crates",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
Page = Callable[[str, dict[str, list[str]]], Any]


def job(name: str, **fields: Any) -> dict[str, Any]:
    """A job as OpenAI's API reference shows it."""
    return {
        "object": "fine_tuning.job",
        "id": name,
        "model": MODEL,
        "created_at": 1721764800,
        "fine_tuned_model": f"ft:{MODEL}:docks::{name[-3:]}",
        "organization_id": "org-123",
        "result_files": ["file-results"],
        "status": "succeeded",
        "validation_file": None,
        "training_file": "file-chats",
        "seed": 0,
        "estimated_finish": None,
        "integrations": [],
        "metadata": None,
        **fields,
    }


def method(kind: str, **settings: Any) -> dict[str, Any]:
    return {"type": kind, kind: settings}


# The newest first, as they are listed.
JOBS = [
    job("ftjob-failed", status="failed", fine_tuned_model=None),
    job("ftjob-unknown", model="davinci-002"),
    job("ftjob-onward", model=TUNED),
    job("ftjob-foreign", model="ft:gpt-4o:elsewhere::Zz9"),
    job("ftjob-gone", training_file="file-deleted"),
    job("ftjob-slashed", training_file="file-slashed", metadata={"team": "quay"}),
    job(
        "ftjob-graded",
        method=method(
            "reinforcement",
            grader=GRADER,
            response_format={"type": "json_object"},
            hyperparameters={
                **{"n_epochs": 1, "batch_size": 2, "compute_multiplier": 1.0, "learning_rate_multiplier": 1.0},
                **{"eval_interval": "auto", "eval_samples": "auto", "reasoning_effort": "medium"},
            },
        ),
    ),
    job("ftjob-preferred", method=method("dpo", hyperparameters={"beta": 0.2, "n_epochs": 2, "batch_size": 4})),
    job(
        "ftjob-chats",
        fine_tuned_model=TUNED,
        method=method("supervised", hyperparameters={"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.8}),
        validation_file="file-chats",
        integrations=[{"type": "wandb", "wandb": {"project": "docks"}}],
    ),
]
FILES = {"file-chats": "chats.jsonl", "file-slashed": "../../etc/\u001b[31mchats.jsonl"}


def listed(rows: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
    """Two a page, whatever was asked for: a limit is the most that comes."""
    ids = [row["id"] for row in rows]
    first = ids.index(query["after"][0]) + 1 if "after" in query else 0
    return {"object": "list", "data": rows[first : first + 2], "has_more": first + 2 < len(rows)}


def documented(path: str, query: dict[str, list[str]]) -> Any:
    match path.removeprefix("/v1/").split("/"):
        case ["fine_tuning", "jobs"]:
            return listed(JOBS, query)
        case ["fine_tuning", "jobs", name, "checkpoints"]:
            step = {"id": f"ftckpt_{name}", "fine_tuned_model_checkpoint": f"{TUNED}:ckpt-step-10", "step_number": 10}
            return listed([step] if name == "ftjob-chats" else [], query)
        case ["files", name] if name in FILES:
            return {"id": name, "object": "file", "bytes": len(CHATS), "filename": FILES[name], "purpose": "fine-tune"}
        case ["files", name, "content"] if name in FILES:
            return CHATS
    return None


class _Handler(Quiet):
    server: "_Server"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.server.asked.append(url.path)
        found = self.server.page(url.path, parse_qs(url.query))
        status = 200 if self.headers["authorization"] == f"Bearer {KEY}" else 401
        if found is None or status != 200:
            status = 404 if status == 200 else status
            found = {"error": {"message": "No such thing\u001b[31m", "type": "invalid_request_error"}}
        self.answer(status, found if isinstance(found, bytes) else json.dumps(found).encode())


class _Server(ThreadingHTTPServer):
    page: Page
    asked: list[str]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    """A server that the command reads; `page` says what it answers."""
    with served(_Server(ANY_PORT, _Handler)) as server:
        server.page, server.asked = documented, []
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        yield server


def imported(cli: Cli, *arguments: str, code: int = 100) -> dict[str, dict[str, Any]]:
    answer = cli("import", "openai", "--json", *arguments)
    assert answer.code == code, answer
    assert KEY not in answer.stdout + answer.stderr
    return {each["job"]: each for each in answer.json}


def jobs_of(service: Service) -> dict[str, dict[str, Any]]:
    """The jobs here by those that they were imported from."""
    with service.http() as client:
        listed = client.get(f"{service.url}/v1/fine_tuning/jobs", params={"limit": 100}).json()["data"]
    return {each["metadata"]["openai_job"]: each for each in listed if each["metadata"]}


def test_an_account_is_started_here_once(cli: Cli, service: Service, account: _Server, tmp_path: Path) -> None:
    named = ("--model", f"{MODEL}=org/model")
    would = imported(cli, *named, "--dry-run")
    assert {name: each["state"] for name, each in would.items()} == {
        "ftjob-chats": "would start",
        "ftjob-preferred": "would start",
        "ftjob-graded": "would start",
        "ftjob-slashed": "would start",
        "ftjob-gone": "would start",
        "ftjob-foreign": "no counterpart",
        "ftjob-onward": "waits",
        "ftjob-unknown": "no counterpart",
        "ftjob-failed": "left out",
    }
    assert jobs_of(service) == {} and not any(path.endswith("/content") for path in account.asked)

    found = imported(cli, *named)
    started = {name: each for name, each in found.items() if each["state"] == "started"}
    assert list(started) == ["ftjob-chats", "ftjob-preferred", "ftjob-graded", "ftjob-slashed"], "the oldest first"
    assert "file-deleted" in found["ftjob-gone"]["why"] and "\u001b" not in found["ftjob-gone"]["why"]
    assert found["ftjob-unknown"]["why"].endswith("--model davinci-002=...")
    assert found["ftjob-chats"]["checkpoints"] == [f"{TUNED}:ckpt-step-10"]
    assert found["ftjob-chats"]["left_out"] == ["integrations"]
    assert found["ftjob-graded"]["left_out"] == ["reinforcement.response_format", "reasoning_effort"]

    ours = jobs_of(service)
    assert {name: each["id"] for name, each in ours.items()} == {name: each["run"] for name, each in started.items()}
    chats, graded = ours["ftjob-chats"], ours["ftjob-graded"]["method"]["reinforcement"]
    assert chats["hyperparameters"] == {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.8}
    assert chats["user_provided_suffix"] == PUBLISHES and chats["training_file"] == chats["validation_file"]
    assert ours["ftjob-preferred"]["method"]["dpo"]["hyperparameters"]["beta"] == 0.2
    assert graded["grader"]["name"] == "crates" and graded["hyperparameters"]["batch_size"] == 2
    assert ours["ftjob-slashed"]["metadata"] == {"team": "quay", "openai_job": "ftjob-slashed"}
    with service.http() as client:
        content = client.get(f"{service.url}/v1/files/{chats['training_file']}/content").content
        names = [each["filename"] for each in client.get(f"{service.url}/v1/files").json()["data"]]
    assert content == CHATS
    assert sorted(names) == ["file-chats-chats.jsonl", "file-slashed-__31mchats.jsonl"]

    account.asked.clear()
    made = wait_until(lambda: jobs_of(service)["ftjob-chats"]["fine_tuned_model"], "the first job's model")
    put_versions(service.store, FIRST_TENANT, PUBLISHES, tmp_path / "adapter", 1, 1)
    claim = json.dumps({"run_id": chats["id"]}).encode()
    service.store.put_bytes(version_claim(FIRST_TENANT, "adapters", PUBLISHES, 1), claim)
    again = imported(cli, *named)
    assert {name for name, each in again.items() if each["state"] == "imported before"} == set(started)
    assert (again["ftjob-onward"]["state"], again["ftjob-onward"]["model"]) == ("started", made)
    assert jobs_of(service)["ftjob-onward"]["model"] == made == f"{PUBLISHES}:v1"
    assert not any(path.endswith("/content") for path in account.asked), "files are brought once"
    assert len(jobs_of(service)) == len(started) + 1
    shown = cli("import", "openai", *named)
    assert "imported before" in shown.stdout and "\u001b" not in shown.stdout


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (lambda path, query: {"data": [job("../../files")], "has_more": False}, "no answer of OpenAI's API"),
        (lambda path, query: b"<html>", "no answer of OpenAI's API"),
        (lambda path, query: None, "404"),
    ],
)
def test_what_is_no_answer_ends_the_import(cli: Cli, account: _Server, page: Page, words: str) -> None:
    account.page = page
    answer = cli("import", "openai", "--dry-run")
    assert answer.code in (100, 102) and words in answer.stderr, answer
    assert "\u001b" not in answer.stderr and len(account.asked) <= 2


def test_what_is_asked_wrongly_is_refused(cli: Cli, account: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give a name of OpenAI's and one of ours" in cli("import", "openai", "--model", "gpt").stderr
    assert "has no job ftjob-none" in cli("import", "openai", "--job", "ftjob-none").stderr
    assert "by https alone" in cli("import", "openai", "--base-url", "http://example.invalid/v1").stderr
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    assert "401" in cli("import", "openai").stderr
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set" in cli("import", "openai").stderr
