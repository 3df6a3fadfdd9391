"""What a stack shows operators, what its processes listen on and are told, and secrets, which it shows nowhere."""

import asyncio
import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from temporalio.client import Client

from benchmarks.spans import Receiver, Span
from service.dev import Connection
from shared.child_environment import Kind, child_environment
from shared.settings import Settings
from tests.end_to_end.conftest import SECRETS
from tests.end_to_end.stack import Stack, wait_until
from tests.files_below import files_below
from tests.infra.observability import names_of
from tests.opened import opened

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


def test_no_command_line_holds_a_secret(stack: Stack, secrets: dict[str, str]) -> None:
    """Command lines are everybody's to read."""
    lines = []
    for process in stack.processes():
        with suppress(psutil.NoSuchProcess):  # a worker that left since
            lines.append(" ".join(process.cmdline()))
    assert len(lines) >= 4
    assert [what for what, secret in secrets.items() if any(secret in line for line in lines)] == []


# Only where something of that kind has happened does the SDK tell them.
SELDOM = {
    "temporal_activity_execution_failed_total",
    "temporal_workflow_task_execution_failed_total",
    "temporal_request_failure_total",
}


@pytest.fixture(scope="module")
def canary(stack: Stack, traces: Receiver, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word in a file's name and in its only row, which a preview has refused with an error that repeats it."""
    word = "canary-of-a-row-7f3a"
    data = tmp_path_factory.mktemp("seen") / f"{word}.jsonl"
    data.write_text(json.dumps({"messages": [{"role": word, "content": word}]}) + "\n")
    with stack.with_environment(OTEL_EXPORTER_OTLP_ENDPOINT=traces.endpoint):
        refused = stack.cli("preview", "--model", str(tiny_model), "--dataset", str(data), check=False)
    assert word in refused.stderr and refused.code != 0
    return word


def test_a_commands_trace_tells_an_errors_type_and_no_text(traces: Receiver, canary: str) -> None:
    """From the command to the activity that failed."""

    def failed() -> list[Span] | None:
        spans = traces.spans()
        roots = {span.trace for span in spans if span.name == "longshore preview"}
        found = [span for span in spans if span.trace in roots]
        known = {"", *(span.span for span in found)}
        is_there = any(span.name == "RunActivity:preview" for span in found)
        return found if is_there and all(span.parent in known for span in found) else None

    spans = wait_until(failed, "the command's trace", timeout_s=120)
    by_id = {span.span: span for span in spans}
    (span,) = [span for span in spans if span.name == "RunActivity:preview"]
    assert span.attributes["error.type"] == "InvalidInput"
    names = [span.name]
    while span.parent:
        span = by_id[span.parent]
        names.append(span.name)
    assert names[1:3] == ["StartActivity:preview", "StartWorkflow:PreviewWorkflow"]
    assert names[3:] == ["POST /api/v1/preview", "longshore preview"] and span.process == "longshore-cli"
    assert canary.encode() not in b"".join(traces.raw)


def test_dashboard_and_alerts_use_names_that_are_exported(stack: Stack, canary: str) -> None:
    used = names_of()
    assert len(used) > 20

    def missing() -> set[str]:
        return used - stack.names_of_metrics() - SELDOM

    with suppress(TimeoutError):
        wait_until(lambda: not missing(), "every name that is used", timeout_s=60)
    assert not missing()


def test_no_tenant_reaches_metrics(stack: Stack) -> None:
    """The API's own port has no such route, whoever asks; and what is counted names routes by their templates."""
    connection = stack.connection
    asked = httpx.get(f"{connection.api_url}/metrics", headers={"authorization": f"Bearer {connection.api_key}"})
    assert asked.status_code == 404 and "longshore_http" not in asked.text
    web = stack.metrics()["web"]
    routes = {found[1] for name in web if (found := re.search(r"route=([^,}]*)", name))}
    assert "unmatched" in routes and "/metrics" not in routes
    assert any(name.startswith("temporal_request_total{") for name in web)


def test_the_next_steps_of_a_run_are_traced(stack: Stack, options: list[str], tmp_path: Path) -> None:
    """With names of operations and a mark for each step; without a word of the data. An ended run has no steps left."""
    run_id = stack.cli(*options, "--steps", "20000", "--learning-rate", "0.01").json["run_id"]  # until it is cancelled
    target = tmp_path / "trace.json.gz"
    told = stack.cli("profile", run_id, "--steps", "3", "--into", str(target), "--json").json
    assert told["num_bytes"] == target.stat().st_size
    text = gzip.decompress(target.read_bytes()).decode()
    names = [event.get("name") for event in json.loads(text)["traceEvents"]]
    assert names.count("optimizer step") == 3 and "aten::mm" in names
    assert "crates" not in text
    stack.cli("cancel", run_id)
    assert stack.cli("watch", run_id, check=False).code == 103
    refused = stack.cli("profile", run_id, check=False)
    assert refused.code == 100 and "does not run" in refused.stderr
    assert not (stack.root / "store" / "runs" / run_id / "profile.json").exists()


PAGE = Path(__file__).parents[2] / "docs" / "hardening.md"
# By what their command line holds; the first that fits. Whatever else a stack starts is "any other".
KINDS = {
    "sampler": "-m megatron_worker.sampler ",
    "worker": "-m megatron_worker",
    "W&B writer": "wandb",
    "sandbox": "-m activities.sandbox.child",
    "Temporal": "server start-dev",
    "web service": "-m service.app",
    "host of all roles": "-m service.host",
}
ROLES: dict[str, Kind] = {"control host": "control", "GPU host": "gpu", "sampler host": "sampler"}
WORDS = {
    "LONGSHORE_GRADING__SCORE_MODEL_KEY": "judge",
    "LONGSHORE_SAMPLING__API_KEY": "sampling server",
    "WANDB_API_KEY": "W&B",
    "AWS_SECRET_ACCESS_KEY": "S3",
    "HF_TOKEN": "hub",
    "OTEL_EXPORTER_OTLP_HEADERS": "traces",
}
SUPERVISED = {"Temporal", "web service", "host of all roles"}
ALWAYS_THERE = SUPERVISED | {"sandbox"}


@dataclass
class Seen:
    """Of all processes of one kind: places that they listen on, and secrets in their environment."""

    listens: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)


