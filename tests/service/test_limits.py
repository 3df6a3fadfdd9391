"""What a key may do: its scopes, where its tenant's URIs lead, quotas, rates; and what is put on record of it."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.client import Client

from service.accounts import keys
from service.accounts.limits import SignInLimit
from shared.settings import RateLimitSettings
from tests.opened import opened
from tests.service.conftest import KEY, Service, new_key, reaches, serving, sft, started
from tests.service.stand_in import SUCCEEDS, WAITS
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (["read"], {"GET /runs", "GET /usage"}),
        (["write"], {"POST /runs/sft", "POST /validate"}),
        (["inference"], set()),
        (["admin"], {"GET /keys", "POST /keys", "GET /audit"}),
    ],
)
def test_a_key_does_what_its_scopes_say(service: Service, theirs, scopes, allowed) -> None:
    asked = ["GET /runs", "GET /usage", "POST /runs/sft", "POST /validate", "GET /keys", "POST /keys", "GET /audit"]
    with service.http(new_key(theirs, scopes=scopes)["key"]) as client:
        for one in asked:
            method, path = one.split()
            answer = client.request(method, path, json=[] if method == "POST" else None)
            assert (answer.status_code != 403) == (one in allowed), (one, answer.text)
            if answer.status_code == 403:
                assert answer.json()["error"]["type"] == "forbidden"
        assert client.get("/whoami").status_code == 200


def test_a_tenant_makes_so_many_keys(service: Service, theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count in no quota: one that is used up must not keep a tenant from changing its keys."""
    monkeypatch.setattr(keys, "_MOST_KEYS", len(theirs.get("/keys").json()) + 1)
    last = new_key(theirs, scopes=["read"])
    assert theirs.delete(f"/keys/{last['key_id']}").status_code == 200
    refused = theirs.post("/keys", json={})
    assert refused.status_code == 409 and "keys" in refused.json()["error"]["message"]


def test_tenants_have_names_of_their_own_and_known_quotas(api, theirs) -> None:
    """Whose affair they are: tests/security/test_tenants_apart.py."""
    assert [t["tenant"] for t in api.get("/tenants").json()] == ["acme", "default"]
    assert api.post("/tenants", json={"tenant": "acme"}).status_code == 409
    assert api.post("/tenants", json={"tenant": "default"}).status_code == 409
    assert api.post("/tenants", json={"tenant": "../x"}).status_code == 422
    assert api.put("/tenants/acme/quotas", json={"concurent_runs": 1}).status_code == 422
    assert api.put("/tenants/nobody/quotas", json={}).status_code == 404


def test_tenants_share_workers_where_it_is_said_of_them(service: Service, api, temporal_address: str) -> None:
    """What the run's workflow is told; what becomes of it is in tests/workflows/leases/test_sharing.py."""

    async def told(run_id: str) -> str | None:
        workflow = (await Client.connect(temporal_address)).get_workflow_handle(run_id)
        begun = (await workflow.fetch_history()).events[0].workflow_execution_started_event_attributes
        payload = opened(begun.input.payloads[0], service.settings)
        found: str | None = json.loads(payload.data)["shares_with"]
        return found

    made = api.post("/tenants", json={"tenant": "apart", "quotas": {"worker_sharing": "all"}}).json()
    with service.http(made["key"]["key"]) as apart:
        assert asyncio.run(told(started(api, seed=SUCCEEDS))) == "default"
        assert asyncio.run(told(started(apart, seed=SUCCEEDS))) == ""
        assert api.put("/tenants/apart/quotas", json={"worker_sharing": "none", "worker_weight": 2}).status_code == 200
        assert asyncio.run(told(started(apart, seed=SUCCEEDS))) is None
        assert api.put("/tenants/apart/quotas", json={}).status_code == 200
        assert asyncio.run(told(started(apart, seed=SUCCEEDS))) == "apart"
    assert api.put("/tenants/apart/quotas", json={"worker_sharing": "some"}).status_code == 422


def test_groups_of_another_tenant_are_refused(api, theirs) -> None:
    """Every other field that takes a URI: tests/security/test_tenants_apart.py."""
    uri = theirs.post("/files", params={"name": "rows.jsonl"}, content=b'{"text": "ours"}\n').json()["uri"]
    assert "/tenants/acme/" in uri
    rl = api.post("/runs/rl", json={"model": "org/tiny"}).json()["run_id"]
    answer = api.post(f"/runs/{rl}/steps", json={"key": "k", "groups": uri})
    assert (answer.status_code, answer.json()["error"]["place"]) == (422, "groups"), answer.text
    api.post(f"/runs/{rl}/finish")


