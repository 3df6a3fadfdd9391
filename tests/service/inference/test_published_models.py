"""What was published: named, asked for as a reward model, deleted by version or name, and nothing beside it."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.publishing.publish import Claim, claim_version
from longshore.dataset_runs import DPORun, RewardRun, SFTRun
from longshore.fields import Artifact
from longshore.runs import RLRun, RunRecord
from service.inference.published_models import NamedModels, PublishedModels
from shared.errors import InvalidInput, NotFound
from shared.models.peft import WEIGHTS
from shared.runs.acceptance import check_startable, parse_grader
from shared.settings import SamplingSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys, published_version, version_claim
from shared.storage.store import LocalStore, ObjectStore, uri_of
from tests.service.conftest import KEY, Cli, Service, put_versions, sft
from tests.workflows.published import BASE
from tests.workflows.published import publish as made

NAMES = {"harbour": 3, "harbour-2": 1}
NOWHERE = Artifact(uri="file:///models/tiny", sha256="0" * 64)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = LocalStore(tmp_path / "store")
    publish(store, tmp_path)
    return store


def publish(store: ObjectStore, folder: Path) -> None:
    for name, num_versions in NAMES.items():
        put_versions(store, "default", name, folder / "artifact", num_versions, num_versions)


def test_a_version_goes_and_the_others_stay(store: ObjectStore) -> None:
    models = PublishedModels(store)
    models.delete_model("default", "harbour:v3")
    assert (models.versions("default", "harbour"), models.find("default", "harbour").version) == ([1, 2], 2)
    with pytest.raises(NotFound):
        models.delete_model("default", "harbour:v3")
    assert store.head(version_claim("default", "adapters", "harbour", 3)), "its number is not given again"


def test_a_name_goes_with_all_its_versions_and_no_longer_name(store: ObjectStore) -> None:
    models = PublishedModels(store)
    models.delete_model("default", "harbour")
    assert (models.versions("default", "harbour"), models.versions("default", "harbour-2")) == ([], [1])
    assert not [item.key for item in store.list("tenants/") if "/harbour/" in item.key and "/claims/" not in item.key]
    with pytest.raises(NotFound):
        models.find("default", "harbour")


def test_what_is_another_tenants_or_a_runs_own_stays(store: ObjectStore) -> None:
    models = PublishedModels(store)
    with pytest.raises(NotFound):
        models.delete_model("acme", "harbour")
    with pytest.raises(InvalidInput, match="run"):
        models.delete_model("default", "sft-0123456789abcdef0:step-3")
    assert models.versions("default", "harbour") == [1, 2, 3]


def test_a_client_deletes_a_model(service: Service, tmp_path: Path) -> None:
    publish(service.store, tmp_path)
    with service.http() as admin:
        asks = admin.post("/keys", json={"title": "asks", "scopes": ["inference"]}).json()["key"]

    def delete(key: str) -> httpx.Response:
        return httpx.delete(f"{service.url}/v1/models/harbour", headers={"authorization": f"Bearer {key}"})

    assert delete(asks).status_code == 403
    assert delete(KEY).json() == {"id": "harbour", "object": "model", "deleted": True}
    assert delete(KEY).status_code == 404


def test_a_request_sent_again_is_the_same_though_a_newer_version_came(service: Service, tmp_path: Path) -> None:
    """A name without a version is the newest: of two attempts at one job the second finds the first's."""

    def sent(seed: int = 1) -> httpx.Response:
        request = {"model": "tide", "training_file": f"file://{tmp_path}/chats.jsonl", "seed": seed}
        headers = {"authorization": f"Bearer {KEY}", "idempotency-key": "tide, tonight"}
        return httpx.post(f"{service.url}/v1/fine_tuning/jobs", json=request, headers=headers)

    def publish_models(num: int) -> None:
        put_versions(service.store, "default", "tide", tmp_path / "artifact", num, num, kind="models")

    publish_models(1)
    first = sent().json()
    publish_models(2)
    assert sent().json()["id"] == first["id"]
    assert sent(seed=2).json()["error"]["param"] == "Idempotency-Key", "another request"


def test_names_are_listed_shown_and_deleted(service: Service, cli: Cli, tmp_path: Path) -> None:
    name = "pier.9"
    for kind, file in (("models", "model.safetensors"), ("adapters", WEIGHTS)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / file).write_bytes(b"weights")
        made(service.store, tmp_path / kind, name, NOWHERE, kind=kind)
    assert "pier.9:v1 " in cli("models", "ls").stdout
    [listed] = [view for view in cli("models", "ls", "--json").json if view["name"] == name]
    assert (listed["kind"], listed["version"], listed["versions"], listed["base"]) == ("adapter", 1, [1], BASE)
    shown = cli("models", "show", f"{name}:v1", "--json").json
    assert [file["path"] for file in shown["files"]] == [WEIGHTS] and shown["num_bytes"] == 7
    assert WEIGHTS in cli("models", "show", name).stdout
    assert cli("models", "rm", name).code == 0
    assert cli("models", "show", name, "--json").json["kind"] == "model", "it was behind the adapter of its name"
    assert cli("models", "rm", name).code == 0
    gone = cli("models", "show", name)
    assert gone.code == 102 and "longshore models ls" in gone.stderr, gone
    assert cli("download", name, "--into", str(tmp_path / "nothing")).code == 102
    assert not (tmp_path / "nothing").exists()


