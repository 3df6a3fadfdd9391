"""Schedules, webhooks and sweeps as users meet them: the command line, the API, and a receiver of what they do."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import httpx
import pytest
from standardwebhooks import Webhook as Verifier

from longshore.runs import RunRecord
from service.cli.schedules import _parameter
from shared.settings import DownloadSettings, Settings, WebhookSettings
from shared.storage.paths import RunKeys
from tests.service.apis.native.webhook_stack import Receiver, receiving
from tests.service.conftest import Answer, Cli, Service
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("hooks")
    return Settings(
        root=root,
        temporal_address=temporal_address,
        control_queue=f"control-{root.name}",
        download=DownloadSettings(file_roots=(root.parent,)),
        webhooks=WebhookSettings(allow_private_addresses=True, first_retry_s=0.05),
    )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def actions(api: httpx.Client, name: str, number: int) -> list[dict]:
    """A schedule's actions, when so many have come to something."""

    def look() -> list[dict] | None:
        found = api.get(f"/schedules/{name}").json()["actions"]
        return found if len(found) == number and all(a["state"] != "preparing" for a in found) else None

    return wait_until(look, f"{number} actions")


def test_a_night_on_the_command_line(
    service: Service, cli: Cli, api: httpx.Client, receiver: Receiver, tmp_path: Path
) -> None:
    """Its run is short, nobody sent it, and yet it is listed and told."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    receiver.answers = [500]
    hook = cli("webhook", "create", receiver.url, "--json").json
    made = cli(
        *("schedule", "create", "nightly", "--cron", "0 2 * * *", "--timezone", "Europe/Berlin", "--continue"),
        *("--catch-up", "30m", "--overlap", "buffer_one", "--json", "--"),
        *("submit", "sft", "-m", "org/model", "-d", rows.as_uri(), "--name", "nightly", "--steps", "4", "--lr", "3e-4"),
        *("--lora-rank", "4", "--tp", "2", "--warmup", "1"),
    ).json
    scheduled = made["scheduled"]
    assert (scheduled["catch_up_s"], scheduled["overlap"], scheduled["continues"]) == (1800, "buffer_one", True)
    assert scheduled["run"]["trainable"]["rank"] == 4 and scheduled["run"]["layout"]["tp"] == 2
    assert (scheduled["run"]["learning_rate"], scheduled["run"]["warmup_steps"]) == (3e-4, 1)
    assert datetime.fromtimestamp(made["next_times"][0], ZoneInfo("Europe/Berlin")).hour == 2

    assert cli("schedule", "trigger", "nightly").code == 0
    [first] = actions(api, "nightly", 1)
    run_id = first["run_id"]
    # Asked for by its name it would be found: it is on record. Listed it is once somebody looked for it.
    wait_until(lambda: run_id in api.get("/runs").text, "the run is listed")
    assert cli("watch", run_id).code == 0
    record = RunRecord.model_validate_json(service.store.get_bytes(RunKeys(run_id).record))
    assert (record.tenant, record.source.schedule) == ("default", "nightly") and record.owner
    assert record.run.model_dump(mode="json") == scheduled["run"] | {"dtype": "float32"}
    assert run_id in cli("ls").stdout

    def told() -> list[dict] | None:
        good = [Verifier(hook["secret"]).verify(r.body, r.headers) for r in receiver.received]
        return good if {"run.created", "run.succeeded"} <= {said["type"] for said in good} else None

    for said in wait_until(told, "the run's notices"):
        assert said["data"]["id"] == run_id and said["data"]["schedule"] == "nightly"
    # What was answered is on record somewhat later.
    wait_until(lambda: "run.succeeded" in cli("webhook", "deliveries", hook["id"]).stdout, "the delivery is listed")
    assert hook["id"] in cli("webhook", "ls").stdout
    statuses = [[a["status"] for a in d["attempts"]] for d in _settled(api, hook["id"], 2)]
    assert sorted(statuses, key=len) == [[200], [500, 200]]

    cli("schedule", "trigger", "nightly")
    assert actions(api, "nightly", 2)[0]["reason"] == f"the dataset is the one that {run_id} had"
    shown = cli("schedule", "show", "nightly").stdout
    assert "skipped" in shown and run_id in shown and "0 2 * * * Europe/Berlin" in shown

    assert "paused (holidays)" in cli("schedule", "pause", "nightly", "--note", "holidays").stdout
    assert "paused" in cli("schedule", "ls").stdout
    assert "paused" not in cli("schedule", "resume", "nightly").stdout
    new_year = {"begin": 1_767_225_600, "end": 1_767_312_000}
    assert cli("api", "POST", "/schedules/nightly/backfill", "--json", json.dumps(new_year)).code == 0
    assert [a["state"] for a in actions(api, "nightly", 3)] == ["skipped", "skipped", "started"]
    assert cli("schedule", "rm", "nightly").code == 0
    gone = cli("schedule", "show", "nightly")
    assert gone.code == 102 and "there is no schedule nightly" in gone.stderr
    assert run_id in cli("ls").stdout, "its runs stay"
    told = {(entry["method"], entry["target"]) for entry in api.get("/audit").json()["entries"]}
    assert told >= {("POST", "nightly"), ("DELETE", "nightly")}


def _settled(api: httpx.Client, webhook_id: str, number: int) -> list[dict]:
    def look() -> list[dict] | None:
        found = api.get(f"/webhooks/{webhook_id}/deliveries").json()
        return found if len(found) == number and all(d["state"] == "delivered" for d in found) else None

    return wait_until(look, f"{number} deliveries")


def test_what_the_command_line_refuses(cli: Cli) -> None:
    submit = ("submit", "sft", "-m", "org/m", "-d", "file:///x.jsonl")

    def create(*options: str) -> Answer:
        return cli("schedule", "create", "s", *options)

    for answer, words in [
        (create("--", *submit), "exactly one of --cron and --every"),
        (create("--every", "10 parsecs", "--", *submit), "90m, 6h or 1d"),
        (create("--every", "10s", "--", *submit), "every_s"),
        (create("--every", "1d", "--", "train"), "after -- give the run to start"),
        (create("--every", "1d", "--", *submit, "--learning-rat", "1"), "No such option"),
        (create("--every", "1d", "--", *submit, "--tp", "0"), "--tp"),
        (create("--every", "1d", "--", *submit, "--wait"), "nothing is started now"),
        (create("--every", "1d", "--", "submit", "rl", "-m", "org/m"), "rollouts"),
        (create("--cron", "0 2 * *", "--", *submit), "five fields"),
        (create("--every", "1d", "--continue", "--", *submit), "has a name"),
    ]:
        assert answer.code == 2 and words in answer.stderr, (words, answer)
    assert cli("schedule", "ls", "--json").json == []


def test_a_webhook_is_given_a_new_secret_on_the_command_line(cli: Cli, receiver: Receiver) -> None:
    made = cli("webhook", "create", receiver.url, "--json").json
    secret = cli("webhook", "rotate", made["id"], "--overlap", "0s").stdout.strip()
    assert secret.startswith("whsec_") and secret != made["secret"]
    assert secret not in cli("webhook", "ls", "--json").stdout
    cli("webhook", "ping", made["id"])
    wait_until(lambda: receiver.received, "the ping")
    assert Verifier(secret).verify(receiver.received[0].body, receiver.received[0].headers)["type"] == "ping"
    assert len(receiver.received[0].headers["webhook-signature"].split()) == 1
    assert "overlap_s" in cli("webhook", "rotate", made["id"], "--overlap", "8d").stderr
    off = cli("api", "PATCH", f"/webhooks/{made['id']}", "--json", json.dumps({"enabled": False}))
    assert off.json["enabled"] is False and "False" in cli("webhook", "ls").stdout
    refused = cli("webhook", "ping", made["id"])
    assert refused.code != 0 and "not enabled" in refused.stderr
    cli("webhook", "rm", made["id"])


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("a=1,2.5,true,word", {"choices": [1, 2.5, True, "word"]}),
        ('a=["up", ["down"]]', {"choices": ["up", ["down"]]}),
        ("a=1e-5..1:log", {"min": "1e-5", "max": "1", "log": True, "integer": False}),
        ("a=1..8:int", {"min": "1", "max": "8", "log": False, "integer": True}),
        ("a=file:///data/../x,org/m", {"choices": ["file:///data/../x", "org/m"]}),
    ],
)
def test_values_of_a_parameter(text: str, space: dict[str, object]) -> None:
    assert _parameter(text) == ("a", space)


def test_a_sweep_on_the_command_line(service: Service, cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    asked = ("sweep", "create", "rates", "--sampler", "grid", "--metric", "loss", "--json")
    rates = ("-p", "learning_rate=1e-3,1e-4")
    run = ("--", "submit", "sft", "-m", "org/model", "-d", rows.as_uri(), "--steps", "4")

    refused = cli(*asked, "-p", "learning_rat=1,2", *run)
    assert refused.code == 100 and "parameters.learning_rat" in refused.stderr
    assert "there is no such field: learning_rat" in refused.stderr
    assert "give choices" in cli(*asked, "-p", "learning_rate=2..1", *run).stderr
    assert "after -- give" in cli(*asked, *rates, "--", "ls").stderr
    assert "run.name" in cli(*asked, *rates, *run, "--name", "mine").stderr

    # The stand-in succeeds and publishes nothing.
    ended = cli(*asked, *rates, "--wait", "--timeout", "100", *run)
    assert (ended.code, ended.json["state"]) == (100, "failed") and "published a result" in ended.json["problem"]
    assert [trial["value"] for trial in ended.json["trials"]] == [1.5, 1.5]
    shown = cli("sweep", "show", ended.json["sweep_id"])
    assert "2 of 2 trials have ended" in shown.stdout and ended.json["trials"][0]["run_id"] in shown.stdout

    held = cli(*asked[:-1], *rates, *run, "--seed", str(WAITS)).stdout.strip()
    assert held in cli("sweep", "ls").stdout
    assert cli("sweep", "cancel", held).code == 0
    assert cli("sweep", "show", "sweep-" + "0" * 17).code == 102
