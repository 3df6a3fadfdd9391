"""The command line as a user runs it, and what the options of `longshore submit` make of a run."""

import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from longshore.events import Step
from longshore.fields import Fence
from longshore.views import RunStatus
from service.cli.command import waiting
from shared.storage import artifacts
from shared.storage.paths import RunKeys
from tests.service.conftest import LONGSHORE, Service
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


def test_wait_json_prints_one_object(service: Service, options, tmp_path: Path) -> None:
    answer = service.cli(*options, "--wait", "--json")
    assert answer.code == 0, answer
    assert answer.json["status"] == "succeeded"
    assert answer.json["steps"] == 4
    assert answer.json["metrics"] == {"loss": 1.5}
    assert answer.json["adapter"] is None  # the stand-in publishes nothing
    assert answer.json["run_id"] in answer.stderr
    run = service.cli("get", answer.json["run_id"], "--json").json["run"]
    assert run["model"] == (tmp_path / "model").as_uri()
    assert run["dataset"]["uri"].startswith(service.store.uri)
    assert run["dataset"]["uri"].endswith("/train_set.jsonl")


def test_a_run_that_does_not_end_in_time_ends_with_101(service: Service, options) -> None:
    answer = service.cli(*options, "--seed", str(WAITS), "--wait", "--timeout", "0.5", "--json")
    assert answer.code == 101
    assert answer.json["status"] == "running"
    run_id = answer.json["run_id"]
    assert f"longshore watch {run_id}" in answer.stderr
    assert service.cli("cancel", run_id).code == 0
    assert service.cli("watch", run_id).code == 103
    assert service.cli("cancel", run_id).code == 100
    assert service.cli("resume", run_id, "--wait").code == 0


def test_a_terminal_shows_a_line_with_a_bar(service: Service, options) -> None:
    run_id = service.cli(*options, "--seed", str(WAITS)).stdout.strip()

    def training() -> dict | None:
        view = service.cli("get", run_id, "--json").json
        return view if view["phase"] == "training" else None

    # An hour by Temporal's clock, which need not be this machine's.
    left_s = wait_until(training, "the run trains")["estimated_end"] - time.time()
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    environment = service.environment | {"TERM": "xterm", "NO_COLOR": "1"}
    command = [LONGSHORE, "watch", run_id, "--timeout", "0.5"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=end, stdin=subprocess.DEVNULL)
    os.close(end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    service.cli("cancel", run_id)
    assert done.returncode == 101
    left = re.search(r"training  ━+╸? *  1/4(?:  (?P<left>[\ddhms ]+) left)?", shown)
    assert left, shown
    if abs(left_s - 3600) < 60:
        assert re.fullmatch(r"59m( \d+s)?|1h", left["left"] or ""), shown
    else:
        assert (left["left"] is not None) == (left_s > 0), shown
    assert "queued" not in shown


def test_ctrl_c_detaches_and_the_run_goes_on(service: Service, options) -> None:
    watching = subprocess.Popen(
        [LONGSHORE, *options, "--seed", str(WAITS), "--wait"],
        env=service.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a terminal starts it: what a shell starts in the background is deaf to Ctrl-C, and so are its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert watching.stderr is not None
    run_id = watching.stderr.readline().split()[-1]
    assert run_id.startswith("sft-")
    watching.stderr.readline()  # its phase: it follows the run now
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=300)
    assert watching.returncode == 130
    assert f"longshore watch {run_id}" in said
    assert "Traceback" not in said
    assert service.cli("get", run_id, "--json").json["status"] == "running"
    service.cli("cancel", run_id)


def test_an_unknown_run_ends_with_102(service: Service) -> None:
    for command in ("get", "watch", "logs", "events", "metrics", "checkpoints", "cancel", "resume", "download"):
        answer = service.cli(command, "sft-none")
        assert (command, answer.code) == (command, 102)
        assert answer.stderr.startswith("error: there is no run sft-none")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (("--json", "get", "sft-none"), 102, "there is no run sft-none"),
        (("get", "--json"), 2, "Missing argument"),
        (("ls", "--limit", "many", "--json"), 2, "--limit"),
        (("nothing", "--json"), 2, "No such command"),
        (("ls", "--json", "--api-url", "x"), 2, "--api-url"),
        (("download", "sft-none", "--into", "/proc/none/adapter", "--json"), 100, "/proc/none"),
    ],
)
def test_an_error_is_a_json_document_where_one_is_asked_for(
    service: Service, command: tuple[str, ...], code: int, message: str
) -> None:
    answer = service.cli(*command)
    assert answer.code == code and message in answer.stderr and "Traceback" not in answer.stderr
    error = answer.json["error"]
    assert message in error["message"] and error["exit_code"] == code
    assert service.cli(*(word for word in command if word != "--json")).stdout == ""


