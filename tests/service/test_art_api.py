"""What ART's client asks of the service, with stand-in workflows: models, jobs that end in every way, other tenants."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.conftest import KEY, Service, new_key, started
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until


def preview(service: Service, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{service.url}/v1/preview", headers=headers, timeout=300, trust_env=False)


@pytest.fixture
def art(service: Service) -> Iterator[httpx.Client]:
    with preview(service, KEY) as client:
        yield client


@pytest.fixture
def their_art(service: Service, acme: str) -> Iterator[httpx.Client]:
    with preview(service, acme) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def base_model(tiny_model: Path) -> None:
    """A registered model's base has to be there."""
    FIELDS["base_model"] = tiny_model.as_uri()


FIELDS = {"project": "harbour"}


def register(art: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return art.post("/models", json={**FIELDS, "name": name, **fields})


def sft_job(art: httpx.Client, model_id: str, **fields: Any) -> httpx.Response:
    body = {"model_id": model_id, "training_data_url": "https://example.com/a.jsonl", **fields}
    return art.post("/sft-training-jobs", json=body)


def ended(art: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]] | None:
        events = art.get(f"/training-jobs/{job_id}/events").json()["data"]
        return events if events and events[-1]["type"] in ("training_ended", "training_failed") else None

    return wait_until(look, f"{job_id} ends", timeout_s=300)


