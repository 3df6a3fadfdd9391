"""The same spine with its store on S3: nothing lies on a shared disk."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from longshore.client import Pending
from longshore.commands import Datum
from longshore.events import Step
from longshore.fields import Fence
from longshore.training import Layout, Lora, SessionRun
from service.accounts.tenants import bytes_of_rows
from service.database.engine import Database
from shared.jobs.job import Job
from shared.runs.events import read_run_events
from shared.storage.artifacts import sha256_file
from shared.storage.paths import RunKeys, tenant_folder
from shared.storage.store import ObjectStore, open_store
from shared.storage.stored_bytes import SHARED
from tests.conftest import S3Server
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.runs import Groups, jsonl, pair, train
from tests.end_to_end.stack import Answer, Stack, started, wait_until
from tests.end_to_end.test_secrets import Watch
from tests.end_to_end.victims import halt
from tests.megatron_worker.launch import fork_ranks

pytestmark = [pytest.mark.slow, pytest.mark.deep]


@pytest.fixture(scope="module")
def s3_settings(s3_server: S3Server) -> dict[str, str]:
    return {
        "LONGSHORE_STORE_URI": f"{s3_server.uri}/stack",
        "LONGSHORE_S3__ENDPOINT_URL": s3_server.endpoint_url,
        "LONGSHORE_S3__REGION": "us-east-1",
        "LONGSHORE_WANDB_MODE": "disabled",
        # Whatever has ended may go, when a test asks for it.
        **{f"LONGSHORE_RETENTION__{kind}_DAYS": "0" for kind in ("CHECKPOINTS", "DATA", "SAMPLES", "LOGS", "SESSIONS")},
    }


@pytest.fixture(scope="module")
def s3_stack(s3_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(tmp_path_factory.mktemp("s3") / "stack", **QUICK, **s3_settings) as stack:
        yield stack
    assert stack.processes() == [], "stopped, it leaves no process"


@pytest.fixture(scope="module")
def watched_run(s3_stack: Stack, sft_options: list[str]) -> tuple[dict, Watch]:
    """A run, and who was seen while it went on."""
    with Watch(s3_stack) as watch:
        return s3_stack.cli(*sft_options, "--wait").json, watch


@pytest.fixture(scope="module")
def s3_store(s3_server: S3Server, s3_settings: dict[str, str]) -> ObjectStore:
    return open_store(s3_settings["LONGSHORE_STORE_URI"], s3_server.settings)


def weights_sha256(store: ObjectStore, adapter: str) -> str:
    key = adapter.removeprefix(f"{store.uri}/") + "/adapter_model.safetensors"
    return hashlib.sha256(store.get_bytes(key)).hexdigest()


def told_of_s3(watch: Watch) -> set[str]:
    return {kind for kind, seen in watch.seen.items() if "S3" in seen.secrets}


def test_a_run_whose_store_is_s3(
    s3_stack: Stack,
    s3_store: ObjectStore,
    s3_settings: dict[str, str],
    watched_run: tuple[dict, Watch],
    undisturbed: Answer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither who trains nor who reads the data is told how to open the store; by hand the operator's own way does."""
    answer, watch = watched_run
    assert {"worker", "sandbox"} <= watch.seen.keys()
    assert told_of_s3(watch) == {"web service", "control host", "GPU host", "sampler host"}
    s3_stack.cli("download", answer["run_id"], "--into", str(tmp_path / "adapter"))
    assert answer["adapter"].startswith(s3_store.uri)
    wanted = sha256_file(Path(undisturbed.json["adapter"].removeprefix("file://")) / "adapter_model.safetensors")
    assert weights_sha256(s3_store, answer["adapter"]) == wanted
    assert sha256_file(tmp_path / "adapter" / "adapter_model.safetensors") == wanted
    job = tmp_path / "job.json"
    job.write_bytes(s3_store.get_bytes(RunKeys(answer["run_id"]).job("000001", Fence(epoch=1))))
    assert Job.model_validate_json(job.read_bytes()).plan.model.uri.startswith("s3://")
    for name, value in (s3_settings | {"LONGSHORE_ROOT": str(tmp_path / "root")}).items():
        monkeypatch.setenv(name, value)
    fork_ranks("megatron_worker", "--once", str(job), "--into", str(tmp_path / "by-hand"), num_ranks=1, timeout_s=600)
    assert sha256_file(sorted((tmp_path / "by-hand").rglob("adapter_model.safetensors"))[-1]) == wanted


def test_a_session_goes_back_to_a_state_that_s3_holds(s3_stack: Stack, tiny_model: Path) -> None:
    """On two ranks, none of which is told how to open the store."""
    data = (Datum(tokens=tuple(range(3, 15))),)
    with s3_stack.client() as client, Watch(s3_stack) as watch:
        request = SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=64, layout=Layout(tp=2))
        session = client.sessions.open(request)

        def train() -> Pending:
            session.forward_backward(data)
            session.optim_step(0.05)
            return session.forward(data)

        train().result(900)
        saved = session.save_state().result(900)
        before, after = session.forward(data).result(900).data, train().result(900).data
        session.load_state(f"{session.id}:step-{saved.step}").result(900)
        assert session.forward(data).result(900).data == before != after
        assert train().result(900).data == after
        session.close()
    assert told_of_s3(watch) & {"worker", "sandbox", "any other"} == set() and "worker" in watch.seen


def _num_checkpoints(store: ObjectStore, run_id: str) -> int:
    return sum(info.key.endswith("/manifest.json") for info in store.list(f"{RunKeys(run_id).checkpoints}/"))


