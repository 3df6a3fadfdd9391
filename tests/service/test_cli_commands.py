"""Commands of the whole tree, on a real service: signing in, keys, files, graders, estimates, pause and retry, help."""

import io
import json
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest
import typer

from longshore.events import Cancelled, Evaluated, Event, Step
from longshore.fields import Fence
from longshore.runs import RunRecord
from longshore.training import SessionRun
from longshore.views import StepStatus
from service.cli.command import HEADINGS, app
from service.database.engine import open_database
from service.runs.rows import run_row
from service.runs.runs import queued
from shared.storage.paths import RunKeys
from tests.service.conftest import KEY, Cli, Service, reaches, started
from tests.service.stand_in import FAILS, QUEUES, WAITS
from tests.waiting import wait_until

Typed = Callable[[str], None]


@pytest.fixture
def nobody(service: Service, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whom no variable and no file tells of a service. Their configuration folder."""
    for name in ("LONGSHORE_API_URL", "LONGSHORE_API_KEY", "LONGSHORE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LONGSHORE_ROOT", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "longshore"


@pytest.fixture
def on_stdin(monkeypatch: pytest.MonkeyPatch) -> Typed:
    def typed(text: str) -> None:
        stdin = io.StringIO(text)
        stdin.name = "<stdin>"
        monkeypatch.setattr("sys.stdin", stdin)

    return typed


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"Quay {n}?"}, {"role": "assistant", "content": "Ten crates."}]}
        for n in range(12)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_events(service: Service, run_id: str, events: Iterable[Event]) -> None:
    data = "".join(event.model_dump_json() + "\n" for event in events).encode()
    service.store.put_bytes(RunKeys(run_id).log("000001", Fence(epoch=1)), data)


def test_a_login_is_kept_for_its_owner_and_its_service_alone(
    service: Service, cli: Cli, nobody: Path, on_stdin: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = nobody / "credentials.json"
    on_stdin("ls-not-the-key\n")
    refused = cli("login", service.url)
    assert refused.code == 100 and "longshore login" in refused.stderr and not credentials.exists()
    assert "this API key is not known here, was revoked, or has expired" in refused.stderr
    assert "send an API key" in cli("--api-url", service.url, "whoami").stderr, "there was none"

    on_stdin(f"{KEY}\n")
    answer = cli("login", service.url, "--json")
    assert answer.code == 0, answer
    assert (answer.json["profile"], answer.json["tenant"], KEY in answer.stdout) == ("default", "default", False)
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert cli("whoami", "--json").json["api_url"] == service.url

    # The same service by another name: a key goes nowhere but where it was given for.
    elsewhere = service.url.replace("127.0.0.1", "localhost")
    assert cli("--api-url", elsewhere, "whoami").code == 100
    assert cli("--api-url", elsewhere, "--api-key", KEY, "whoami").code == 0
    (nobody.parent / "longshore.toml").write_text(f'api_url = "{elsewhere}"\n')
    assert cli("whoami").code == 100
    (nobody.parent / "longshore.toml").unlink()

    monkeypatch.setenv("LONGSHORE_API_URL", elsewhere)
    on_stdin(f"{KEY}\n")
    hidden = cli("login", service.url)
    assert hidden.code == 0 and "LONGSHORE_API_URL wins" in hidden.stderr


def test_profiles_are_told_apart(service: Service, acme: str, cli: Cli, nobody: Path, on_stdin: Typed) -> None:
    for name, key in (("ours", KEY), ("theirs", acme)):
        on_stdin(key)
        assert cli("--profile", name, "login", service.url).code == 0
    assert cli("whoami", "--json").json["tenant"] == "acme"  # the last login
    assert cli("--profile", "ours", "whoami", "--json").json["tenant"] == "default"
    assert cli("config", "use", "ours").code == 0
    assert cli("whoami", "--json").json["tenant"] == "default"
    listed = cli("config", "profiles")
    assert acme[:15] in listed.stdout and acme not in listed.stdout and KEY not in listed.stdout
    unknown = cli("--profile", "none", "ls")
    assert unknown.code == 2 and "there is no profile none: there are ours, theirs" in unknown.stderr
    assert cli("logout").code == 0
    assert [p["profile"] for p in cli("config", "profiles", "--json").json] == ["theirs"]
    assert cli("logout").code == 2 and cli("--profile", "ours", "logout").code == 2
    on_stdin(KEY)
    assert cli("login", service.url, "--profile", "third").code == 0
    assert cli("logout", "--profile", "third").code == 0
    assert [p["profile"] for p in cli("config", "profiles", "--json").json] == ["theirs"]
    (nobody / "credentials.json").write_text("{")
    broken = cli("ls")
    assert broken.code == 2 and "credentials.json cannot be read" in broken.stderr


def test_a_setting_says_where_it_comes_from_and_no_secret(
    service: Service, cli: Cli, nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody.mkdir()
    (nobody / "config.toml").write_text('shape = "h200"\ncontrol_queue = "users"\n[grading]\npython_time_s = 3\n')
    (nobody.parent / "longshore.toml").write_text('control_queue = "projects"\n[s3]\nregion = "eu"\n')
    monkeypatch.setenv("LONGSHORE_API_KEY", "ls-0123456789ab-canary-canary")
    monkeypatch.setenv("LONGSHORE_DATABASE_URL", "postgresql://quay:canary@db/longshore?password=canary")
    monkeypatch.setenv("LONGSHORE_GRADING", '{"score_model_key": "canary-canary"}')
    monkeypatch.setenv("LONGSHORE_SAMPLING__API_KEY", "canary")
    answer = cli("config", "show", "--json")
    found = {value["name"]: (value["value"], value["origin"]) for value in answer.json}
    assert {name: found[name] for name in ("control_queue", "s3.region", "api_key", "wandb_mode", "api_url")} == {
        "control_queue": ("projects", "./longshore.toml"),
        "s3.region": ("eu", "./longshore.toml"),
        "api_key": ("ls-0123456789ab…", "LONGSHORE_API_KEY"),
        "wandb_mode": ("offline", "default"),
        "api_url": ("http://127.0.0.1:8484", "default"),
    }
    assert found["shape"] == ("h200", str(nobody / "config.toml"))
    assert found["grading.python_time_s"] == ("3.0", str(nobody / "config.toml"))
    assert found["grading.score_model_key"] == ("cana…", "LONGSHORE_GRADING")
    assert found["sampling.api_key"] == ("…", "LONGSHORE_SAMPLING__API_KEY")
    assert found["database_url"] == ("postgresql://quay:…@db/longshore?…", "LONGSHORE_DATABASE_URL")
    table = cli("config", "show", "--origin")
    assert re.search(r"^control_queue +projects +\./longshore.toml$", table.stdout, re.MULTILINE)
    assert "./longshore.toml" not in cli("config", "show").stdout
    assert "canary" not in answer.stdout + table.stdout


def test_a_list_says_how_many_idle_sessions_it_hides(service: Service, cli: Cli) -> None:
    """As the index has sessions whose clients are gone for a day."""
    with service.http() as api:
        made = api.post("/tenants", json={"tenant": "gone"}).json()["key"]["key"]
    assert "hidden" not in cli("--api-key", made, "ls").stderr
    run, now = SessionRun(model="org/tiny"), time.time()
    records = [RunRecord(run_id=f"session-gone{n}", tenant="gone", run=run, created_at=now) for n in range(2)]
    rows = [run_row(one, queued(one)) for one in records]
    for row in rows:
        row.phase, row.updated_at = "waiting_for_commands", now - 86_400 - 60
    database = open_database(service.settings)
    database.write(lambda session: session.add_all(rows))
    database.close()
    listed = cli("--api-key", made, "ls")
    assert "2 idle sessions are hidden: --all" in listed.stderr.splitlines()[-1] and "session-gone" not in listed.stdout
    whole = cli("--api-key", made, "ls", "--all")
    assert "session-gone0" in whole.stdout and "hidden" not in whole.stderr


def test_keys_are_made_used_and_ended(cli: Cli) -> None:
    answer = cli("keys", "create", "[red] looker", "--scope", "read", "--expires", "90d")
    assert answer.code == 0, answer
    key = answer.stdout.strip()
    assert "expires in 89d 23h" in answer.stderr or "expires in 90d" in answer.stderr
    assert cli("--api-key", key, "ls").code == 0
    refused = cli("--api-key", key, "cancel", "sft-none")
    assert refused.code == 100 and "lacks the scope write" in refused.stderr and "longshore whoami" in refused.stderr
    assert re.match(r"key-\w+ \(\[red\] looker\) of tenant default", cli("--api-key", key, "whoami").stdout)
    listed = cli("keys", "ls").stdout
    assert "[red] looker" in listed and key[:15] in listed and key not in listed
    key_id = cli("keys", "ls", "--json").json[0]["key_id"]
    assert cli("keys", "revoke", key_id).code == 0
    ended = cli("--api-key", key, "ls")
    assert ended.code == 100 and "was revoked" in ended.stderr, ended
    assert re.search(rf"^{key_id}.*revoked", cli("keys", "ls").stdout, re.MULTILINE)
    assert any(entry["target"] == key_id for entry in cli("audit", "--json").json)
    assert key_id in cli("audit").stdout
    missing = cli("keys", "revoke", "key-none")
    assert missing.code == 102 and "longshore keys ls" in missing.stderr
    assert cli("keys", "create", "--expires", "soon").code == 2
    assert "NAME and --title" in cli("keys", "create", "a", "--title", "b").stderr


def test_tenants_have_quotas(cli: Cli) -> None:
    made = cli("tenants", "create", "harbour", "--title", "The harbour", "--concurrent-runs", "0")
    assert made.code == 0, made
    key = made.stdout.strip()
    refused = cli("--api-key", key, "submit", "sft", "-m", "org/tiny", "-d", "https://example.org/rows.jsonl")
    assert refused.code == 100 and "longshore usage" in refused.stderr, refused
    assert re.search(r"^runs that go on +0 +0$", cli("--api-key", key, "usage").stdout, re.MULTILINE)
    given = (
        "--stored-bytes",
        str(3 << 30),
        "--gpu-hours",
        "7.5",
        "--worker-sharing",
        "tenant",
        "--worker-weight",
        "2.5",
    )
    assert cli("tenants", "quotas", "harbour", *given).code == 0
    quotas = cli("tenants", "usage", "harbour", "--json").json["quotas"]
    rest = {"concurrent_runs": None, "spending": None, "worker_sharing": "tenant", "worker_weight": 2.5}
    assert quotas == {"gpu_hours": 7.5, "stored_bytes": 3 << 30, **rest}
    assert re.search(r"^stored +\d+ bytes +3.00 GiB$", cli("tenants", "usage", "harbour").stdout, re.MULTILINE)
    assert cli("tenants", "quotas", "harbour", "--worker-sharing", "nobody").code == 2
    listed = cli("tenants", "ls")
    assert re.search(r"^harbour +The harbour +- +7.50 +3.00 GiB$", listed.stdout, re.MULTILINE), listed
    assert "quota: stored" in listed.stdout
    assert cli("tenants", "create", "harbour").code == 100
    assert cli("--api-key", key, "tenants", "ls").code == 100


RATES = ((0.001, 4), (0.002, 8))


def test_files_come_back_as_they_were_sent(service: Service, cli: Cli, acme: str, dataset: Path) -> None:
    uri = cli("files", "upload", str(dataset)).stdout.strip()
    assert uri.startswith(service.store.uri) and uri.endswith("/chats.jsonl")
    record = cli("files", "ls", "--json").json[0]
    assert (record["uri"], record["size"]) == (uri, dataset.stat().st_size)
    assert record["file_id"] in cli("files", "ls").stdout
    target = dataset.with_name("again.jsonl")
    assert cli("files", "download", record["file_id"], "--into", str(target)).code == 0
    assert target.read_bytes() == dataset.read_bytes()
    assert cli("files", "download", record["file_id"], "--into", str(target)).code == 2
    assert cli("--api-key", acme, "files", "download", record["file_id"], "--into", "theirs").code == 102

    Path(uri.removeprefix("file://")).write_bytes(dataset.read_bytes().replace(b"Ten", b"Two"))
    damaged = cli("files", "download", record["file_id"], "--into", str(dataset.with_name("damaged")))
    assert damaged.code == 100 and "the SHA-256 is not the file's" in damaged.stderr
    assert sorted(path.name for path in dataset.parent.iterdir()) == ["again.jsonl", "chats.jsonl"]

    assert cli("files", "rm", record["file_id"]).code == 0
    gone = cli("files", "rm", record["file_id"])
    assert gone.code == 102 and "longshore files ls" in gone.stderr
    assert cli("files", "upload", "nowhere.jsonl").code == 2


def test_a_grader_is_tried_on_samples(cli: Cli, tmp_path: Path, on_stdin: Typed) -> None:
    grader = {
        "type": "string_check",
        "name": "exact",
        "operation": "eq",
        "input": "{{ sample.output_text }}",
        "reference": "{{ item.answer }}",
    }
    file = tmp_path / "grader.json"
    file.write_text(json.dumps(grader))
    rows = [{"sample": {"output_text": text}, "item": {"answer": "12"}} for text in ("12", "13", "12")]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    answer = cli("grader", "run", str(file), str(samples))
    assert answer.code == 0 and "mean 0.6667 of 3 grades; 0 without one" in answer.stderr, answer
    assert re.search(r"samples.jsonl:3 +0 ", answer.stdout)
    first = cli("grader", "run", str(file), str(samples), "--limit", "1", "--json")
    assert [grade["grade"] for grade in first.json] == [1] and "only the first 1 samples" in first.stderr

    on_stdin('{"sample": {"output_text": "12"}}\n')  # its row has no answer to compare with
    without = cli("grader", "run", json.dumps(grader), "-")
    assert without.code == 100 and "answer" in without.stdout, without
    assert cli("grader", "run", str(file), "--text", "12", "--item", '{"answer": "12"}').code == 0
    assert cli("grader", "check", str(file)).code == 0
    for arguments, said in (
        ((str(file),), "give either SAMPLES or --text"),
        ((str(file), "--text", "12", "--item", "["), "--item: no JSON"),
        ((json.dumps(grader | {"operation": "is"}), "--text", "12"), "grader.operation: "),
        (("nowhere.json", "--text", "12"), "GRADER: nowhere.json: "),
        ((str(file), str(file)), "grader.json:1: "),
    ):
        wrong = cli("grader", "run", *arguments)
        assert wrong.code == 2 and said in wrong.stderr, wrong


def test_an_estimate_counts_and_measures(
    service: Service, cli: Cli, api: httpx.Client, tiny_model: Path, dataset: Path
) -> None:
    sft = ("estimate", "sft", "-m", str(tiny_model), "-d", str(dataset), "--epochs", "2.5", "--batch-size", "5")
    before = cli(*sft)
    assert before.code == 0 and "not measured yet" in before.stderr and "--steps 5" in before.stderr, before
    assert re.search(r"^steps +8$", before.stdout, re.MULTILINE)  # 5 + 5 + 2, twice, then 5 + 1
    assert "because no sft run of yours with" in before.stderr
    assert not api.get("/runs").json()["runs"], "nothing is started"

    for rates, changes in (((10.0, 40.0, 20.0), {}), ((900.0,), {"layout": {"dp": 2}})):
        run_id = started(api, model=tiny_model.as_uri(), **changes)
        reaches(api, run_id, "succeeded")
        metrics = ({"tokens_per_s": rate} for rate in rates)
        write_events(service, run_id, (Step(seq=n, time=n, step=n, metrics=m) for n, m in enumerate(metrics, 1)))
    answer = cli(*sft, "--json").json
    assert (answer["steps"], answer["examples"], answer["tokens_per_s"], answer["same_layout"]) == (8, 12, 20, True)
    assert answer["seconds"] == pytest.approx(answer["dataset_tokens"] * 2.5 / 20, rel=0.01)
    other = cli(*sft, "--dp", "4")
    assert other.code == 0 and "another layout" in other.stderr and "training" in other.stdout
    refused = cli(*sft, "--max-tokens", "8")
    assert refused.code == 100 and "a run would refuse this dataset" in refused.stdout
    for arguments, said in (
        (("rl", "-m", "org/tiny"), "as long as its client makes it"),
        (("session", "-m", "org/tiny"), "estimate accepts sft, dpo, distill, reward and rl"),
        (("sft", "-m", "org/tiny", "-d", str(dataset), "--wait"), "--wait"),
        (("sft", "-m", "org/tiny", "-d", str(dataset), "--lora-rank", "0"), "--lora-rank"),
    ):
        wrong = cli("estimate", *arguments)
        assert wrong.code == 2 and said in wrong.stderr, wrong


def test_an_estimate_of_rl_counts_prompts_and_samples(
    service: Service, cli: Cli, api: httpx.Client, tiny_model: Path, dataset: Path
) -> None:
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
    rl = ("estimate", "rl", "-m", str(tiny_model), "--prompts", str(dataset), "--grader", json.dumps(grader))
    rl += ("--steps", "6", "--prompts-per-step", "4", "--group-size", "3", "--max-completion-tokens", "10")
    before = cli(*rl, "--json").json
    assert (before["examples"], before["steps"], before["samples"], before["epochs"]) == (12, 6, 72, 2)
    sft = cli("estimate", "sft", "-m", str(tiny_model), "-d", str(dataset), "--json").json
    assert 0 < before["dataset_tokens"] < sft["dataset_tokens"]  # without the answers
    assert before["tokens"] == 2 * before["dataset_tokens"] + 720 and before["seconds"] is None
    run = {"prompts": {"uri": "file:///p"}, "grader": grader, "steps": 2, "prompts_per_step": 2, "group_size": 2}
    asked = {"model": tiny_model.as_uri(), "rollouts": run}
    run_id = api.post("/runs/rl", json=asked).json()["run_id"]
    for step in (1, 2):
        metrics = {"sampling_seconds": 3.0, "training_seconds": float(step)}
        status = StepStatus(step=step, key=str(step), groups="", state="done", metrics=metrics)
        service.store.put_bytes(RunKeys(run_id).step(step), status.model_dump_json().encode())
    after = cli(*rl, "--json").json
    assert after["measured_on"] == [run_id] and after["seconds"] == pytest.approx(6 * 12 * 4.5 / 4)
    assert re.search(r"^training +about 1m 21s$", cli(*rl).stdout, re.MULTILINE)
    refused = cli(*rl, "--max-tokens", "12")
    assert refused.code == 100 and "prompts are too long: the shortest has" in refused.stdout, refused


def test_a_run_is_paused_resumed_and_tried_again(cli: Cli, api: httpx.Client) -> None:
    run_id = started(api, seed=WAITS, name="night")
    reaches(api, run_id, "running")
    asked = cli("pause", run_id)
    assert asked.code == 0 and re.search("pauses at its next step|is paused", asked.stderr), asked
    watched = cli("watch", run_id)
    assert watched.code == 101 and f"longshore resume {run_id}" in watched.stdout
    wait_until(lambda: cli("ls", "--state", "paused", "--json").json, "the list says so")
    listed = cli("ls", "--state", "paused", "--kind", "sft", "--search", "night")
    assert re.search(rf"^{run_id} +paused", listed.stdout, re.MULTILINE)
    assert "there is none" in cli("ls", "--state", "paused", "--kind", "rl").stderr
    assert cli("resume", run_id, "--wait").code == 0
    told = cli("get", run_id).stdout
    assert "4 of 4" in told and "file:///models/tiny" in told and "by bootstrap" in told
    assert "workers lost" not in told, "a second lease after a pause is no lost worker"

    run_id = started(api, seed=FAILS)
    failed = cli("watch", run_id)
    assert failed.code == 100 and f"longshore retry {run_id}" in failed.stdout
    assert "train.jsonl:3: no assistant turn" in failed.stdout
    assert f"longshore resume {run_id}" not in failed.stdout, "its data would be as bad"
    wait_until(lambda: "no assistant turn" in cli("ls", "--state", "failed").stdout, "the list says why")
    again = cli("retry", run_id, "--wait", "--json")
    assert again.code == 100 and again.json["run_id"] != run_id, again
    assert cli("get", again.json["run_id"], "--json").json["run"]["seed"] == FAILS


def test_who_follows_a_run_is_told_how_long_it_takes(service: Service, cli: Cli, api: httpx.Client) -> None:
    run_id = started(api, seed=WAITS)
    wait_until(lambda: api.get(f"/runs/{run_id}").json()["phase"] == "training", "it trains")
    events: list[Event] = [Step(seq=n, time=1000.0 + 10 * n, step=n, metrics={"loss": 0.5}) for n in (1, 2)]
    events.append(Evaluated(seq=3, time=1021.0, step=2, metrics={"eval_loss": 0.5}))
    write_events(service, run_id, events)
    answer = cli("watch", run_id, "--timeout", "0.1")
    assert answer.code == 101
    assert re.search(r"evaluated after step 2: eval_loss 0.5, about (59m|1h)", answer.stderr), answer
    write_events(service, run_id, [*events, Cancelled(seq=4, time=1022.0, step=2, device="released")])
    cli("cancel", run_id)
    assert "cancelled after" not in cli("logs", run_id).stdout, "a pause would be told as a cancel"


def test_a_run_that_waits_has_its_place_in_the_queue_and_ends_at_once(cli: Cli, api: httpx.Client) -> None:
    run_id = started(api, seed=QUEUES)
    place = r"waiting for worker, place \d+ in the queue"
    wait_until(lambda: re.search(rf"^{run_id} +running +{place}", cli("ls").stdout, re.MULTILINE), "the list says so")
    assert re.search(place, cli("get", run_id).stdout)
    cancelled = cli("cancel", run_id)
    assert re.search("ends at once: no step runs|is cancelled", cancelled.stderr), cancelled


def test_what_the_service_refuses_is_said_of_its_option(cli: Cli, dataset: Path) -> None:
    for command in ("validate", "preview", "estimate sft", "submit sft"):
        for model in ("nomodel", "file:///no/such/model"):
            if command.startswith("submit") and "://" in model:
                continue  # a run is accepted before its model is looked at
            wrong = cli(*command.split(), "-m", model, "-d", str(dataset))
            assert wrong.code == 2 and "--model: " in wrong.stderr, (command, wrong)
    named = cli("submit", "sft", "-m", "org/tiny", "-d", str(dataset), "--name", "Bad Name")
    assert named.code == 2 and "--name: a name has at most 63 lower-case letters" in named.stderr, named
    unknown = cli("webhook", "rm", "wh-nope")
    assert unknown.code == 102 and "there is no webhook wh-nope" in unknown.stderr, unknown


def test_the_shell_completes_runs_and_states(cli: Cli, api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = started(api)

    def completed(words: str) -> list[str]:
        monkeypatch.setenv("_LONGSHORE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"longshore {words}")
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
        answer = cli()
        assert not answer.stderr
        return answer.stdout.split()

    assert run_id in wait_until(lambda: completed(f"get {run_id[:10]}"), "the index has it")
    assert completed("get dpo-") == []
    assert completed("--api-url http://127.0.0.1:1 get sft-") == []
    assert completed("ls --state p") == ["paused"]
    assert completed("keys r") == ["revoke"]


def test_runs_are_compared_by_what_differs(cli: Cli, api: httpx.Client) -> None:
    run_ids = [started(api, learning_rate=rate, trainable={"kind": "lora", "rank": rank}) for rate, rank in RATES]
    for run_id in run_ids:
        reaches(api, run_id, "succeeded")
    told = cli("compare", *run_ids)
    assert told.code == 0, told
    assert re.search(r"^learning_rate +0.001 +0.002$", told.stdout, re.MULTILINE)
    assert re.search(r"^trainable.rank +4 +8$", told.stdout, re.MULTILINE)
    assert re.search(r"^loss +1.5 +1.5$", told.stdout, re.MULTILINE)
    assert "batch_size" not in told.stdout, "it is the same in both"
    found = cli("compare", *run_ids, "--json").json
    assert found["settings"] == {"learning_rate": [0.001, 0.002], "trainable.rank": [4, 8]}
    assert cli("compare", run_ids[0], "sft-none").code == 102


def test_help_is_in_groups_and_nothing_of_it_is_cut(cli: Cli) -> None:
    for kind in ("sft", "dpo", "distill", "reward", "rl"):
        told = cli("submit", kind, "--help").stdout
        first, rest = told.split("What is set first:")[1].split("The adapter:")
        assert all(f"--{name}" in first for name in ("model", "learning-rate", "lora-rank", "name")), first
        assert " --lora-dora " in rest and " --tp " in rest.split("Machines:")[1]
        assert " --wait " in rest.split("This command:")[1]
    for group in ((), ("submit",), ("models",), ("keys",), ("schedule",)):
        assert "..." not in cli(*group, "--help").stdout.split("Examples")[0].replace("[ARGS]...", "")


def test_every_command_is_in_the_help_and_speaks_json(cli: Cli) -> None:
    tree = typer.main.get_command(app)
    headed = [name for names in HEADINGS.values() for name in names]
    assert sorted(headed) == sorted(tree.commands), "a command is under no heading, or a heading's is none"
    told = cli("--help").stdout
    assert all(re.search(rf"^  {name} +\S", told, re.MULTILINE) for name in headed)
    assert all(f"{heading}:" in told for heading in HEADINGS)
    silent = {"longshore dev", "longshore logs", "longshore db upgrade"}  # they print lines, or nothing
    for path, command in leaves("longshore", tree):
        assert command.help, path
        options = {option for parameter in command.params for option in parameter.opts}
        assert ("--json" in options) == (path not in silent), path


def leaves(path: str, command: object) -> Iterator[tuple[str, object]]:
    for name in getattr(command, "commands", {}):
        child = command.get_command(None, name)  # type: ignore[attr-defined]
        if hasattr(child, "commands"):
            yield from leaves(f"{path} {name}", child)
        else:
            yield f"{path} {name}", child
