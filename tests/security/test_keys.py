"""A key that is none, was revoked or has expired opens nothing: on every route of every surface, and of the page."""

import re
import time

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from service.accounts.principals import Principal
from service.apis.art.wandb_artifacts import TELEMETRY
from service.apis.page.pages import SIGN_IN
from service.apis.tinker.door import Door
from service.apis.tinker.downloads import signed
from service.apis.tinker.records import CheckpointRecord, TinkerRecords
from service.app import create_app
from tests.security.belongings import NIGHTLY, TENANT, Belongings, Operation
from tests.security.conftest import client
from tests.service.conftest import Service, wait_until

# Telemetry is dropped unread; a link signs in with the scopes of the key that asked for it.
NEEDS_NO_SCOPE = {SIGN_IN, "/login/link", "/logout", *TELEMETRY}
OPEN = {"/api/v1/health"}
BESIDE = ("/api/v1/openapi.json", "/", "/schedules", "/runs/sft-1", "/nothing", "/v1/nothing", "/v1/preview/nothing")


@pytest.fixture(scope="module")
def dead_keys(service: Service, belongings: Belongings) -> dict[str, str]:
    """Keys of acme's that were good once, by what became of them; and some that never were."""
    with client(service, belongings.key) as acme:
        made = [acme.post("/api/v1/keys", json={"title": "soon gone"}).json() for _ in range(2)]
        expires = acme.post("/api/v1/keys", json={"expires_at": time.time() + 6}).json()
        for key in (*(m["key"] for m in made), expires["key"]):
            with client(service, key) as asking:
                wait_until(lambda: asking.get("/api/v1/whoami").status_code == 200 or time.time(), "the key is used")
        for one in made:
            assert acme.delete(f"/api/v1/keys/{one['key_id']}").status_code == 200
    with client(service, expires["key"]) as asking:
        wait_until(lambda: asking.get("/api/v1/whoami").status_code == 401, "the key expires")
    good = belongings.key
    return {
        "revoked": made[0]["key"],
        "expired": expires["key"],
        "no key": "",
        "another's prefix": good[:16] + made[1]["key"][16:],
        "cut short": good[:-1],
        "too long": good + "a",
        "only the prefix": good.rpartition("-")[0],
    }


def test_no_route_opens_to_a_key_that_is_none(
    service: Service, walk: tuple[Operation, ...], belongings: Belongings, dead_keys: dict[str, str]
) -> None:
    tried, wrong = 0, []
    for why, key in dead_keys.items():
        every = why in ("revoked", "expired", "no key")  # the others go the same way: a few routes will do
        with client(service, key) as asking:
            for operation in walk if every else walk[:8]:
                if operation.path in OPEN:
                    continue
                answer = operation.ask(asking, belongings.ids_for(operation))
                kind = "authentication_error" if operation.path.startswith("/v1/") else "unauthorized"
                if (answer.status_code, answer.json()["error"]["type"]) != (401, kind):
                    wrong.append((why, operation, answer.status_code, answer.text))
                assert answer.headers["www-authenticate"] == "Bearer"
                tried += 1
            for path in BESIDE:
                assert asking.get(path).status_code in (401, 303), (why, path)
    assert wrong == []
    assert tried >= 3 * 70


def test_other_ways_to_show_a_key_are_none(service: Service, belongings: Belongings) -> None:
    """In a query, a cookie, another header, or twice."""
    good = belongings.key
    for headers, query in (
        ({}, {"api_key": good}),
        ({}, {"access_token": good}),
        ({"cookie": f"longshore_session={good}"}, {}),
        ({"x-api-key": good}, {}),
        ({"authorization": good}, {}),
        ({"authorization": f"Basic {good}"}, {}),
        ({"authorization": f"Bearer {good}, Bearer {good}"}, {}),
    ):
        answer = httpx.get(f"{service.url}/api/v1/runs", headers=headers, params=query, trust_env=False)
        assert answer.status_code == 401, headers


def test_a_reader_s_key_changes_nothing_at_any_route(service: Service, owner: httpx.Client) -> None:
    """Every method that is no GET, of every route of the application: forbidden, before anything is looked up."""
    reader = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()["key"]
    routes = iter_route_contexts(create_app(service.settings).routes)
    tried, wrong = 0, []
    with client(service, reader) as asking:
        for route in routes:
            path = re.sub(r"{.*?}", "nobodys", route.path or "")
            for method in (route.methods or set()) - {"GET", "HEAD"}:
                if path in NEEDS_NO_SCOPE:
                    continue
                answer = asking.request(method, path, json={})
                is_refused = answer.status_code == 403 or "lacks the scope" in answer.text  # GraphQL answers 200
                wrong += [] if is_refused else [(method, path, answer.status_code, answer.text[:200])]
                tried += 1
    assert wrong == []
    assert tried > 80


def test_records_of_every_kind_find_room_or_are_refused(service: Service) -> None:
    """Texts of a tenant's own in records: they count in its quota, and the one that would break it is refused."""
    with service.http() as operator:
        made = operator.post("/tenants", json={"tenant": "records", "quotas": {"stored_bytes": 400_000}}).json()
    session = {"user_metadata": {"told": "x" * 300_000}}
    with client(service, made["key"]["key"]) as asking:

        def stored() -> int:
            return int(asking.get("/api/v1/usage").json()["stored_bytes"])

        assert asking.post("/api/v1/schedules", json=NIGHTLY).status_code == 201
        assert 0 < (schedule := stored()) < 10_000
        assert asking.post("/tinker/api/v1/create_session", json=session).status_code == 200
        assert 300_000 < stored() - schedule < 301_000
        refused = asking.post("/tinker/api/v1/create_session", json=session)
        assert refused.status_code == 403 and "stored_bytes" in refused.text


def test_a_signed_address_ends_with_the_key_that_asked_for_it(service: Service, owner: httpx.Client) -> None:
    made = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()
    backend = create_app(service.settings).state.backend
    asking = Principal(tenant=TENANT, key_id=made["key_id"], scopes=frozenset({"read"}))
    model_id = f"tinker-{'0' * 21}:train:0"
    checkpoint = CheckpointRecord(model_id=model_id, kind="external_weights", name="nobodys", command=1)
    door = Door(backend, asking, TinkerRecords(backend.store, backend.quotas, TENANT))
    address, _ = signed(door, checkpoint, service.url)
    assert httpx.get(f"{address}/archive.tar", trust_env=False).status_code == 404
    assert owner.delete(f"/api/v1/keys/{made['key_id']}").status_code == 200
    refused = httpx.get(f"{address}/archive.tar", trust_env=False)
    assert refused.status_code == 403 and "good no longer" in refused.text