def test_events_metrics_and_logs(service: Service, options) -> None:
    run_id = service.cli(*options, "--wait", "--json").json["run_id"]
    refused = service.cli("steps", run_id, "--follow")
    assert refused.code == 2 and f"longshore metrics {run_id}" in refused.stderr, refused
    steps = [Step(seq=n, time=float(n), step=n, metrics={"loss": 3.0 - n}) for n in (1, 2)]
    log = "".join(step.model_dump_json() + "\n" for step in steps).encode()
    service.store.put_bytes(RunKeys(run_id).log("000001", Fence(epoch=1)), log)
    lines = [json.loads(line) for line in service.cli("events", run_id).stdout.splitlines()]
    assert [line["event"]["step"] for line in lines] == [1, 2]
    after = service.cli("events", run_id, "--after", lines[0]["cursor"]).stdout
    assert json.loads(after)["event"]["step"] == 2
    rows = service.cli("metrics", run_id, "--json").json["steps"]
    assert [row["metrics"]["loss"] for row in rows] == [2.0, 1.0]
    assert "step 2: loss 1" in service.cli("logs", "-f", run_id).stdout


def test_what_takes_long_is_told_until_it_has_come(capsys: pytest.CaptureFixture) -> None:
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return told.count("waiting for a sampler: ") >= 2

    with waiting("waiting for a sampler", every_s=0.05) as has_come:
        wait_until(is_told, "it is told again and again")
        has_come()
    assert re.search(r"waiting for a sampler: \d+ s so far", told)


def test_a_download_is_checked(service: Service, options, tmp_path: Path) -> None:
    run_id = service.cli(*options, "--wait", "--json").json["run_id"]
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    artifacts.seal(folder)
    artifact = artifacts.upload_artifact(service.store, f"tenants/default/adapters/{run_id}/v000001", folder)
    result = RunStatus.model_validate_json(service.store.get_bytes(RunKeys(run_id).result))
    result = result.model_copy(update={"adapter": artifact.uri, "adapter_sha256": artifact.sha256, "version": 1})
    result = result.model_copy(update={"name": "clerk"})
    service.store.put_bytes(RunKeys(run_id).result, result.model_dump_json().encode())
    service.rebuild()
    told = service.cli("watch", run_id)
    assert f"published: {result.name}:v1\n" in told.stdout and "file://" not in told.stdout
    assert f'next: longshore chat {result.name}:v1 "…"' in told.stdout

    target = tmp_path / "here"
    assert service.cli("download", run_id, "--into", str(target)).code == 0
    assert (target / "adapter_model.safetensors").read_bytes() == b"weights"
    assert service.cli("download", run_id, "--into", str(target)).code == 2

    published = Path(artifact.uri.removeprefix("file://")) / "adapter_model.safetensors"
    published.write_bytes(b"WEIGHTS")
    damaged = service.cli("download", run_id, "--into", str(tmp_path / "there"))
    assert damaged.code == 100
    assert "adapter_model.safetensors: the SHA-256 is not the manifest's" in damaged.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "here", "model", "train set.jsonl"]


@pytest.mark.parametrize(
    ("environment", "code", "begins", "advice"),
    [
        ({"LONGSHORE_API_URL": "http://127.0.0.1:1"}, 100, "no Longshore service answers at http://127.0.0.1:1", "dev"),
        ({"LONGSHORE_API_KEY": "wrong"}, 100, "this API key is not known here", "LONGSHORE_API_KEY"),
        ({"LONGSHORE_HEARTBEAT_TIMEOUT_S": "soon"}, 2, "LONGSHORE_HEARTBEAT_TIMEOUT_S: ", "LONGSHORE_ variable"),
        ({"LONGSHORE_DOWNLOAD__FILE_ROOTS": '["/"'}, 2, "the settings cannot be read: ", "LONGSHORE_ variable"),
        ({"XDG_CONFIG_HOME": "BROKEN"}, 2, "the settings cannot be read: ", ""),
    ],
)
def test_what_keeps_a_command_from_the_service_is_said_in_two_lines(
    service: Service, tmp_path: Path, environment: dict[str, str], code: int, begins: str, advice: str
) -> None:
    (tmp_path / "longshore").mkdir()
    (tmp_path / "longshore" / "config.toml").write_text('api_url = "http://')
    answer = service.cli("ls", **{name: value.replace("BROKEN", str(tmp_path)) for name, value in environment.items()})
    said, *more = answer.stderr.splitlines()
    assert answer.code == code and said.startswith(f"error: {begins}"), answer
    assert len(more) <= 1 and advice in "".join(more) and "Traceback" not in answer.stderr


