"""Tinker's door, asked by hand: who may ask, what is refused and how, and that no refusal costs what follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.apis.tinker.wire import MAX_MESSAGE_BYTES, MESSAGES, PROTOBUF, TINKER
from shared.jobs.commands import CommandHead
from shared.settings import RateLimitSettings
from shared.storage.paths import RunKeys
from tests.depth import drawn
from tests.service.conftest import KEY, Service, new_key, serving
from tests.service.tinker_bodies import SPOILT, batch, compressed, spoilt

SENT = {"content-type": PROTOBUF}
ZSTD = SENT | {"content-encoding": "zstd"}


def asking(service: Service, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"x-api-key": f"tml-{key}"}
    return httpx.Client(base_url=f"{service.url}{TINKER}", headers=headers, timeout=300, trust_env=False)


@pytest.fixture
def door(service: Service) -> Iterator[httpx.Client]:
    with asking(service, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def model(service: Service, tiny_model: Path) -> dict[str, Any]:
    with asking(service, KEY) as door:
        session = said(door.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}))
        body = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": str(tiny_model),
            "lora_config": {"rank": 4},
        }
        made = said(door.post("/create_model", json=body))
        assert said(door.post("/create_model", json=body)) == made, "the same request is the same model"
        told = said(door.post("/retrieve_future", json={"request_id": made["request_id"]}))
        assert told == {"type": "create_model", "model_id": f"{session['session_id']}:train:0"}
        return made


def said(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told.keys() == {"error", "category", "type", "place"} and told["category"] == "user", told
    assert all(word in told["error"] for word in words), told
    return told


def run_of(service: Service, model: dict[str, Any]) -> str:
    with service.http() as api:
        listed = api.get("/sessions").json()["runs"]
    return next(r["run_id"] for r in listed if r["source"]["metadata"].get("tinker_model") == model["model_id"])


def test_no_spoilt_body_costs_a_request_that_follows(
    service: Service, door: httpx.Client, model: dict[str, Any]
) -> None:
    model_id, keys = model["model_id"], RunKeys(run_of(service, model))
    assert len(SPOILT) >= 40
    tried = drawn([*SPOILT], 12)
    for seq_id, name in enumerate(tried, start=1):
        body = spoilt(name, model_id, seq_id)
        for _ in range(2):
            told = refused(door.post("/forward_backward", content=compressed(body), headers=ZSTD), 422)
            assert told["place"], name
        kept = CommandHead.of(service.store.get_bytes(keys.command(seq_id)))
        assert kept.kind == "skip", name
    behind = len(tried) + 1
    sound = batch(model_id, behind).SerializeToString()
    first = said(door.post("/forward_backward", content=sound, headers=SENT))
    assert said(door.post("/forward_backward", content=compressed(sound), headers=ZSTD)) == first
    other = batch(model_id, behind, weights=[1.0, 1.0, 0.0]).SerializeToString()
    refused(door.post("/forward_backward", content=other, headers=SENT), 422, "was another one")
    assert CommandHead.of(service.store.get_bytes(keys.command(behind))).kind == "forward_backward"
    adam = {"model_id": model_id, "seq_id": behind + 1, "adam_params": {"beta1": 1.5}}
    refused(door.post("/optim_step", json=adam), 422, "adam_params.beta1")
    muon = {"model_id": model_id, "seq_id": behind + 2, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    refused(door.post("/optim_step", json=muon), 422, "AdamW")
    for seq_id in (behind + 1, behind + 2):
        assert CommandHead.of(service.store.get_bytes(keys.command(seq_id))).kind == "skip"


def test_what_is_no_request_is_refused_before_it_is_read(
    service: Service, door: httpx.Client, model: dict[str, Any]
) -> None:
    sound = batch(model["model_id"], 500).SerializeToString()
    refused(door.post("/forward_backward", content=sound), 415, PROTOBUF)
    refused(door.post("/forward_backward", content=sound[:20], headers=SENT), 404)
    refused(door.post("/forward_backward", content=b"", headers=SENT), 404)
    refused(door.post("/forward_backward", content=b"\xff" * 100, headers=SENT), 404)
    refused(door.post("/forward_backward", content=sound, headers=ZSTD), 422, "zstd")
    refused(door.post("/forward_backward", content=sound, headers=SENT | {"content-encoding": "br"}), 422, "br")
    head = MESSAGES["ForwardBackwardRequest"](model_id=model["model_id"], seq_id=500).SerializeToString()
    bomb = compressed(b"\0" * (MAX_MESSAGE_BYTES + 1), 19)
    refused(door.post("/forward_backward", content=bomb, headers=ZSTD), 422, "16,777,216")
    refused(door.post("/forward_backward", content=b"\0" * (MAX_MESSAGE_BYTES + 1), headers=SENT), 413)
    for field in drawn([b"\x1a\x00", b"\x2a\x00", b"\x1a\x02\x0a\x00"], 1):  # of empty messages, which take memory
        many = field * ((MAX_MESSAGE_BYTES - 100) // len(field))
        assert len(compressed(many)) < 4096
        # It names no model; on a slow machine its child's seconds are up before it has been read to the end.
        answer = door.post("/forward_backward", content=compressed(many), headers=ZSTD)
        if answer.status_code == 422:
            refused(answer, 422, "processor time")
        else:
            refused(answer, 404)
        refused(door.post("/forward_backward", content=compressed(head + many), headers=ZSTD), 422)
    refused(door.post("/optim_step", content=b"\0" * (2 << 20)), 413)
    for seq_id in (0, -1, 2**31 - 1):
        body = batch(model["model_id"], seq_id).SerializeToString()
        refused(door.post("/forward_backward", content=body, headers=SENT), 422, "seq_id")
    for model_id in ("", "nobody", "../../x", model["model_id"].replace(":0", ":7"), "tinker-" + "0" * 21 + ":train:0"):
        refused(door.post("/forward_backward", content=batch(model_id).SerializeToString(), headers=SENT), 404)
    for path, body in (
        ("/create_session", {"tags": [], "explode": 1}),
        ("/create_model", {"session_id": "nobody", "model_seq_id": 0, "base_model": "x", "lora_config": {"rank": 0}}),
        ("/optim_step", {"model_id": model["model_id"], "seq_id": 0}),
        ("/asample", {"prompt": {"chunks": []}, "sampling_params": {}}),
    ):
        refused(door.post(path, json=body), 422)
    refused(door.post("/retrieve_future", json={"request_id": "nobody"}), 404)
    for place in ("00000001/../../x", "1/x", f"{'1' * 300}/x", f"00000001/{'x' * 3000}", "00000001/é", "00000001/"):
        refused(door.post("/retrieve_future", json={"request_id": f"sample|{place}"}), 404)
    refused(door.get("/training_runs/nobody/checkpoints"), 404)
    refused(door.get("/no/such/address"), 404)


def test_keys_scopes_and_tenants_hold_here(service: Service, acme: str, model: dict[str, Any]) -> None:
    body = {"model_id": model["model_id"]}
    with asking(service, None) as nobody:
        assert nobody.get("/healthz").status_code == 200
        refused(nobody.post("/get_info", json=body), 401)
    with asking(service, acme) as theirs:
        refused(theirs.post("/get_info", json=body), 404)
        refused(theirs.post("/retrieve_future", json={"request_id": model["request_id"]}), 404)
        assert said(theirs.get("/training_runs"))["training_runs"] == []
    with service.http() as api:
        reader, sampler = (new_key(api, scopes=[scope])["key"] for scope in ("read", "inference"))
    sound = batch(model["model_id"], 400).SerializeToString()
    with asking(service, reader) as reading:
        refused(reading.post("/forward_backward", content=sound, headers=SENT), 403, "scope write")
        refused(reading.post("/asample", json={}), 403, "scope inference")
        assert said(reading.get(f"/training_runs/{model['model_id']}"))["base_model"]
    with asking(service, sampler) as asked:
        refused(asked.post("/save_weights", json=body), 403)
        refused(asked.get("/training_runs"), 403)
    with httpx.Client(base_url=service.url, trust_env=False) as other:
        assert other.get("/api/v1/runs", headers={"x-api-key": f"tml-{KEY}"}).status_code == 401
        assert other.get("/tinker/files/none.none/adapter_model.safetensors").status_code == 403


def test_get_info_tells_no_path_of_the_operator(service: Service, tiny_model: Path) -> None:
    """What the operator named keeps that name, wherever it lies; of a hub id the client loads the tokenizer."""

    @contextmanager
    def naming(place: str) -> Iterator[httpx.Client]:
        tinker = service.settings.tinker.model_copy(update={"models": {"ship": place}})
        with serving(service.settings.model_copy(update={"tinker": tinker})) as one, asking(one, KEY) as door:
            yield door

    with naming(str(tiny_model)) as door:
        session = said(door.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}))
        body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "ship"}
        made = said(door.post("/create_model", json=body | {"lora_config": {"rank": 4}}))
    places = {str(tiny_model): "ship", tiny_model.as_uri(): "ship", "s3://vault/ship": "ship", "org/ship": "org/ship"}
    for place, tokenizer in places.items():
        with naming(place) as door:
            assert said(door.post("/get_info", json={"model_id": made["model_id"]})) == {
                "type": "get_info",
                "model_id": made["model_id"],
                "model_data": {"model_name": "ship", "tokenizer_id": tokenizer},
                "is_lora": True,
                "lora_rank": 4,
                "model_name": "ship",
            }


def test_quotas_the_audit_log_and_rates_hold_here(service: Service, acme: str, tiny_model: Path) -> None:
    begun = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    with asking(service, acme) as theirs, service.http() as operator, service.http(acme) as native:
        session_id = said(theirs.post("/create_session", json=begun))["session_id"]
        assert operator.put("/tenants/acme/quotas", json={"concurrent_runs": 0}).status_code == 200
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": str(tiny_model), "lora_config": {"rank": 4}}
        refused(theirs.post("/create_model", json=body), 403, "concurrent_runs")  # a 429 the SDK repeats for minutes
        assert operator.put("/tenants/acme/quotas", json={}).status_code == 200
        made = said(theirs.post("/create_model", json=body))
        assert said(theirs.post("/session_heartbeat", json={"session_id": session_id})) == {"type": "session_heartbeat"}
        stored = native.get("/usage").json()["stored_bytes"]
        assert said(theirs.post("/telemetry", json={"events": [{"event": "x" * 50_000}]})) == {"status": "accepted"}
        grown = native.get("/usage").json()["stored_bytes"] - stored  # the model's run is measured meanwhile
        assert grown < 25_000, "telemetry is dropped"
        assert said(theirs.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}}))
        entries = native.get("/audit", params={"limit": 50}).json()["entries"]
    found = [(each["path"].removeprefix(TINKER), each["status"], each["target"]) for each in reversed(entries)]
    known = [
        each for each in found if each[0] in ("/create_session", "/create_model", f"/sessions/{session_id}/finish")
    ]
    assert [each[:2] for each in known] == [
        ("/create_session", 200),
        ("/create_model", 403),
        ("/create_model", 200),
        (f"/sessions/{session_id}/finish", 200),
    ]
    assert known[0][2] == session_id and known[3][2].split(" ")[0] == session_id and made["request_id"]
    hasty = service.settings.model_copy(update={"rate_limit": RateLimitSettings(per_s=0.001, burst=2)})
    with serving(hasty) as slow, asking(slow, acme) as theirs:
        answers = [theirs.get("/training_runs") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429] and answers[2].headers["retry-after"]


def test_a_checkpoint_that_fails_can_be_named_and_is_not_loaded(door: httpx.Client, model: dict[str, Any]) -> None:
    """Loading waits for a state that no worker saves here; names and times that cannot be are refused."""
    state = {"model_id": model["model_id"], "seq_id": 301}
    refused(door.post("/save_weights", json=state | {"path": "a/b"}), 422, "path")
    refused(door.post("/save_weights", json=state | {"path": "a", "ttl_seconds": 5}), 422, "ttl_seconds")
    load = {"session_id": model["model_id"].split(":")[0], "model_seq_id": 9, "optimizer": True}
    refused(door.post("/load_weights", json=load | {"path": f"tinker://{model['model_id']}/weights/none"}), 404)
    refused(door.post("/load_weights", json=load | {"path": "tinker://x/weights/../a", "model_id": "y"}), 422)


def test_a_model_s_run_names_its_base_as_every_run_does(door: httpx.Client, service: Service, tiny_model: Path) -> None:
    """And a checkpoint is of the base that its client names, by whichever of its names."""
    session = said(door.post("/create_session", json={"user_metadata": {}}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": f"{tiny_model}/", "lora_config": {"rank": 4}}
    model_id = said(door.post("/create_model", json=body))["model_id"]
    with service.http() as api:
        runs = api.get("/runs", params={"kind": "session"}).json()["runs"]
        [run] = [run for run in runs if run["name"] == f"{session}-0"]
        assert api.get(f"/runs/{run['run_id']}").json()["run"]["model"] == tiny_model.as_uri()
    told = said(door.post("/get_info", json={"model_id": model_id}))
    assert told["model_data"]["model_name"] == f"{tiny_model}/", "the client's own word"
    said(door.post("/save_weights_for_sampler", json={"model_id": model_id, "seq_id": 1, "path": "named"}))
    asked = {"session_id": session, "model_path": f"tinker://{model_id}/sampler_weights/named"}
    for number, base in enumerate((None, str(tiny_model), tiny_model.as_uri(), f"{tiny_model}/")):
        said(
            door.post("/create_sampling_session", json=asked | {"sampling_session_seq_id": number, "base_model": base})
        )
    other = asked | {"sampling_session_seq_id": 9, "base_model": "/models/other"}
    refused(door.post("/create_sampling_session", json=other), 422, "the checkpoint is of")
