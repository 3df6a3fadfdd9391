"""Names of reward models in requests: whose they are, what they stand for, and what they cannot be."""

from pathlib import Path
from typing import Any

import pytest

from activities.publishing.publish import Claim, claim_version
from longshore.dataset_runs import RewardRun, SFTRun
from longshore.runs import RLRun, RunRecord
from service.inference.published_models import NamedModels, PublishedModels
from shared.errors import InvalidInput
from shared.runs.acceptance import check_startable, parse_grader
from shared.settings import SamplingSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys, published_version
from shared.storage.store import LocalStore, uri_of

BASE = "file:///models/tiny"
DATA = {"dataset": {"uri": "file:///d"}, "steps": 1, "batch_size": 1, "model": BASE}
STRING_CHECK = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
SEVERAL = {"objective": "squared_error", "score_fields": ("kind", "short")}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Of acme: reward models of one scalar and of two, one of all weights, and a language model."""
    store = LocalStore(tmp_path / "store")
    for name, run in (
        ("taste", RewardRun(**DATA)),
        ("both", RewardRun(**DATA, **SEVERAL)),
        ("whole", RewardRun(**DATA, trainable={"kind": "full"})),
        ("harbour", SFTRun(**DATA)),
    ):
        kind = "models" if run.trainable.kind == "full" else "adapters"
        record = RunRecord(run_id=f"{run.kind}-{name}", tenant="acme", run=run, created_at=1.0)
        store.put_bytes(RunKeys(record.run_id).record, record.model_dump_json().encode())
        version = claim_version(store, "acme", kind, name, Claim(run_id=record.run_id))
        (folder := tmp_path / name).mkdir()
        (folder / "file").write_text(name)
        seal(folder)
        upload_artifact(store, published_version("acme", kind, name, version), folder)
    return store


def run_of(**grader: Any) -> RLRun:
    fields = {"type": "reward_model", "name": "r"} | grader
    return RLRun(model=BASE, rollouts={"prompts": {"uri": "file:///p"}, "steps": 1, "grader": fields})


def test_a_name_becomes_the_adapter_and_the_model_that_it_is_on(store) -> None:
    names, uri = NamedModels(PublishedModels(store)), uri_of(store, published_version("acme", "adapters", "taste", 1))
    expected = parse_grader({"type": "reward_model", "name": "r", "model": uri, "base": BASE})
    for named in ("taste", "taste:v1"):
        assert names.resolved("acme", run_of(model=named)).rollouts.grader == expected
    by_uri = names.resolved("acme", run_of(model=uri, base="/models/other/")).rollouts.grader
    assert (by_uri.model, by_uri.base) == (uri, "file:///models/other")
    parts = {"r": {"type": "reward_model", "name": "r", "model": "both", "scalar": "kind"}, "s": STRING_CHECK}
    multi = run_of(type="multi", graders=parts, calculate_output="r + s")
    found = names.resolved("acme", multi).rollouts.grader.graders
    assert (
        found["r"].base == BASE and found["r"].model.startswith("file://") and found["s"] == parse_grader(STRING_CHECK)
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
def test_what_is_no_reward_model_of_ones_own_is_refused(store, tenant, grader, words) -> None:
    with pytest.raises(InvalidInput, match=f"run.rollouts.{words}"):
        NamedModels(PublishedModels(store)).resolved(tenant, run_of(**grader), "run.")


def test_reward_models_are_not_listed_to_be_asked(store) -> None:
    models = PublishedModels(store)
    assert [model.id for model in models.list("acme")] == ["harbour"]
    assert {view.name: view.rewards for view in models.views("acme")}["both"] == ("kind", "short")


def test_a_server_behind_a_url_scores_nothing(store, tmp_path) -> None:
    served = Settings(root=tmp_path, sampling=SamplingSettings(url="http://sampler/v1"))
    run = run_of(model="file:///r")
    check_startable(run, Settings(root=tmp_path))
    by_url = run.model_copy(update={"rollouts": run.rollouts.model_copy(update={"sampler_url": "https://a/v1"})})
    for asked, settings in ((run, served), (by_url, Settings(root=tmp_path))):
        with pytest.raises(
            InvalidInput, match=r"run.rollouts.grader: reward models are scored on a sampler that a host"
        ):
            check_startable(asked, settings, "run.")