def test_doctor_says_what_is_well(service: Service) -> None:
    answer = service.cli("doctor", "--json", LONGSHORE_ROOT=str(service.settings.root_path))
    verdicts = {check["name"]: check["verdict"] for check in answer.json}
    assert {name: verdicts[name] for name in ("Python", "service", "store", "Temporal program")} == {
        "Python": "ok",
        "service": "ok",
        "store": "ok",
        "Temporal program": "ok",
    }
    told = {check["name"]: check for check in answer.json}
    with service.http() as api:
        hosts = {each["role"]: each for each in api.get("/hosts").json()}
    assert told["training"]["verdict"] == "ok", told["training"]
    assert hosts.keys() == {"control", "gpu", "sampler"} and hosts["control"]["num_polling"]
    for role, each in hosts.items():
        assert f"{each['num_polling']} {role} ({each['queue']})" in told["hosts"]["text"]
    assert (told["hosts"]["verdict"] == "ok") == all(each["num_polling"] for each in hosts.values())
    assert told["hosts"]["verdict"] == "ok" or "service.host --role" in told["hosts"]["advice"]
    assert told["isolation"]["verdict"] in ("ok", "warn") and told["isolation"]["text"].endswith("chat templates")
    away = service.cli("doctor", LONGSHORE_API_URL="http://127.0.0.1:1")
    assert away.code == 100
    assert "fail  service" in away.stdout


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "temporalio", "pydantic", "httpx", "fastapi", "rich", "boto3", "psutil")
    program = (
        "import sys; sys.argv = ['longshore', '--help']\n"
        "from service.cli.command import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([str(Path(LONGSHORE).parent / "python"), "-c", program], capture_output=True, text=True)
    assert "submit" in done.stdout
    assert done.stderr.strip() == "[]"


def test_watching_survives_a_service_that_is_away(service: Service, options) -> None:
    """The service behind the address dies and another takes its place: the follower only says so."""
    from tests.service.conftest import serving

    run_id = service.cli(*options, "--seed", str(WAITS)).stdout.strip()
    port = 0
    with serving(service.settings) as first:
        port = int(first.url.rpartition(":")[2])
        watching = subprocess.Popen(
            [LONGSHORE, "watch", run_id, "--json"],
            env=service.environment | {"LONGSHORE_API_URL": first.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watching.stderr is not None
        watching.stderr.readline()
        watching.stderr.readline()
    time.sleep(1)
    assert service.cli("cancel", run_id).code == 0
    with serving(service.settings, port):
        out, _ = watching.communicate(timeout=300)
    assert json.loads(out)["status"] == "cancelled"
    assert watching.returncode == 103


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--learning-rate", "-1"], "--learning-rate: "),
        (["--lora-rank", "0"], "--lora-rank: "),
        (["--samples", "20"], "--samples: "),
        (["--lora-targets", "q_proj,x_proj"], "--lora-targets: "),
        (["--epochs", "1"], "exactly one of epochs and steps"),
        (["--lora-target-pattern", "(q_proj"], "--lora-target-pattern: no regular expression"),
        (["--lora-rank-pattern", '{"q_proj": 0}'], "--lora-rank-pattern: "),
        (["--full", "--lora-rank", "4"], "--full excludes --lora-rank"),
        (["--prompt-field", "q"], "go together"),
        (["--model", "./nowhere"], "--model: there is no folder ./nowhere"),
        (["--dataset", "nowhere.jsonl"], "--dataset: there is no file nowhere.jsonl"),
        (["--eval-dataset", "."], "--eval-dataset: . is a folder"),
        (["--schedule", "sometimes"], "--schedule"),
        (["--timeout", "3"], "--timeout goes with --wait"),
        (["--colour", "red"], "--colour"),
        (["--format", "preference"], "--dataset: rows of the format preference are preference pairs"),
    ],
)
def test_wrong_options_end_with_2_and_name_the_option(service: Service, options, extra, said) -> None:
    answer = service.cli(*options, *extra)
    assert answer.code == 2, answer
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_an_objective_of_preferences_is_chosen_and_reads_its_own_options_alone(service: Service) -> None:
    options = ["submit", "dpo", "--model", "org/tiny", "--dataset", "s3://bucket/rows.jsonl", "--objective"]
    given = ["kto", "--desirable-weight", "1.5", "--format", "chat"]
    run = service.cli("get", service.cli(*options, *given).stdout.strip(), "--json").json["run"]
    assert (run["objective"], run["desirable_weight"], run["dataset"]["format"]) == ("kto", 1.5, "chat")
    run = service.cli("get", service.cli(*options, "simpo", "--gamma", "1").stdout.strip(), "--json").json["run"]
    assert (run["objective"], run["gamma"], run["reference"]) == ("simpo", 1.0, None)
    for extra, said in (
        (["ppo"], "--objective"),
        (["orpo", "--reference", "base"], "reference would be ignored by orpo"),
        (["ipo", "--desirable-weight", "2"], "desirable_weight would be ignored by ipo"),
        (["ipo", "--prompt-field", "p", "--completion-field", "c"], "--dataset: prompt_field and completion_field"),
        (["kto", "--format", "text"], "--dataset: rows of the format text have no answers"),
    ):
        refused = service.cli(*options, *extra)
        assert refused.code == 2 and said in refused.stderr, refused


def test_a_run_of_its_own_rollouts_has_what_its_options_say(service: Service, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hm?"}]}\n')
    grader = {"type": "string_check", "name": "exact", "operation": "eq", "input": "a", "reference": "b"}
    file = tmp_path / "grader.json"
    file.write_text(json.dumps(grader))
    rl = [
        *("submit", "rl", "--model", "org/tiny", "--prompts", str(rows), "--grader", str(file), "--steps", "3"),
        *("--group-size", "4", "--stop", "END", "--stop", "STOP", "--temperature", "0.7", "--off-policy-steps", "2"),
        *("--eval-prompts", "s3://bucket/held-out.jsonl", "--eval-every", "2", "--target", "0.9"),
        *("--layout", "tp2-sp-pp2-dp2"),
    ]
    run = service.cli("get", service.cli(*rl).stdout.strip(), "--json").json["run"]
    rollouts = run["rollouts"]
    assert rollouts["prompts"]["uri"].endswith("prompts.jsonl") and rollouts["grader"]["operation"] == "eq"
    assert (rollouts["steps"], rollouts["group_size"], rollouts["stop"]) == (3, 4, ["END", "STOP"])
    assert (run["temperature"], rollouts["off_policy_steps"]) == (0.7, 2)
    held_out = rollouts["held_out"]
    assert (held_out["prompts"]["uri"], held_out["every_steps"], held_out["target"]) == (
        *("s3://bucket/held-out.jsonl", 2),
        0.9,
    )
    assert (run["layout"]["tp"], run["layout"]["sp"], run["layout"]["pp"], run["layout"]["dp"]) == (2, True, 2, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--prompts", "p.jsonl", "--steps", "1"), "grader is missing"),
        (("--group-size", "4"), "--prompts is missing"),
        (("--prompts", "p.jsonl", "--grader", "{}", "--target", "1"), "--eval-prompts is missing"),
        (("--prompts", "p.jsonl", "--grader", "no.json"), "--grader: no.json: "),
        (("--prompts", "p.jsonl", "--grader", '{"type": "x"}', "--steps", "1"), "--grader: "),
        (("--wait",), "--wait goes with --prompts"),
        (("--layout", "tp2-zz2"), "'zz2' is no degree"),
        (("--layout", "tp2", "--tp", "2"), "--layout excludes --tp"),
    ],
)
def test_rollouts_that_cannot_be_are_refused_before_anything_is_sent(
    service: Service, given: tuple[str, ...], said: str
) -> None:
    refused = service.cli("submit", "rl", "--model", "org/tiny", *given)
    assert refused.code == 2 and said in refused.stderr, refused
