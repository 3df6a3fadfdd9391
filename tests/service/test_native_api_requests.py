"""Requests of every kind to the native API: their bodies, methods, keys and hosts, and how a refusal is told."""

import json
import math
from typing import Any

import httpx
import pytest

from tests.files_below import files_below
from tests.service.conftest import KEY, Service, sft
from tests.service.stand_in import SUCCEEDS


@pytest.mark.parametrize(
    ("body", "place", "word"),
    [
        (sft(steps=None), "epochs", "epochs and steps"),
        (sft(learning_rate=-1), "learning_rate", "greater than 0"),
        (sft(learning_rat=1), "learning_rat", "no such field: learning_rat"),
        (sft(lora={"rank": 4}), "lora", "no such field: lora"),
        (sft(model=None), "model", "valid string"),
        ({key: value for key, value in sft().items() if key != "model"}, "model", "this field is required"),
        (sft(dataset={"uri": "ftp://host/rows.jsonl"}), "dataset.uri", "starts with file://, http://, https:// or s3"),
        (sft(dataset={"uri": "rows.jsonl"}), "dataset.uri", "starts with file://, http://, https:// or s3"),
        (sft(model="http://host/model"), "model", "a hub id such as org/name"),
        (sft(dataset={"uri": ""}), "dataset.uri", "must not be empty"),
        (sft(dataset={"uri": "x", "prompt_field": "q"}), "dataset", "go together"),
        (sft(layout={"tp": 0}), "layout.tp", "greater than or equal to 1"),
        (sft(trainable={"kind": "lora", "rank": 0}), "trainable.rank", "greater than or equal to 1"),
        ([], None, "valid"),
    ],
)
def test_a_bad_request_names_field_and_rule(api, body, place, word) -> None:
    answer = api.post("/runs/sft", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"type", "message", "place"}
    assert error["type"] == "invalid_input"
    assert error["place"] == place
    assert word in error["message"]


def test_an_empty_body_and_what_is_no_number_are_said_in_words(api) -> None:
    empty = api.post("/runs/sft").json()["error"]
    assert (empty["place"], empty["message"]) == ("body", "the request needs a body: a JSON object")
    body = json.dumps(sft(learning_rate=math.nan, layout={"tp": math.inf})).encode()
    answer = api.post("/runs/sft", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "NaN and Infinity are no numbers of JSON"
    assert answer.json()["error"]["place"] in ("learning_rate", "layout.tp")


def test_head_answers_as_get_without_the_body(service: Service, api) -> None:
    """Download clients ask for a file's size first."""
    made = api.post("/files", params={"name": "rows.jsonl"}, content=b'{"text": "a"}\n' * 100_000)
    file_id = made.json()["file_id"]
    for path in (f"/files/{file_id}/content", f"/files/{file_id}", "/runs", "/health"):
        head, get = api.head(path), api.get(path)
        assert (head.status_code, head.content) == (200, b"") and get.content
        kept = ("content-length", "content-type", "etag")
        assert {k: head.headers.get(k) for k in kept} == {k: get.headers.get(k) for k in kept}
    assert api.head("/files/none").status_code == api.head("/nowhere").status_code == 404
    with service.http(None) as nobody:
        assert nobody.head(f"/files/{file_id}/content").status_code == 401


def test_an_unknown_address_is_a_page_for_people_and_an_error_for_programs(service: Service) -> None:
    browser = {"accept": "text/html,application/xhtml+xml"}
    with httpx.Client(base_url=service.url, trust_env=False) as people:
        asked = people.get("/nowhere", headers=browser)
        assert (asked.status_code, asked.headers["location"]) == (303, "/login?after=%2Fnowhere")
        assert people.post("/login", data={"key": KEY}).status_code == 303
        for path in ("/nowhere", "/runs/NO_ID", "/a/b/c"):
            page = people.get(path, headers=browser)
            assert page.status_code == 404 and "There is nothing at this address" in page.text, page.text
            assert page.headers["content-type"].startswith("text/html")
        for path in ("/api/v1/nowhere", "/v1/nowhere"):
            assert people.get(path, headers=browser).headers["content-type"] == "application/json"
    with service.http() as api:
        assert api.get(f"{service.url}/nowhere").json()["error"]["type"] == "not_found"


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000])
def test_what_is_no_json_is_refused(api, body: bytes) -> None:
    answer = api.post("/runs/sft", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("steps", "4", "steps"),
        ("steps", True, "steps"),
        ("steps", 4.5, "steps"),
        ("learning_rate", "1e-4", "learning_rate"),
        ("name", 5, "name"),
        ("layout", {"tp": "1"}, "layout.tp"),
        ("layout", {"tp": 2, "sp": "yes"}, "layout.sp"),
        ("trainable", {"kind": "lora", "targets": "q_proj"}, "trainable.targets"),
        ("eval_dataset", [["uri", "file:///x"]], "eval_dataset"),
        ("model", [[]] * 2, "model"),
    ],
)
def test_a_value_of_another_type_is_refused(api, field: str, value: Any, place: str) -> None:
    """JSON has numbers, truths, lists and objects: nothing is guessed from text."""
    answer = api.post("/runs/sft", json=sft(**{field: value}))
    assert (answer.status_code, answer.json()["error"]["place"]) == (422, place), answer.text