def _stored_bytes(stack: Stack, store: ObjectStore, tenant: str) -> int:
    """What a tenant stores that is alone here."""
    own = ("runs/", *SHARED, f"{tenant_folder(tenant)}/")
    with closing(Database(f"sqlite:///{stack.root}/service/longshore.db")) as database:
        records = database.write(lambda session: bytes_of_rows(session, tenant))
    return records + sum(info.size for info in store.list("") if info.key.startswith(own))


@pytest.fixture
def cut_runs(
    s3_stack: Stack, s3_store: ObjectStore, rollout_options: list[str], tiny_model: Path, tmp_path: Path
) -> list[str]:
    """A run on preferences, one of a reward model, and one that samples its own rollouts: cancelled in their midst."""
    pairs = jsonl(tmp_path / "pairs.jsonl", [pair(number) for number in range(32)])
    data = ("--json", "--model", str(tiny_model), "--dataset", str(pairs), "--max-tokens", "256", "--lora-rank", "4")
    steps = ("--steps", "2000", "--batch-size", "8", "--checkpoint-every", "10")
    found = []
    for options in (("submit", "dpo", *data, *steps), ("submit", "reward", *data, *steps), rollout_options):
        found.append(run_id := s3_stack.cli(*options).json["run_id"])
        wait_until(lambda run_id=run_id: _is_under_way(s3_store, run_id), "a step that is kept", every_s=0.02)
        s3_stack.cli("cancel", run_id)
        s3_stack.cli("watch", run_id, check=False)
        assert s3_stack.cli("get", run_id, "--json").json["status"] == "cancelled"
    return found


def _is_under_way(store: ObjectStore, run_id: str) -> bool:
    """An RL run has a step on record, any other a checkpoint."""
    if run_id.startswith("rl-"):
        return store.head(RunKeys(run_id).step(1)) is not None
    return _num_checkpoints(store, run_id) > 0


def _steps(store: ObjectStore, run_id: str) -> list[int]:
    """The optimizer steps of a run that are on record: what was logged before it was cancelled may go, too."""
    return [each.event.step for each in read_run_events(store, run_id)[0] if isinstance(each.event, Step)]


def test_what_policies_let_go_is_gone_and_whatever_is_needed_goes_on(
    s3_stack: Stack,
    s3_store: ObjectStore,
    watched_run: tuple[dict, Watch],
    sft_options: list[str],
    rl_options: list[str],
    cut_runs: list[str],
    groups: Groups,
    undisturbed: Answer,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Everything that has ended may go at once. Runs of each kind go on, are resumed, downloaded, asked, made again."""
    stack, data = s3_stack, (Datum(tokens=tuple(range(3, 15))),)
    wanted = sha256_file(Path(undisturbed.json["adapter"].removeprefix("file://")) / "adapter_model.safetensors")
    done = watched_run[0]["run_id"]
    cut = stack.cli(*sft_options).json["run_id"]
    wait_until(lambda: _num_checkpoints(s3_store, cut) > 1, "two checkpoints")
    halt(stack, cut, "cancel")
    rl = stack.cli(*rl_options).json["run_id"]
    train(stack, rl, groups, 1)
    stack.cli("cancel", rl)
    for run_id in (cut, rl):
        stack.cli("watch", run_id, check=False)
    with stack.client() as client:
        session = client.sessions.open(SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=64))
        session.forward_backward(data)
        session.optim_step(0.05)
        saved = session.save_state().result(900)
        before = session.forward(data).result(900).data
        dry = stack.cli("gc", "--dry-run", "--json").json["report"]
        report = stack.cli("gc", "--json").json["report"]
        assert report["num_withdrawn"] == 0
        assert {row["what"] for row in report["freed"]} == {row["what"] for row in dry["freed"]}
        assert {"checkpoints", "data", "logs"} <= {row["what"] for row in report["freed"]}
        assert list(s3_store.list("tokenized/")) == [] and _num_checkpoints(s3_store, cut) == 1
        session.load_state(f"{session.id}:step-{saved.step}").result(900)
        assert session.forward(data).result(900).data == before
        session.close()
        wait_until(lambda: session.status().state == "succeeded", "the session's end")
    stack.cli("gc", "--json")
    assert stack.cli("usage", "--json").json["stored_bytes"] == _stored_bytes(stack, s3_store, "default")
    assert weights_sha256(s3_store, stack.cli("resume", cut, "--wait", "--json").json["adapter"]) == wanted
    for run_id in cut_runs:
        ended = stack.cli("resume", run_id, "--wait", "--json").json
        assert ended["status"] == "succeeded"
        steps = _steps(s3_store, run_id)
        assert steps[0] > 1 and steps == [*range(steps[0], steps[-1] + 1)], f"{run_id} went on from its checkpoint"
        stack.cli("download", run_id, "--into", str(tmp_path / run_id))
        assert sha256_file(tmp_path / run_id / "adapter_model.safetensors") == weights_sha256(
            s3_store, ended["adapter"]
        )
    stack.cli("resume", rl)
    assert train(stack, rl, groups, 2)["policy_version"] == 2
    assert stack.cli("rm", rl, check=False).code == 100
    stack.cli("finish", rl)
    again = stack.cli(*sft_options, "--wait").json
    assert weights_sha256(s3_store, again["adapter"]) == wanted
    stack.cli("rm", done)
    assert stack.cli("get", done, check=False).code == 102
    stack.cli("download", f"{done}:v1", "--into", str(tmp_path / "adapter"))
    assert sha256_file(tmp_path / "adapter" / "adapter_model.safetensors") == wanted
    said = stack.cli("chat", done, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
    assert said.code == 0 and said.stdout.strip(), said