def test_a_name_has_one_model(art: httpx.Client, tiny_model: Path) -> None:
    other = Path(shutil.copytree(tiny_model, tiny_model.with_name("another")))
    first = register(art, "one", longshore={"rank": 4}).json()
    assert (first["entity"], first["longshore"]["rank"]) == ("default", 4)
    assert register(art, "one", return_existing=True).json() == first == art.get(f"/models/{first['id']}").json()
    assert register(art, "one", return_existing=True, base_model=f"{tiny_model}/").json() == first, "its path"
    assert register(art, "one").status_code == 409
    assert register(art, "one", return_existing=True, base_model=other.as_uri()).status_code == 409
    assert register(art, "one", return_existing=True, longshore={"rank": 8}).status_code == 409
    second = register(art, "two").json()
    page = art.get("/models", params={"limit": 1}).json()
    assert page["has_more"] and page["data"] == [first]
    assert art.get("/models", params={"after": first["id"]}).json()["data"] == [second]
    assert art.delete(f"/models/{first['id']}").status_code == 204
    assert art.get(f"/models/{first['id']}").status_code == 404
    assert register(art, "one", return_existing=True).json()["id"] != first["id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": "a/b"}, "name"),
        ({"base_model": ""}, "base_model"),
        ({"base_model": "gpt-4o-mini"}, "base_model"),
        ({"base_model": "http://host/model"}, "base_model"),
        ({"base_model": "file:///nowhere"}, "base_model"),
        ({"base_model": "no/such-model"}, "base_model"),
        ({"colour": "red"}, "colour"),
        ({"longshore": {"rank": 0}}, "longshore.rank"),
        ({"longshore": {"group_size": 4}}, "longshore.group_size"),
    ],
)
def test_a_wrong_model_is_refused(art: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = art.post("/models", json={**FIELDS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_uris_lead_into_no_other_tenants_folder(service: Service, art: httpx.Client, their_art: httpx.Client) -> None:
    theirs = f"{service.store.uri}/tenants/acme/uploads/a.jsonl"
    assert register(art, "thief", base_model=theirs).status_code == 400
    answer = sft_job(art, register(art, "reader").json()["id"], training_data_url=theirs)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dataset.uri")


def test_a_job_succeeds_and_fails(art: httpx.Client) -> None:
    done = sft_job(art, register(art, "done", longshore={"seed": SUCCEEDS}).json()["id"]).json()
    assert [event["type"] for event in ended(art, done["id"])] == ["training_started", "training_ended"]
    assert art.get(f"/training-jobs/{done['id']}").json()["status"] == "succeeded"
    lost = sft_job(art, register(art, "lost", longshore={"seed": FAILS}).json()["id"]).json()
    last = ended(art, lost["id"])[-1]
    assert (last["type"], last["data"]) == ("training_failed", {"error_message": "train.jsonl:3: no assistant turn"})
    behind = art.get(f"/training-jobs/{lost['id']}/events", params={"after": last["id"]}).json()
    assert (behind["data"], behind["has_more"]) == ([], False)
    nowhere = art.get(f"/training-jobs/{lost['id']}/events", params={"after": "elsewhere"})
    assert (nowhere.status_code, nowhere.json()["error"]["param"]) == (400, "after")


def test_a_model_does_one_job_at_a_time(art: httpx.Client, api: httpx.Client) -> None:
    model = register(art, "busy", longshore={"seed": WAITS}).json()
    first = sft_job(art, model["id"]).json()
    assert sft_job(art, model["id"]).status_code == 409
    assert art.delete(f"/models/{model['id']}").status_code == 204
    wait_until(lambda: api.get(f"/runs/{first['id']}").json()["state"] == "cancelled", "its job is cancelled")
    assert ended(art, first["id"])[-1]["data"] == {"error_message": "the run was cancelled"}


@pytest.mark.parametrize("body", ["", "[]", '{"model_id": "m"}', '{"trajectory_groups": [{"trajectories": []}]}'])
def test_what_are_no_groups_is_refused(art: httpx.Client, body: str) -> None:
    answer = art.post("/training-jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("job_id", ["rl-none", "rl-none.1", "..", "a.b", "sft-1.x"])
def test_unknown_jobs_are_not_found(art: httpx.Client, job_id: str) -> None:
    assert art.get(f"/training-jobs/{job_id}/events").status_code == 404


def test_a_run_of_another_api_is_no_job(art: httpx.Client, api: httpx.Client) -> None:
    assert art.get(f"/training-jobs/{started(api)}/events").status_code == 404


def test_a_key_needs_its_scope(service: Service, api: httpx.Client) -> None:
    with preview(service, new_key(api, scopes=["read"])["key"]) as reader:
        assert register(reader, "mine").status_code == 403
        assert reader.get("/models").status_code == 200


def test_another_tenant_finds_nothing(art: httpx.Client, their_art: httpx.Client, service: Service, acme: str) -> None:
    mine = register(art, "mine").json()
    job = sft_job(art, mine["id"]).json()
    assert their_art.get("/models").json()["data"] == []
    for method, path in (
        ("GET", f"/models/{mine['id']}"),
        ("DELETE", f"/models/{mine['id']}"),
        ("GET", f"/models/{mine['id']}/checkpoints"),
        ("GET", f"/training-jobs/{job['id']}"),
        ("GET", f"/training-jobs/{job['id']}/events"),
    ):
        assert their_art.request(method, path).status_code == 404, path
    steps = their_art.request("DELETE", f"/models/{mine['id']}/checkpoints", json={"steps": [1]})
    assert steps.status_code == sft_job(their_art, mine["id"]).status_code == 404
    asked = {"model": "wandb-artifact:///default/harbour/mine", "messages": [{"role": "user", "content": "Who?"}]}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=asked, headers=their_art.headers, trust_env=False)
    assert answer.status_code == 404
    assert register(their_art, "mine").json()["id"] != mine["id"], "names are each tenant's own"


def test_a_job_s_run_names_its_model_as_every_run_does(art: httpx.Client, service: Service, tiny_model: Path) -> None:
    model = register(art, "by-its-path", base_model=f"{tiny_model}/").json()
    assert model["base_model"] == f"{tiny_model}/", "the client's own word"
    job = sft_job(art, model["id"]).json()
    with service.http() as api:
        assert api.get(f"/runs/{job['run_id']}").json()["run"]["model"] == tiny_model.as_uri()