def test_a_whole_number_is_a_number_and_a_list_of_names_is_taken(api) -> None:
    trainable = {"kind": "lora", "rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    answer = api.post("/runs/sft", json=sft(seed=float(SUCCEEDS), learning_rate=1, steps=4.0, trainable=trainable))
    assert answer.status_code == 201 and answer.json()["run"]["trainable"]["targets"] == ["q_proj", "v_proj"]
    assert type(answer.json()["run"]["steps"]) is int


def test_an_rl_run_takes_lists_and_refuses_text_for_numbers(api) -> None:
    """Its preset is filled in before its fields are looked at."""
    body = {
        "model": "org/tiny",
        "algorithm": "gspo",
        "trainable": {"kind": "lora", "targets": ["q_proj"]},
        "epochs": 2.0,
    }
    made = api.post("/runs/rl", json=body)
    assert made.status_code == 201 and made.json()["run"]["trainable"]["targets"] == ["q_proj"], made.text
    api.post(f"/runs/{made.json()['run_id']}/finish")
    refused = api.post("/runs/rl", json=body | {"epochs": "2"})
    assert (refused.status_code, refused.json()["error"]["place"]) == (422, "epochs")


def test_what_is_not_sent_as_json_is_refused(api) -> None:
    answer = api.post("/runs/sft", content=json.dumps(sft()), headers={"content-type": "text/plain"})
    assert answer.status_code == 422 and "content-type application/json" in answer.json()["error"]["message"]


def test_a_path_is_asked_with_the_methods_that_it_has(api) -> None:
    for path, methods in (("/runs/sft", "POST"), ("/runs/sft-0-none", "DELETE, GET"), ("/webhooks", "GET, POST")):
        answer = api.request("OPTIONS", path)
        assert (answer.status_code, answer.headers.get_list("allow")) == (405, [methods])


@pytest.mark.parametrize("path", ["", "/events", "/metrics", "/logs", "/checkpoints", "/files", "/download"])
def test_an_unknown_run_is_not_found(api, path) -> None:
    answer = api.get(f"/runs/sft-0-none{path}")
    assert answer.status_code == 404
    assert answer.json()["error"] == {"type": "not_found", "message": "there is no run sft-0-none", "place": None}


def test_an_unknown_path_has_the_same_shape_of_error(api) -> None:
    answer = api.get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found"


def test_a_large_body_is_refused(api) -> None:
    said = api.post("/runs/sft", content=b" " * (2 << 20))
    unsaid = api.post("/runs/sft", content=(b" " * 65536 for _ in range(32)))
    assert [said.status_code, unsaid.status_code] == [413, 413]
    assert unsaid.json()["error"]["type"] == "too_large"


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", "Bearer", KEY])
def test_without_a_key_nothing_is_told(service: Service, header) -> None:
    headers = {"authorization": header} if header else {}
    for path in ("/api/v1/runs", "/api/v1/openapi.json", "/api/v1/nothing"):
        answer = httpx.get(service.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "unauthorized"


def test_only_the_hash_of_a_key_is_kept(service: Service) -> None:
    kept = b"".join(data for _, data in files_below(service.settings.root_path / "service"))
    assert kept and KEY.encode() not in kept


def test_a_foreign_host_name_is_refused(api) -> None:
    answer = api.get("/runs", headers={"host": "attacker.example:80"})
    assert answer.status_code == 403
    for name in ("localhost:1", "127.0.0.1", "[::1]:8484"):
        assert api.get("/runs", headers={"host": name}).status_code == 200


def test_every_answer_has_a_request_id(api) -> None:
    assert api.get("/runs").headers["x-request-id"].startswith("req-")
    assert api.get("/runs", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert api.get("/runs", headers={"x-request-id": "a b(c)"}).headers["x-request-id"].startswith("req-")


def test_health_is_open_and_says_what_answers(service: Service) -> None:
    for path in ("/health", "/readyz", "/api/v1/health"):
        answer = httpx.get(f"{service.url}{path}")
        assert answer.status_code == 200, path
        assert answer.json()["temporal"] == answer.json()["store"] == "ok"
    assert httpx.get(f"{service.url}/healthz", headers={"accept": "text/html"}).json() == {"status": "ok"}


def test_the_api_is_described(api) -> None:
    document = api.get("/openapi.json").json()
    assert {"/api/v1/runs/sft", "/api/v1/runs/{run_id}/events", "/api/v1/files"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert "SFTRun" in schemas
    assert schemas["ScheduledRun"]["properties"]["run"]["required"] == ["kind"], "the tag of a union has no default"
    assert "kind" not in schemas["SFTRun"].get("required", ())
