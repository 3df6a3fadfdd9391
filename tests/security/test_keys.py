"""A key that is none, was revoked or has expired opens nothing: on every route of every surface, and of the page."""

import re
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import func, select

from service.accounts.keys import COOKIE, CSRF_HEADER, Principal, csrf_token
from service.apis.art.wandb_artifacts import TELEMETRY
from service.apis.page import SIGN_IN
from service.apis.tinker.records import CheckpointRecord, Gateway, TinkerRecords
from service.apis.tinker.routes import signed
from service.app import create_app
from service.database.engine import DocumentRow, FileRow, open_database
from tests.security.belongings import NIGHTLY, TENANT, Belongings, Operation, acquire, wait_for_trials
from tests.security.conftest import client
from tests.service.conftest import Service, sft
from tests.waiting import wait_until

# Telemetry is dropped unread; a link signs in with the scopes of the key that asked for it.
NEEDS_NO_SCOPE = {SIGN_IN, "/login/link", "/logout", *TELEMETRY}
OPEN = {"/api/v1/health"}
ENDINGS = ("/cancel", "/close", "/finish", "/pause", "/complete")
# Their records are bounded by bytes of their own, and kept for hours (shared/chat/trajectories.py).
ANSWERS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
# What hosts and workflows write, and the run that a test's published version is of.
BOUNDED = re.compile(
    r"hosts/|models/imported/|episodes/|runs/[^/]+/(starts|leases|logs|began_with)/|runs/[^/]+/(previous_)?result\.json"
    r"|runs/sft-[0-9a-f]{8}/"
)
KINDS = {
    *("file", "upload", "idempotency key", "sent request", "webhook", "delivery", "schedule", "sweep", "model"),
    *("Tinker session", "episode"),
}
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
                if path.startswith("/v1/"):
                    is_refused &= answer.json()["error"]["type"] == "permission_error"
                wrong += [] if is_refused else [(method, path, answer.status_code, answer.text[:200])]
                tried += 1
    assert wrong == []
    assert tried > 80


def test_a_link_gives_no_more_than_the_key_that_asked_for_it(service: Service, owner: httpx.Client) -> None:
    """Neither other scopes, nor another life: the link and what it has begun end with the key."""
    made = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()
    with client(service, made["key"]) as reader:
        links = [reader.post("/login/link").json()["path"] for _ in range(2)]
        who = reader.get("/api/v1/whoami").json()

    def signs_in(browser: httpx.Client, link: str) -> httpx.Response:
        path, _, once = link.partition("?once=")
        return browser.post(path, data={"once": once})

    with client(service, "") as browser:
        assert signs_in(browser, links[0]).status_code == 303
        assert browser.get("/api/v1/whoami").json() == who and who["scopes"] == ["read"]
        csrf = {CSRF_HEADER: csrf_token(browser.cookies[COOKIE])}
        for path in ("/api/v1/runs/sft", "/api/v1/keys", "/api/v1/schedules", "/login/link"):
            assert browser.post(path, json=sft(), headers=csrf).status_code == 403, path
        assert owner.delete(f"/api/v1/keys/{made['key_id']}").status_code == 200
        assert browser.get("/api/v1/whoami").status_code == 401
        assert signs_in(browser, links[1]).status_code == 401


def test_whatever_a_tenant_makes_counts_at_every_route(
    service: Service, walk: tuple[Operation, ...], tiny_model: Path
) -> None:
    """What is counted is what all routes have put into the store and the database."""
    before, every = _objects(service), {item.key for item in service.store.list("")}
    theirs = acquire(service, tiny_model, {operation.path for operation in walk}, "counted")
    with client(service, theirs.key) as asking:
        assert _ask_all(asking, walk, theirs, tiny_model) == set()
        told = asking.get("/api/v1/usage").json()["stored_bytes"]
    made = {key: size for key, size in _objects(service).items() if size != before.get(key)}
    for kind in ("/run.json", "/commands/", "queries/", "/uploads/"):
        assert any(kind in key for key in made), kind
    rows = _rows(service, "counted")
    assert rows.keys() - {"open sweep"} == KINDS
    least = sum(made.values()) + sum(rows.values())
    of_runs = (item.size for item in service.store.list("runs/") if item.key not in every and BOUNDED.match(item.key))
    assert least <= told <= least + sum(of_runs), made