def documented() -> dict[str, Seen]:
    """The table's rows: process, listens on, secrets."""
    section = PAGE.read_text().split("## What listens, and who learns what\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {kind.partition(" (")[0]: Seen(_words(listens), _words(secrets)) for kind, listens, secrets in rows[2:]}


def _words(cell: str) -> set[str]:
    """What stands in brackets is for people."""
    return set(re.sub(r" *\(.*\)", "", cell).split(", ")) - {"nothing"}


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    values = " ".join(environment.values())
    found = {word for name, word in WORDS.items() if SECRETS[name] in values}
    found |= {"S3"} if any(name.startswith("AWS_") for name in environment) else set()
    return found | ({"unknown"} if SECRETS["TOKEN_OF_SOMETHING_ELSE"] in values else set())


class Watch:
    """Looks at all processes below a stack's supervisor, again and again, until the block ends."""

    def __init__(self, stack: Stack) -> None:
        (self._supervisor,) = stack.processes("service.dev")
        self.seen: dict[str, Seen] = defaultdict(Seen)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> "Watch":
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def look(self) -> None:
        for process in self._supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a sandbox is nobody's to look into
                addresses = {socket.laddr.ip for socket in process.net_connections("inet") if not socket.raddr}
                self._look_at(process, addresses, process.ppid() == self._supervisor.pid)

    def _look_at(self, process: psutil.Process, addresses: set[str], is_supervised: bool) -> None:
        command = " ".join(process.cmdline())
        environment = process.environ()
        kind = next((kind for kind, words in KINDS.items() if words in command), "any other")
        if not command or (kind in SUPERVISED and not is_supervised):
            return  # a zombie; a child that has not become its own program yet
        seen = self.seen[kind]
        seen.secrets |= secrets_in(environment)
        seen.listens |= {"loopback" if ip in ("127.0.0.1", "::1") else "everywhere" for ip in addresses}

    def _look_on(self) -> None:
        while not self._done.wait(0.5):
            self.look()


def test_idle_it_is_what_the_operators_guide_says(stack: Stack) -> None:
    def processes() -> Watch | None:
        watch = Watch(stack)
        watch.look()
        return watch if watch.seen.keys() >= ALWAYS_THERE else None

    table, seen = documented(), wait_until(processes, "every process of the stack").seen
    assert {kind: seen[kind] for kind in ALWAYS_THERE} == {kind: table[kind] for kind in ALWAYS_THERE}


def test_so_it_is_while_a_run_samples_grades_and_trains_on_two_ranks(stack: Stack, rollout_options: list[str]) -> None:
    with Watch(stack) as watch:
        assert stack.cli(*rollout_options, "--dp", "2", "--wait").json["status"] == "succeeded"
        table = documented()
        # W&B is told of a run after its end.
        awaited = table.keys() - ROLES.keys() - {"any other"}
        wait_until(lambda: watch.seen.keys() >= awaited, "every kind of process is seen")
    beyond = {}
    for kind, seen in watch.seen.items():
        more = (seen.listens - table[kind].listens, seen.secrets - table[kind].secrets)
        if any(more):
            beyond[kind] = more
    assert beyond == {}
    told = {"any other": set[str]()} | {kind: seen.secrets for kind, seen in watch.seen.items()}
    told |= {kind: secrets_in(child_environment(role, SECRETS)) for kind, role in ROLES.items()}
    assert told == {kind: seen.secrets for kind, seen in table.items()}
