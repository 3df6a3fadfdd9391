"""The native API over real HTTP, with a real Temporal server: every kind of request, refusal and result."""

import io
import json
import math
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from longshore.dataset_runs import DPORun, SFTRun
from longshore.events import Evaluated, Saved, Started, Step, Succeeded
from longshore.fields import Fence
from longshore.runs import RunRecord
from longshore.views import RunStatus
from service.database.engine import open_database
from service.runs.rows import run_row
from service.runs.runs import queued
from shared.storage import artifacts
from shared.storage.paths import RunKeys
from tests.service.conftest import KEY, Service, ended, sft, submitted
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS


def test_a_run_is_accepted_runs_and_succeeds(api, service: Service) -> None:
    view = submitted(api, seed=SUCCEEDS, name="harbour")
    assert view.run_id.startswith("sft-")
    assert view.run.name == "harbour"
    done = ended(api, view.run_id)
    assert (done.state, done.step, done.metrics) == ("succeeded", 4, {"loss": 1.5})
    record = RunRecord.model_validate_json(service.store.get_bytes(RunKeys(view.run_id).record))
    assert record.run == SFTRun.model_validate(sft(seed=SUCCEEDS, name="harbour", dtype="float32"))
    assert record.threads_per_rank == service.settings.cpu_threads


def test_a_preference_run_is_accepted_with_its_kind(api) -> None:
    body = sft(seed=SUCCEEDS, dtype="float32", beta=0.3, reference="file:///adapters/before")
    answer = api.post("/runs/dpo", json=body)
    assert answer.status_code == 201, answer.text
    done = ended(api, answer.json()["run_id"])
    assert done.run_id.startswith("dpo-") and done.state == "succeeded"
    assert done.run == DPORun.model_validate(body) and done.run.learning_rate == 1e-5
    for bad, place in (
        ({"beta": 0}, "beta"),
        ({"too_long": "truncate"}, "too_long"),
        ({"dataset": {"uri": "file:///d", "format": "chat"}}, "dataset"),
        ({"dataset": {"uri": "file:///d", "prompt_field": "p"}}, "dataset"),
    ):
        refused = api.post("/runs/dpo", json=body | bad)
        assert (refused.status_code, refused.json()["error"]["place"]) == (422, place)
    pairs = {"uri": "file:///d", "format": "openai_preference"}
    assert "which dpo learns from" in api.post("/runs/sft", json=sft(dataset=pairs)).json()["error"]["message"]