def test_a_tenant_without_room_makes_nothing_at_any_route_and_can_end_what_it_has(
    service: Service, walk: tuple[Operation, ...], tiny_model: Path
) -> None:
    theirs = acquire(service, tiny_model, {operation.path for operation in walk}, "full")
    with client(service, theirs.key) as asking, service.http() as operator:
        assert operator.put("/tenants/full/quotas", json={"stored_bytes": 1}).status_code == 200
        before, rows = _objects(service), _rows(service, "full")
        refused = _ask_all(asking, walk, theirs, tiny_model)
    # Records that are there may change by little. What was begun before may end, of which its webhook is notified.
    may_end = {"delivery", "open sweep"}
    assert _rows(service, "full").keys() - may_end == rows.keys() - may_end
    assert sum(_rows(service, "full").values()) <= sum(rows.values()) + 4 * 512
    made = [key for key, size in _objects(service).items() if size > before.get(key, -512) + 512]
    assert made == []
    assert refused >= {"/api/v1/runs/sft", "/api/v1/runs/dpo", "/api/v1/runs/rl", "/api/v1/sessions", "/api/v1/files"}
    assert refused >= {"/v1/files", "/v1/uploads", "/v1/fine_tuning/jobs", "/api/v1/webhooks", "/v1/preview/models"}
    assert refused >= {"/v1/uploads/{upload_id}/parts", "/tinker/api/v1/create_session", "/api/v1/schedules"}
    assert not [path for path in refused if path.endswith(ENDINGS)]


def _ask_all(asking: httpx.Client, walk: tuple[Operation, ...], theirs: Belongings, tiny_model: Path) -> set[str]:
    """Ask every route that may make something, those that end something last. Returns what the quota refused."""
    operations = [o for o in walk if o.method not in ("GET", "DELETE") and o.path not in ANSWERS]
    ending = [operation for operation in operations if operation.path.endswith(ENDINGS)]
    answers = [(o.path, o.ask(asking, theirs.ids_for(o))) for o in operations if o not in ending]
    signed = sft(dataset={"uri": "https://example.invalid/rows.jsonl?signature=0"})
    for method, path, body in (
        ("POST", "/api/v1/runs/sft", signed),
        ("POST", "/api/v1/schedules", NIGHTLY | {"name": "second"}),
        ("POST", "/v1/preview/models", {"name": "second", "base_model": tiny_model.as_uri()}),
        ("POST", "/tinker/api/v1/create_session", {"user_metadata": {"told": "x" * 1000}}),
        ("PUT", f"/api/v1/sessions/{theirs.session}/commands/2", {"kind": "save_state"}),
    ):
        answers.append((path, asking.request(method, path, json=body)))
    answers += [(o.path, o.ask(asking, theirs.ids_for(o))) for o in ending]
    wait_for_trials(asking)
    return {path for path, answer in answers if answer.status_code in (403, 429) and "stored_bytes" in answer.text}


def _rows(service: Service, tenant: str) -> dict[str, int]:
    """The counted bytes of a tenant's rows, by their kind."""
    documents = select(DocumentRow.kind, func.sum(DocumentRow.num_bytes)).where(DocumentRow.tenant == tenant)
    files = select(func.count()).where(FileRow.tenant == tenant)
    with closing(open_database(service.settings)) as database:
        found = database.write(lambda session: session.execute(documents.group_by(DocumentRow.kind)).all())
        num_files = database.write(lambda session: session.scalars(files).one())
    return {kind: int(num_bytes) for kind, num_bytes in found} | {"file": 512 * num_files}


def _objects(service: Service) -> dict[str, int]:
    """The bytes of each object in the store that requests make, if nothing else bounds their number."""
    return {item.key: item.size for item in service.store.list("") if not BOUNDED.match(item.key)}


def test_a_signed_address_ends_with_the_key_that_asked_for_it(service: Service, owner: httpx.Client) -> None:
    made = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()
    backend = create_app(service.settings).state.backend
    asking = Principal(tenant=TENANT, key_id=made["key_id"], scopes=frozenset({"read"}))
    model_id = f"tinker-{'0' * 21}:train:0"
    checkpoint = CheckpointRecord(model_id=model_id, kind="external_weights", name="nobodys", command=1)
    door = Gateway(backend, asking, TinkerRecords(backend.database, backend.quotas, TENANT))
    address, _ = signed(door, checkpoint, service.url)
    assert httpx.get(f"{address}/archive.tar", trust_env=False).status_code == 404
    assert owner.delete(f"/api/v1/keys/{made['key_id']}").status_code == 200
    refused = httpx.get(f"{address}/archive.tar", trust_env=False)
    assert refused.status_code == 403 and "good no longer" in refused.text
