"""Signing in, and what a session may do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from service.accounts.keys import COOKIE, CSRF_HEADER
from tests.page.guest import Browser, expect
from tests.service.conftest import KEY, Service, new_key, sft, started
from tests.service.stand_in import WAITS


def test_a_key_is_shown_once_and_never_kept_by_the_browser(browser: Browser, service: Service) -> None:
    context = browser.new_context(base_url=service.url)
    page = context.new_page()
    page.goto("/schedules")
    assert page.url.endswith("/login?after=%2Fschedules")
    page.get_by_label("API key").fill("ls-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#schedules")).to_contain_text("No schedules")
    (cookie,) = context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (COOKIE, True, "Strict")
    assert KEY not in str(context.storage_state()) and page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/login")
    assert context.request.get("/api/v1/runs", headers={"cookie": f"{COOKIE}={cookie['value']}"}).status == 401
    context.close()


@contextmanager
def session_of(service: Service, key: str = KEY) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=30) as client:
        assert client.post("/login", data={"key": key}).status_code == 303
        yield client


def test_a_session_is_its_keys_and_changes_things_from_its_own_page_alone(service: Service, api, theirs) -> None:
    run_id = started(api, seed=WAITS)
    with session_of(service) as mine:
        assert mine.get(f"/api/v1/runs/{run_id}").status_code == 200
        for token in (None, "", "0" * 64, "é"):
            headers = {} if token is None else {CSRF_HEADER: token.encode()}
            answer = mine.post(f"/api/v1/runs/{run_id}/cancel", headers=headers)
            assert answer.status_code == 403, token
        frame = mine.get("/")
        (csrf,) = re.findall(r'data-csrf="([0-9a-f]{64})"', frame.text)
        assert mine.post(f"/api/v1/runs/{run_id}/cancel", headers={CSRF_HEADER: csrf}).status_code == 202
        policy = frame.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy and "default-src 'none'" in policy
        assert not re.findall(r"<script(?![^>]*\bsrc=)", frame.text) and "style=" not in frame.text
        other = mine.post("/login", data={"key": KEY}, headers={"sec-fetch-site": "cross-site"})
        assert other.status_code == 403 and "set-cookie" not in other.headers
    made = new_key(theirs, title="short", scopes=["read"])
    with session_of(service, made["key"]) as reader:
        assert reader.get(f"/api/v1/runs/{run_id}").status_code == 404  # another tenant's
        assert reader.get("/api/v1/overview").json()["counts"] == {}
        (csrf,) = re.findall(r'data-csrf="([0-9a-f]{64})"', reader.get("/").text)
        assert reader.post("/api/v1/runs/sft", json=sft(), headers={CSRF_HEADER: csrf}).status_code == 403  # no scope
        assert theirs.delete(f"/keys/{made['key_id']}").status_code == 200
        assert reader.get("/api/v1/runs").status_code == 401
        assert reader.get("/").headers["location"] == "/login?after=%2F"


def test_scripts_are_asked_for_again_and_sent_where_they_are_new(service: Service) -> None:
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        script = client.get("/static/page.js")
        assert (script.status_code, script.headers["cache-control"]) == (200, "no-cache")
        assert client.get("/static/page.js", headers={"if-none-match": script.headers["etag"]}).status_code == 304


def test_what_a_run_does_not_have_is_not_found(api, trained: dict[str, str]) -> None:
    run, fence = f"/runs/{trained['sft']}", "e000002-a01"
    for path in (f"jobs/000009/{fence}", "jobs/000001/e000001-a02", f"checkpoints/{fence}/3/download"):
        assert api.get(f"{run}/{path}").status_code == 404, path
    assert api.get(f"{run}/jobs/000001/..%2f..%2frun.json").status_code in (404, 422)
    assert api.get(f"{run}/jobs/000001/e000001-a00").status_code == 404  # the form of a fence, and none
    assert api.get(f"{run}/steps/1/rollouts").status_code == 409