def test_a_key_gives_one_run_and_is_not_taken_for_another_request(api) -> None:
    headers = {"idempotency-key": "a key / with anything: in it"}
    first, again = (api.post("/runs/sft", json=sft(seed=0), headers=headers).json()["run_id"] for _ in range(2))
    assert first == again != submitted(api, seed=0).run_id
    answer = api.post("/runs/sft", json=sft(seed=1), headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error"]["place"] == "Idempotency-Key"
    assert first in answer.json()["error"]["message"]


def test_only_rl_runs_take_train_steps(api) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    step = {"key": "a", "groups": "file:///groups.jsonl"}
    for answer in (
        api.post(f"/runs/{run_id}/steps", json=step),
        api.get(f"/runs/{run_id}/steps/1"),
        api.get(f"/runs/{run_id}/steps"),
        api.post(f"/runs/{run_id}/finish"),
    ):
        assert answer.status_code == 409
        assert "is no RL run" in answer.json()["error"]["message"]
    assert api.post("/runs/nothing/steps", json=step).status_code == 404
    assert api.post(f"/runs/{run_id}/steps", json=step | {"key": ""}).status_code == 422


def test_runs_are_listed_newest_first_in_pages(api) -> None:
    mine = [submitted(api, seed=SUCCEEDS).run_id for _ in range(5)]
    mine = mine[::-1]
    first = api.get("/runs", params={"limit": 3}).json()
    assert [run["run_id"] for run in first["runs"]] == mine[:3]
    assert first["has_more"] and first["next"] == mine[2]
    second = api.get("/runs", params={"limit": 2, "after": first["next"]}).json()
    assert [run["run_id"] for run in second["runs"]] == mine[3:]


def test_an_upload_is_stored_under_its_hash(api, service: Service) -> None:
    data = b'{"messages": []}\n' * 200_000
    chunks = (data[i : i + 65536] for i in range(0, len(data), 65536))
    first = api.post("/files", params={"name": "train.jsonl"}, content=chunks)
    assert first.status_code == 201
    uri = first.json()["uri"]
    assert Path(uri.removeprefix("file://")).read_bytes() == data
    assert api.post("/files", params={"name": "train.jsonl"}, content=data).json()["uri"] == uri
    assert list((service.settings.root_path / "service" / "uploads").iterdir()) == []


def test_an_empty_upload_is_refused(api) -> None:
    assert "empty" in api.post("/files", params={"name": "x"}, content=b"").json()["error"]["message"]


def test_what_was_accepted_is_started_by_the_sweep(service: Service) -> None:
    """A service died behind the row, or behind the record in the store too."""
    from tests.service.conftest import serving

    database = open_database(service.settings)
    made = []
    for has_record in (False, True):
        run_id = f"sft-{int(time.time() * 1000):011x}lost0{int(has_record)}"
        record = RunRecord(run_id=run_id, run=SFTRun.model_validate(sft(seed=SUCCEEDS)), created_at=time.time())
        if has_record:
            service.store.put_bytes(RunKeys(run_id).record, record.model_dump_json().encode())
        database.write(lambda session, record=record: session.add(run_row(record, queued(record))))
        made.append(run_id)
    database.close()
    with serving(service.settings) as another, another.http() as api:
        for run_id in made:
            assert ended(api, run_id).state == "succeeded"
            assert RunRecord.model_validate_json(service.store.get_bytes(RunKeys(run_id).record)).run_id == run_id


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
    for answer in (
        api.post("/runs/sft", json=sft(**{field: value})),
        api.post("/runs", json=sft(kind="sft", **{field: value})),
    ):
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


def write_log(service: Service, run_id: str, fence: Fence, events: list) -> None:
    data = "".join(event.model_dump_json() + "\n" for event in events).encode()
    service.store.put_bytes(RunKeys(run_id).log("000001", fence), data)


@pytest.fixture
def trained(service: Service, api) -> str:
    """A run whose step 2 was done by two workers."""
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    one, two = Fence(epoch=1), Fence(epoch=2)
    common = {"run_id": run_id, "job_id": "000001", "num_steps": 3, "device": "cpu", "world_size": 1}
    write_log(
        service,
        run_id,
        one,
        [
            Started(seq=1, time=1.0, fence=one, first_step=0, **common),
            Evaluated(seq=2, time=1.5, step=0, metrics={"eval_loss": 3.0}),
            Step(seq=3, time=2.0, step=1, metrics={"loss": 2.5}),
            Saved(seq=4, time=2.5, step=1, path="/x", manifest_sha256="0" * 64),
            Step(seq=5, time=3.0, step=2, metrics={"loss": 9.0}),
        ],
    )
    write_log(
        service,
        run_id,
        two,
        [
            Started(seq=1, time=4.0, fence=two, first_step=1, **common),
            Step(seq=2, time=5.0, step=2, metrics={"loss": 2.0}),
            Step(seq=3, time=6.0, step=3, metrics={"loss": 1.5}),
            Succeeded(seq=4, time=7.0, step=3, device="released"),
        ],
    )
    return run_id


def test_metrics_take_the_newest_worker_of_each_step(api, trained: str) -> None:
    found = api.get(f"/runs/{trained}/metrics").json()
    assert [(row["step"], row["metrics"]["loss"]) for row in found["steps"]] == [(1, 2.5), (2, 2.0), (3, 1.5)]
    assert [(row["step"], row["metrics"]["eval_loss"]) for row in found["evaluations"]] == [(0, 3.0)]


def test_events_go_on_behind_a_cursor(api, trained: str) -> None:
    path = f"/runs/{trained}/events"
    first = api.get(path, params={"limit": 4}).json()
    second = api.get(path, params={"after": first["next"]}).json()
    kinds = [item["event"]["event"] for item in first["events"] + second["events"]]
    assert kinds == ["started", "evaluated", "step", "saved", "step", "started", "step", "step", "succeeded"]
    wait_s = 30
    end = api.get(path, params={"after": second["next"], "wait_s": wait_s})
    assert (end.json()["events"], end.json()["next"]) == ([], second["next"])
    assert end.elapsed.total_seconds() < wait_s, "an ended run is not waited for"
    lines = api.get(path, headers={"accept": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line)["event"]["event"] for line in lines] == kinds
    assert api.get(path, params={"after": "nonsense"}).status_code == 422


def test_events_are_streamed_to_the_end(api, trained: str) -> None:
    with api.stream("GET", f"/runs/{trained}/events", headers={"accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields = [line.partition(": ")[::2] for line in answer.iter_lines() if line]
    names = [value for field, value in fields if field == "event"]
    assert names[0] == "started" and names[-2:] == ["succeeded", "end"]
    assert len([field for field, _ in fields if field == "id"]) == len(names) - 1


def test_a_long_log_is_read_to_its_end(api, service: Service) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    steps = [Step(seq=n, time=float(n), step=n, metrics={"loss": 1.0}) for n in range(1, 2502)]
    write_log(service, run_id, Fence(epoch=1), steps)
    lines = api.get(f"/runs/{run_id}/logs").text.splitlines()
    assert len(lines) == 2502
    assert lines[-2:] == ["1970-01-01T00:41:41Z step 2501: loss 1", "the run succeeded"]
    assert len(api.get(f"/runs/{run_id}/metrics").json()["steps"]) == 2501


def test_a_live_stream_brings_events_as_they_come(api, service: Service) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    fence = Fence(epoch=1)
    with api.stream("GET", f"/runs/{run_id}/logs", params={"follow": True}) as answer:
        lines = answer.iter_lines()
        part = RunKeys(run_id).log_part("000001", fence, 1)
        service.store.put_bytes(
            part, Step(seq=1, time=1.0, step=1, metrics={"loss": 2.5}).model_dump_json().encode() + b"\n"
        )
        assert next(lines) == "1970-01-01T00:00:01Z step 1: loss 2.5"
        with service.http() as other:
            other.post(f"/runs/{run_id}/cancel")
        assert next(lines) == "the run was cancelled"


def test_checkpoints_are_listed_with_their_hashes(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "adapter_model.safetensors").write_bytes(b"weights")
    artifacts.seal(tmp_path)
    keys = RunKeys(run_id)
    expected = [
        artifacts.upload_artifact(service.store, keys.checkpoint(Fence(epoch=epoch), step), tmp_path)
        for epoch, step in ((1, 2), (2, 4))
    ]
    service.store.put_bytes(keys.checkpoint(Fence(epoch=2), 6) + "/weights/unsealed", b"")
    found = api.get(f"/runs/{run_id}/checkpoints").json()
    assert [(c["step"], c["fence"]["epoch"], c["artifact"]["uri"]) for c in found] == [
        (2, 1, expected[0].uri),
        (4, 2, expected[1].uri),
    ]
    assert found[0]["artifact"]["sha256"] == expected[0].sha256


@pytest.fixture
def published(service: Service, api, tmp_path: Path) -> str:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    status = RunStatus.model_validate(ended(api, run_id).model_dump(include=set(RunStatus.model_fields)))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (folder / "README.md").write_text("a card")
    artifacts.seal(folder)
    artifact = artifacts.upload_artifact(service.store, f"tenants/default/adapters/{run_id}/v000001", folder)
    status = status.model_copy(update={"adapter": artifact.uri, "adapter_sha256": artifact.sha256})
    service.store.put_bytes(RunKeys(run_id).result, status.model_dump_json().encode())
    service.rebuild()
    return run_id


def test_published_files_are_read_by_name(api, published: str) -> None:
    paths = [entry["path"] for entry in api.get(f"/runs/{published}/files").json()]
    assert paths == ["README.md", "adapter_model.safetensors", "manifest.json"]
    assert api.get(f"/runs/{published}/files/README.md").text == "a card"
    assert api.get(f"/runs/{published}/files/adapter_model.safetensors").content == bytes(range(256)) * 9000
    for name in ("nothing", "md", "..%2f..%2frun.json", "%2fetc%2fpasswd"):
        assert api.get(f"/runs/{published}/files/{name}").status_code == 404


def test_a_download_is_a_tar_of_everything(api, published: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(api.get(f"/runs/{published}/download").content)) as archive:
        names = archive.getnames()
        weights = archive.extractfile(f"{published}/adapter_model.safetensors")
        assert weights is not None and weights.read() == bytes(range(256)) * 9000
    assert names == [f"{published}/{n}" for n in ("README.md", "adapter_model.safetensors", "manifest.json")]


def test_nothing_can_be_downloaded_of_a_run_that_published_nothing(api) -> None:
    run_id = submitted(api, seed=FAILS).run_id
    ended(api, run_id)
    answer = api.get(f"/runs/{run_id}/download")
    assert answer.status_code == 409
    assert "published nothing" in answer.json()["error"]["message"]