def test_one_idempotency_key_is_anothers_affair_in_another_tenant(api, theirs) -> None:
    headers = {"idempotency-key": "shared"}
    ids = {
        client.post("/runs/sft", json=sft(seed=seed), headers=headers).json()["run_id"]
        for client, seed in ((api, 0), (theirs, 1))
    }
    assert len(ids) == 2


def test_a_file_goes_with_its_last_name(service: Service, theirs) -> None:
    first = theirs.post("/files", params={"name": "gone.jsonl"}, content=b"1\n").json()
    assert theirs.post("/files", params={"name": "gone.jsonl"}, content=b"1\n").json() == first
    path = Path(first["uri"].removeprefix("file://"))
    assert path.read_bytes() == b"1\n"
    assert theirs.delete(f"/files/{first['file_id']}").status_code == 200
    assert theirs.get(f"/files/{first['file_id']}").status_code == 404 and not path.exists()


def test_a_quota_holds_and_is_named(service: Service, api) -> None:
    made = api.post("/tenants", json={"tenant": "small", "quotas": {"concurrent_runs": 1}}).json()
    with service.http(made["key"]["key"]) as small:

        def stored() -> int:
            return int(small.get("/usage").json()["stored_bytes"])

        run_id = started(small, seed=WAITS)
        refused = small.post("/runs/sft", json=sft())
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "quota_exceeded")
        message = refused.json()["error"]["message"]
        assert "concurrent_runs" in message and run_id in message and "longshore cancel RUN" in message
        assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
        assert len(small.get("/runs").json()["runs"]) == 1
        usage = small.get("/usage").json()
        assert (usage["concurrent_runs"], usage["quotas"]["concurrent_runs"]) == (1, 1)
        small.post(f"/runs/{run_id}/pause")
        reaches(small, run_id, "paused")
        other = started(small, seed=WAITS)  # a paused run takes no place
        assert small.post(f"/runs/{run_id}/resume").status_code == 429
        assert api.put("/tenants/small/quotas", json={"concurrent_runs": 2}).status_code == 200
        assert small.post(f"/runs/{run_id}/resume").status_code == 202
        small.post(f"/runs/{other}/cancel")
        for each, state in ((run_id, "succeeded"), (other, "cancelled")):
            reaches(small, each, state)
            assert (gone := small.delete(f"/runs/{each}")).status_code == 200, gone.text
        wait_until(lambda: stored() < 1000, "their last measurements are over")
        before = stored()
        assert api.put("/tenants/small/quotas", json={"stored_bytes": before + 1000}).status_code == 200
        assert small.post("/files", params={"name": "a"}, content=b"x" * 60).status_code == 201
        assert before + 60 < (full := stored()) < before + 600, "with the file's record"
        for content in (b"x" * 941, (piece for piece in (b"x" * 500, b"y" * 500))):  # said beforehand, and not
            refused = small.post("/files", params={"name": "b"}, content=content)
            assert refused.status_code == 429 and "stored_bytes" in refused.json()["error"]["message"]
        assert stored() == full
        with service.http() as others:
            assert others.post("/files", params={"name": "b"}, content=b"x" * 2000).status_code == 201
    assert api.get("/tenants/small/usage").json()["stored_bytes"] == full


def newest(client: httpx.Client, **query: Any) -> Any:
    """The newest entry of the audit log; of `limit` entries all of them."""
    entries = client.get("/audit", params={"limit": 1} | query).json()["entries"]
    return entries if "limit" in query else entries[0]


