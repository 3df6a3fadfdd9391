"""The precision of runs that name none: chosen where they are accepted, the same at every door, told, and kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.apis.tinker.wire import TINKER
from service.app import create_app
from shared.storage.host_states import write_fast_bf16
from shared.storage.paths import RunKeys
from tests.service.conftest import KEY, Service, polling, serving, settings_below, sft

FAST, SLOW = True, False


@pytest.fixture(scope="module")
def service(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An installation that leaves it to its hosts."""
    settings = settings_below(tmp_path_factory.mktemp("auto"), temporal_address).model_copy(update={"dtype": "auto"})
    with serving(settings) as service, polling(settings):
        yield service


def say(service: Service, is_fast: bool) -> None:
    """As a GPU host does."""
    write_fast_bf16(service.store, service.settings.shape, is_fast)


def run(api: httpx.Client, path: str = "sft", key: str | None = None, **fields: Any) -> dict[str, Any]:
    answer = api.post(f"/runs/{path}", json=fields, headers={"idempotency-key": key} if key else {})
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_run_takes_what_the_hosts_compute_fast_and_keeps_it(service: Service, api: httpx.Client) -> None:
    early = run(api, **sft())
    assert early["run"]["dtype"] == "float32" and "no GPU host has said" in early["precision"]["reason"]
    say(service, FAST)
    first = run(api, key="the same", **sft())
    assert (first["run"]["dtype"], first["notices"]) == ("bfloat16", [])
    assert first["precision"]["reason"] == "it is fast on the GPU hosts"
    assert json.loads(service.store.get_bytes(RunKeys(first["run_id"]).record))["run"]["dtype"] == "bfloat16"
    say(service, SLOW)
    assert run(api, key="the same", **sft())["run_id"] == first["run_id"]
    kept = api.get(f"/runs/{first['run_id']}").json()
    assert (kept["run"], kept["precision"]) == (first["run"], first["precision"])
    assert run(api, **sft())["run"]["dtype"] == "float32"


def test_who_asks_for_the_slow_one_is_told_and_has_it(service: Service, api: httpx.Client, cli, options) -> None:
    say(service, SLOW)
    slow = run(api, **sft(dtype="bfloat16"))
    [notice] = slow["notices"]
    assert slow["run"]["dtype"] == "bfloat16" and notice.startswith("bfloat16 is slow on the GPU hosts")
    assert api.get("/runs", params={"limit": 1}).json()["runs"][0]["notices"] == [notice]
    assert f"notice: {notice}" in cli(*options, "--dtype", "bfloat16").stderr
    say(service, FAST)
    [notice] = run(api, **sft(dtype="float32"))["notices"]
    assert notice.startswith("bfloat16 is fast on the GPU hosts")
    assert run(api, **sft(dtype="bfloat16"))["notices"] == []


def test_estimate_get_and_doctor_tell_it(service: Service, cli, tiny_model: Path, tmp_path: Path) -> None:
    say(service, FAST)
    (tmp_path / "rows.jsonl").write_text('{"text": "The harbour opens at dawn."}\n')
    sized = ("-m", str(tiny_model), "-d", str(tmp_path / "rows.jsonl"), "--steps", "1")
    told = cli("estimate", "sft", *sized)
    assert "bfloat16: it is fast on the GPU hosts" in told.stdout, told
    told = cli("estimate", "sft", *sized, "--dtype", "float32")
    assert "notice: bfloat16 is fast" in told.stderr and "precision" not in told.stdout, told
    run_id = cli("submit", "sft", *sized).stdout.strip()
    assert "bfloat16: it is fast on the GPU hosts" in cli("get", run_id).stdout
    found = cli("doctor", "--json").json
    [hosts] = [check["text"] for check in found if check["name"] == "hosts"]
    assert "runs that name no dtype take bfloat16: it is fast on the GPU hosts" in hosts


def test_every_door_has_the_same_one(service: Service, api: httpx.Client, tiny_model: Path) -> None:
    say(service, FAST)
    assert run(api, "rl", model=str(tiny_model))["run"]["dtype"] == "bfloat16"
    pairs = {"uri": "file:///data/pairs.jsonl"}
    assert run(api, "dpo", model=str(tiny_model), dataset=pairs, steps=1, batch_size=1)["run"]["dtype"] == "bfloat16"
    assert api.post("/sessions", json={"model": str(tiny_model)}).json()["run"]["dtype"] == "bfloat16"
    with httpx.Client(base_url=service.url, headers={"x-api-key": f"tml-{KEY}"}, timeout=300, trust_env=False) as door:
        session = door.post(f"{TINKER}/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        ids = {"session_id": session.json()["session_id"], "model_seq_id": 0}
        made = door.post(
            f"{TINKER}/create_model", json={**ids, "base_model": str(tiny_model), "lora_config": {"rank": 4}}
        )
        assert made.status_code == 200, made.text
    [opened] = [r for r in api.get("/sessions").json()["runs"] if r["source"]["api"] == "tinker"]
    assert (opened["run"]["dtype"], opened["precision"]["dtype"]) == ("bfloat16", "bfloat16")


def test_a_model_of_art_keeps_the_one_that_it_was_registered_with(
    service: Service, api: httpx.Client, tiny_model: Path
) -> None:
    say(service, FAST)
    bearer = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"{service.url}/v1/preview", headers=bearer, timeout=300, trust_env=False) as art:
        fields = {"project": "harbour", "name": "fast", "base_model": tiny_model.as_uri(), "return_existing": True}
        model = art.post("/models", json=fields).json()
        say(service, SLOW)
        assert art.post("/models", json=fields).json() == model
        body = {"model_id": model["id"], "training_data_url": "https://example.com/a.jsonl"}
        job = art.post("/sft-training-jobs", json=body).json()
    assert api.get(f"/runs/{job['run_id']}").json()["run"]["dtype"] == "bfloat16"


async def test_base_models_are_asked_in_the_precision_of_sessions(service: Service, tiny_model: Path) -> None:
    models = create_app(service.settings).state.backend.untrained
    for is_fast, dtype in ((FAST, "bfloat16"), (SLOW, "float32")):
        say(service, is_fast)
        assert (await models.target("default", tiny_model.as_uri())).dtype == dtype