def test_a_name_stands_for_what_was_published(service: Service, api: httpx.Client, theirs, tmp_path: Path) -> None:
    """In every field of a run that takes a model or an adapter, to the tenant that published it and to nobody else."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / WEIGHTS).write_bytes(b"weights")
    for _ in range(2):
        made(service.store, tmp_path / "adapter", "quay", NOWHERE)
    (tmp_path / "model").mkdir()
    made(service.store, tmp_path / "model", "whole", NOWHERE, kind="models")
    uri = f"{service.store.uri}/tenants/default/adapters/quay"
    whole = f"{service.store.uri}/tenants/default/models/whole/v000001"

    def run_of(kind: str = "sft", client: httpx.Client = api, **fields: object) -> dict:
        answer = client.post(f"/runs/{kind}", json=(sft() if kind != "rl" else {}) | fields).json()
        return answer.get("run") or answer["error"]

    run = run_of(model="quay")
    assert (run["model"], run["initial_adapter"], run["trainable"]["rank"]) == (BASE, f"{uri}/v000002", 16)
    assert run_of(model="quay:v1")["initial_adapter"] == f"{uri}/v000001"
    assert (run_of(model="whole")["model"], run_of(model="whole")["initial_adapter"]) == (whole, None)
    assert run_of(initial_adapter="quay")["initial_adapter"] == f"{uri}/v000002"
    assert run_of("dpo", reference="quay:v1")["reference"] == f"{uri}/v000001"
    assert run_of("dpo", reference="base")["reference"] == "base"
    kl = {"kind": "ppo", "kl": {"coefficient": 0.1, "reference": "quay"}}
    assert run_of("rl", model="org/tiny", loss=kl)["loss"]["kl"]["reference"] == f"{uri}/v000002"
    for text in ("/models/a b", "/models/a b/", "file:///models/a%20b", "file:///models/a%20b/"):
        assert run_of(model=text)["model"] == "file:///models/a%20b", "one model, however it is named"
    assert run_of(model="/models/tiny", initial_adapter="/a/b/")["initial_adapter"] == "file:///a/b"
    base = PublishedModels(service.store).target_of("default", "quay:base")
    assert (base.model, base.adapter, base.base, base.version) == (NOWHERE, None, BASE, 0)
    with pytest.raises(NotFound):
        PublishedModels(service.store).target_of("default", "nobodys:base")
    session = api.post("/sessions", json={"model": "quay"}).json()
    assert session["run"]["initial_adapter"] == f"{uri}/v000002"
    scheduled = {"name": "by-name", "run": sft(kind="sft", model="quay"), "cron": "0 2 1 1 *"}
    assert api.post("/schedules", json=scheduled).json()["scheduled"]["run"]["model"] == "quay"
    for place, refused in (
        ("model", run_of(model="nobodys")),
        ("model", run_of(model="sft-0123456789abcdef0:step-3")),
        ("model", run_of(model="quay", client=theirs)),
        ("model", run_of(model="quay", trainable={"kind": "full"})),
        ("initial_adapter", run_of(model="quay", initial_adapter="quay")),
        ("initial_adapter", run_of(initial_adapter="whole")),
        ("reference", run_of("dpo", reference="quay:v9")),
        ("model_uri", api.post("/validate", json={"source": {"uri": "file:///d"}, "model_uri": "no"}).json()["error"]),
        ("run.model", api.post("/schedules", json=scheduled | {"run": sft(kind="sft", model="no")}).json()["error"]),
    ):
        assert refused["place"].endswith(place), refused


REWARD_BASE = "file:///models/tiny"
DATA = {"dataset": {"uri": "file:///d"}, "steps": 1, "batch_size": 1, "model": REWARD_BASE}
STRING_CHECK = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
KL = {"kind": "ppo", "kl": {"coefficient": 0.1, "reference": "taste"}}
SEVERAL = {"objective": "squared_error", "score_fields": ("kind", "short")}


@pytest.fixture
def store_of_rewards(tmp_path: Path) -> LocalStore:
    """Of acme: reward models of one scalar and of two, one of all weights, and a language model."""
    store_of_rewards = LocalStore(tmp_path / "store")
    for name, run in (
        ("taste", RewardRun(**DATA)),
        ("both", RewardRun(**DATA, **SEVERAL)),
        ("whole", RewardRun(**DATA, trainable={"kind": "full"})),
        ("harbour", SFTRun(**DATA)),
    ):
        kind = "models" if run.trainable.kind == "full" else "adapters"
        record = RunRecord(run_id=f"{run.kind}-{name}", tenant="acme", run=run, created_at=1.0)
        store_of_rewards.put_bytes(RunKeys(record.run_id).record, record.model_dump_json().encode())
        version = claim_version(store_of_rewards, "acme", kind, name, Claim(run_id=record.run_id))
        (folder := tmp_path / name).mkdir()
        (folder / "file").write_text(name)
        seal(folder)
        upload_artifact(store_of_rewards, published_version("acme", kind, name, version), folder)
    return store_of_rewards


def run_of(**grader: Any) -> RLRun:
    fields = {"type": "reward_model", "name": "r"} | grader
    return RLRun(model=REWARD_BASE, rollouts={"prompts": {"uri": "file:///p"}, "steps": 1, "grader": fields})


def test_a_name_becomes_the_adapter_and_the_model_that_it_is_on(store_of_rewards) -> None:
    names, uri = (
        NamedModels(PublishedModels(store_of_rewards)),
        uri_of(store_of_rewards, published_version("acme", "adapters", "taste", 1)),
    )
    expected = parse_grader({"type": "reward_model", "name": "r", "model": uri, "base": REWARD_BASE})
    for named in ("taste", "taste:v1"):
        assert names.resolved("acme", run_of(model=named)).rollouts.grader == expected
    by_uri = names.resolved("acme", run_of(model=uri, base="/models/other/")).rollouts.grader
    assert (by_uri.model, by_uri.base) == (uri, "file:///models/other")
    parts = {"r": {"type": "reward_model", "name": "r", "model": "both", "scalar": "kind"}, "s": STRING_CHECK}
    multi = run_of(type="multi", graders=parts, calculate_output="r + s")
    found = names.resolved("acme", multi).rollouts.grader.graders
    assert (
        found["r"].base == REWARD_BASE
        and found["r"].model.startswith("file://")
        and found["s"] == parse_grader(STRING_CHECK)
    )


@pytest.mark.parametrize(
    ("tenant", "grader", "words"),
    [
        ("acme", {"model": "harbour"}, r"grader.model: harbour:v1 is a language model"),
        ("acme", {"model": "whole"}, r"grader.model: whole:v1 is a reward model of all weights"),
        ("acme", {"model": "nobodys"}, r"grader.model: you have published nothing of this name"),
        ("other", {"model": "taste"}, r"grader.model: you have published nothing of this name"),
        ("acme", {"model": "both"}, r"grader.scalar: the reward model gives kind, short: say which"),
        (
            "acme",
            {"model": "taste", "scalar": "kind"},
            r"grader.scalar: the reward model has no 'kind': it gives reward",
        ),
        ("acme", {"model": "taste", "base": "both"}, r"grader.base: both:v1 is a reward model"),
    ],
)
def test_what_is_no_reward_model_of_ones_own_is_refused(store_of_rewards, tenant, grader, words) -> None:
    with pytest.raises(InvalidInput, match=f"run.rollouts.{words}"):
        NamedModels(PublishedModels(store_of_rewards)).resolved(tenant, run_of(**grader), "run.")


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (SFTRun(**DATA | {"model": "taste"}), "model"),
        (SFTRun(**DATA, initial_adapter="taste"), "initial_adapter"),
        (DPORun(**DATA, reference="taste"), "reference"),
        (RLRun(model=REWARD_BASE, loss=KL), "loss.ppo.kl.reference"),
    ],
)
def test_a_reward_model_is_no_policy(store_of_rewards, run, place) -> None:
    with pytest.raises(InvalidInput, match=rf"^{place}: taste:v1 is a reward model \(1 scalar a sequence\)"):
        NamedModels(PublishedModels(store_of_rewards)).resolved("acme", run)


def test_a_run_goes_on_from_a_reward_model_in_its_shape_alone(store_of_rewards) -> None:
    names = NamedModels(PublishedModels(store_of_rewards))
    asked = RewardRun(**DATA | {"model": "both"}, **SEVERAL)
    assert names.resolved("acme", asked).initial_adapter.endswith("/both/v000001")
    with pytest.raises(InvalidInput, match=r"its head is not 1 scalar a sequence: name the model that it is on"):
        names.resolved("acme", RewardRun(**DATA | {"model": "both"}))


def test_reward_models_are_not_listed_to_be_asked(store_of_rewards) -> None:
    models = PublishedModels(store_of_rewards)
    assert [model.id for model in models.served("acme")] == ["harbour"]
    assert {view.name: view.rewards for view in models.views("acme")}["both"] == ("kind", "short")


def test_a_server_behind_a_url_scores_nothing(store_of_rewards, tmp_path) -> None:
    served = Settings(root=tmp_path, sampling=SamplingSettings(url="http://sampler/v1"))
    run = run_of(model="file:///r")
    check_startable(run, Settings(root=tmp_path))
    by_url = run.model_copy(update={"rollouts": run.rollouts.model_copy(update={"sampler_url": "https://a/v1"})})
    for asked, settings in ((run, served), (by_url, Settings(root=tmp_path))):
        with pytest.raises(
            InvalidInput, match=r"run.rollouts.grader: reward models are scored on a sampler that a host"
        ):
            check_startable(asked, settings, "run.")