def test_what_changes_or_is_refused_is_in_the_audit_log_before_its_answer(service: Service, api, theirs) -> None:
    run_id = started(theirs, seed=SUCCEEDS)
    entry = newest(theirs)
    assert entry["key_id"] == theirs.get("/whoami").json()["key_id"]
    assert (entry["tenant"], entry["method"], entry["path"]) == ("acme", "POST", "/api/v1/runs/sft")
    assert (entry["target"], entry["status"], entry["address"]) == (run_id, 201, "127.0.0.1")
    assert entry["time"] == pytest.approx(time.time(), abs=30)
    theirs.get("/runs", params={"limit": 3})
    assert newest(theirs) == entry
    made = new_key(theirs, scopes=["read"])
    assert newest(theirs)["target"] == made["key_id"]
    with service.http(made["key"]) as reader:
        refused = reader.post("/runs/sft", json=sft(), headers={"x-request-id": "look-for-me"})
    assert (newest(theirs)["status"], newest(theirs)["request_id"]) == (403, "look-for-me")
    assert refused.status_code == 403
    httpx.get(f"{service.url}/api/v1/runs?secret=in-a-query", headers={"authorization": "Bearer ls-guess"})
    stranger = newest(api, everybody=True)
    assert (stranger["status"], stranger["tenant"], stranger["key_id"]) == (401, None, None)
    assert "in-a-query" not in str(stranger)
    assert {e["tenant"] for e in api.get("/audit", params={"limit": 1000}).json()["entries"]} == {"default"}
    assert theirs.get("/audit", params={"everybody": True}).status_code == 403
    page = theirs.get("/audit", params={"limit": 2}).json()
    behind = theirs.get("/audit", params={"limit": 2, "before": page["next"]}).json()["entries"]
    assert [e["id"] for e in behind] < [e["id"] for e in page["entries"]]


def test_signing_in_is_in_the_audit_log_and_questions_to_models_are_not(service: Service, api, theirs) -> None:
    made = new_key(theirs, scopes=["read", "inference"])
    shown = f"ls-{made['prefix']}" if not made["prefix"].startswith("ls-") else made["prefix"]
    with httpx.Client(base_url=service.url, trust_env=False) as browser:
        assert browser.post("/login", data={"key": f" {made['key']} "}).status_code == 303
    entry = newest(theirs)
    assert (entry["key_id"], entry["method"], entry["path"]) == (made["key_id"], "POST", "/login")
    assert (entry["target"], entry["status"], entry["address"]) == (shown, 303, "127.0.0.1")
    with httpx.Client(base_url=service.url, trust_env=False) as browser:
        assert browser.post("/login", data={"key": made["key"][:-1] + "~"}).status_code == 401
        assert browser.post("/login", data={"key": made["key"][:-1] + "_-"[made["key"][-1] == "_"]}).status_code == 401
    entry, before = newest(api, everybody=True, limit=2)
    assert (entry["tenant"], entry["key_id"], entry["target"], entry["status"]) == (None, None, shown, 401)
    assert (before["path"], before["target"]) == ("/login", None), "what has not a key's form may be a password"
    assert made["key"][20:] not in str((entry, before))

    entry = newest(theirs)
    question = {"model": "none", "messages": [{"role": "user", "content": "?"}]}
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        for key, status in ((made["key"], 404), (new_key(theirs, scopes=["read"])["key"], 403)):
            headers = {"authorization": f"Bearer {key}"}
            assert client.post("/v1/chat/completions", json=question, headers=headers).status_code == status
    asked = [e for e in theirs.get("/audit").json()["entries"] if e["path"] == "/v1/chat/completions"]
    assert [e["status"] for e in asked] == [403]


def test_a_prompt_that_is_too_long_is_refused_at_the_door(service: Service, theirs) -> None:
    """Before a model is looked up, which none of these names is."""
    key, long = new_key(theirs, scopes=["inference"])["key"], "a" * (8 * service.settings.serving.max_model_len)
    message = {"role": "user", "content": long}
    call = {"type": "function", "function": {"name": "f", "description": long}}
    asked: list[tuple[str, dict[str, Any], str]] = [
        (
            "chat/completions",
            {"messages": [message, message | {"content": [{"type": "text", "text": long}]}]},
            "messages",
        ),
        ("chat/completions", {"messages": [message], "tools": [call]}, "messages"),
        ("responses", {"input": long + long + "a"}, "input"),
        ("completions", {"prompt": ["a", long + long + "a"]}, "prompt"),
    ]
    with httpx.Client(
        base_url=f"{service.url}/v1", headers={"authorization": f"Bearer {key}"}, trust_env=False
    ) as client:
        for path, body, param in asked:
            error = client.post(f"/{path}", json=body | {"model": "none"}).json()["error"]
            assert error["param"] == param and "characters; a text may have 131,072" in error["message"], error
        fits = {"model": "none", "messages": [message]}
        assert client.post("/chat/completions", json=fits).status_code == 404


