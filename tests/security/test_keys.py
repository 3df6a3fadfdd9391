"""A key that is none, was revoked or has expired opens nothing: on every route of every surface, and of the page."""

import time

import httpx
import pytest

from tests.security.belongings import Belongings, Operation
from tests.security.conftest import client
from tests.service.conftest import Service, wait_until

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


def test_a_key_without_a_scope_changes_nothing(
    service: Service, walk: tuple[Operation, ...], belongings: Belongings, owner: httpx.Client
) -> None:
    """A reader's key on every operation that is no GET: forbidden, before anything is looked up."""
    reader = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()["key"]
    with client(service, reader) as asking:
        for operation in walk:
            if operation.method == "GET":
                continue
            answer = operation.ask(asking, belongings.ids_for(operation))
            assert answer.status_code == 403, (operation, answer.text)