def test_keys_are_tried_on_the_page_a_few_times_at_once(service: Service, api) -> None:
    few = RateLimitSettings(sign_ins_per_min=0.06, sign_in_burst=3)
    with serving(service.settings.model_copy(update={"rate_limit": few})) as slow:
        with httpx.Client(base_url=slow.url, trust_env=False) as browser:
            answers = [browser.post("/login", data={"key": f"ls-{n:012x}-{'x' * 43}"}) for n in range(4)]
            answers.append(browser.post("/login", data={"key": KEY}))
            assert [answer.status_code for answer in answers] == [401, 401, 401, 429, 429]
            assert 900 < int(answers[3].headers["retry-after"]) <= 1000
            assert "Too many sign-in attempts" in answers[3].text and "set-cookie" not in answers[4].headers
            assert browser.get("/login").status_code == 200
        with slow.http() as calls:
            assert calls.get("/runs").status_code == 200, "of the page alone"
        refused = calls_of(api, "/login", 2)
        assert [entry["status"] for entry in refused] == [429, 429]


def calls_of(api: httpx.Client, path: str, number: int) -> list[dict[str, Any]]:
    """The newest entries of the audit log about a path, of whoever called it."""
    entries = api.get("/audit", params={"everybody": True}).json()["entries"]
    return [entry for entry in entries if entry["path"] == path][:number]


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (("192.0.2.1", "a"), ("192.0.2.1", "b"), True),
        (("192.0.2.1", "a"), ("192.0.2.2", "b"), False),
        (("2001:db8::1", "a"), ("2001:db8::ffff:2", "b"), True),
        (("2001:db8:0:1::1", "a"), ("2001:db8:0:2::1", "b"), False),
        (("::ffff:192.0.2.1", "a"), ("192.0.2.1", "b"), True),
        (("192.0.2.1", f"ls-{'0' * 12}-x"), ("192.0.2.2", f"ls-{'0' * 12}-y"), True),
        (("192.0.2.1", f"ls-{'0' * 12}-x"), ("192.0.2.2", f"ls-{'1' * 12}-x"), False),
        (("testclient", "a"), ("testclient", "b"), True),
    ],
)
def test_tries_to_sign_in_are_counted_by_address_and_by_key(first, second, shares: bool) -> None:
    now = [0.0]
    limit = SignInLimit(RateLimitSettings(sign_ins_per_min=6, sign_in_burst=2), lambda: now[0])
    assert [limit.wait_s(*first) for _ in range(3)] == [0, 0, 10]
    assert limit.wait_s(*second) == (10 if shares else 0)
    now[0] = 10
    assert [limit.wait_s(*first), limit.wait_s(*first)] == [0, 10]


def test_who_asks_too_often_is_told_when_to_ask_again(service: Service, acme: str) -> None:
    hasty = service.settings.model_copy(update={"rate_limit": RateLimitSettings(per_s=0.001, burst=3)})
    with serving(hasty) as slow, slow.http(acme) as theirs, slow.http() as api:
        answers = [theirs.get("/runs") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[3].json()["error"]["type"] == "rate_limited"
        assert 900 < int(answers[3].headers["retry-after"]) <= 1000
        assert api.get("/runs").status_code == 200  # of each key


def test_a_tenant_that_came_into_being_without_a_key_is_given_one(service: Service, api) -> None:
    """Its making was cut off after its row, or else no key of it opens anything any more."""
    name, quotas = "halfway", {"concurrent_runs": 3}
    made = api.post("/tenants", json={"tenant": name, "title": "Half", "quotas": quotas}).json()
    with service.http(made["key"]["key"]) as client:
        assert client.delete(f"/keys/{made['key']['key_id']}").status_code == 200
    again = api.post("/tenants", json={"tenant": name, "title": "Another"})
    assert again.status_code == 201, again.text
    assert again.json()["tenant"]["title"] == "Half", "what is on record is what it is"
    assert name in [tenant["tenant"] for tenant in api.get("/tenants").json()]
    with service.http(again.json()["key"]["key"]) as client:
        assert client.get("/whoami").json()["tenant"] == name
        assert client.get("/usage").json()["quotas"]["concurrent_runs"] == 3
        new_key(client)
    assert api.post("/tenants", json={"tenant": name}).status_code == 409
