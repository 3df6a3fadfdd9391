"""Signing in, and what belongs to the tenant: keys, usage and cost, webhooks, files, models; several runs compared."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from longshore.accounts import ALL_SCOPES
from service.accounts.keys import COOKIE, CSRF_HEADER
from tests.page import measured
from tests.page.guest import Browser, Guest, expect, plotted
from tests.service.conftest import KEY, Service, new_key, sft, started
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


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


def test_a_key_is_shown_once_and_revoked(guest: Guest, service: Service, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/account")
    keys = page.get_by_role("region", name="API keys", exact=True)
    expect(keys).to_contain_text(measured.XSS)
    assert page.locator("main img, main script").count() == 0 and "owned" not in page.title()
    keys.get_by_text("New key").click()
    keys.get_by_role("textbox", name="Title").fill("tide table")
    keys.get_by_label("write", exact=True).uncheck()
    keys.get_by_role("button", name="Create key").click()
    made = keys.get_by_label("The new key").input_value()
    with service.http(made) as client:
        who = client.get("/whoami").json()
        assert (who["title"], set(who["scopes"])) == ("tide table", {"read", "inference"})
        page.reload()
        expect(keys).to_contain_text("tide table")
        assert made not in page.content() and made[:10] in page.content()
        keys.get_by_role("button", name="Revoke tide table").click()
        page.get_by_role("button", name="Yes").click()
        expect(keys.get_by_role("row").filter(has_text="tide table")).to_contain_text("revoked")
        assert client.get("/whoami").status_code == 401


def test_usage_and_its_limits_are_shown(guest: Guest, api: httpx.Client, trained: dict[str, str]) -> None:
    page = guest.page
    api.put("/tenants/default/quotas", json={"spending": 40, "gpu_hours": 16})
    page.goto("/account")
    usage = page.locator("#usage")
    for text in ("GPU hours in 30 days", "of 16 h", "Cost in 30 days", "of 40.00 USD", "Stored"):
        expect(usage).to_contain_text(text)
    expect(usage.locator("meter")).to_have_count(2)
    api.put("/tenants/default/quotas", json={})
    page.goto(f"/runs/{trained['sft']}")
    expect(page.get_by_label("Summary")).to_contain_text("0.20 USD")  # 282 s at 2.50 an hour


def test_a_webhook_is_made_looked_at_and_deleted(guest: Guest, api: httpx.Client, trained: dict[str, str]) -> None:
    page, url = guest.page, "http://127.0.0.1:9/hook?<b>"
    page.goto("/account")
    hooks = page.get_by_role("region", name="Webhooks", exact=True)
    hooks.get_by_text("New webhook").click()
    hooks.get_by_label("Address").fill("http://user@127.0.0.1/hook")
    create = hooks.get_by_role("button", name="Create webhook")
    create.click()
    expect(hooks.get_by_role("alert")).to_contain_text("a url may not carry a user")
    hooks.get_by_label("Address").fill(url)
    hooks.get_by_label("run.failed", exact=True).check()
    create.click()
    secret = hooks.get_by_label("The secret that messages are signed with").input_value()
    assert secret.startswith("whsec_")
    mine = hooks.get_by_role("article", name=f"Webhook {url}")
    expect(mine).to_contain_text("run.failed")
    mine.get_by_role("button", name="Ping").click()
    expect(page.locator("#toast")).to_contain_text("Ping sent.")
    hook = next(each for each in api.get("/webhooks").raise_for_status().json() if each["url"] == url)
    wait_until(lambda: api.get(f"/webhooks/{hook['id']}/deliveries").json(), "the ping is on record")
    mine.get_by_role("button", name="Deliveries").click()
    expect(mine.get_by_role("cell", name="ping", exact=True)).to_be_visible()
    mine.get_by_role("button", name="Switch off").click()
    expect(mine).to_contain_text("switched off")
    mine.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Yes").click()
    expect(mine).to_have_count(0)
    guest.troubles[:] = [trouble for trouble in guest.troubles if "422" not in trouble]  # as Chromium notes refusals


def test_who_may_not_see_keys_is_told_so(browser: Browser, service: Service, api: httpx.Client, trained) -> None:
    reader = new_key(api, title="reader", scopes=[scope for scope in ALL_SCOPES if scope != "admin"])["key"]
    one = Guest(browser, service.url, key=reader)
    one.page.goto("/account")
    expect(one.page.locator("#keys")).to_contain_text("lacks the scope admin")
    expect(one.page.locator("#usage")).to_contain_text("GPU hours")
    one.context.close()


def test_files_are_uploaded_and_deleted(guest: Guest, tmp_path: Path, trained: dict[str, str]) -> None:
    page = guest.page
    rows = tmp_path / "tides.jsonl"
    rows.write_text('{"text": "high water"}\n')
    page.goto("/files")
    page.get_by_label("Upload a file").set_input_files(rows)
    row = page.get_by_role("row").filter(has_text="tides.jsonl")
    with page.expect_download() as found:
        row.get_by_role("link", name="Download").click()
    assert Path(found.value.path()).read_bytes() == rows.read_bytes()
    row.get_by_role("link", name="Train on").click()
    expect(page.locator("#new-run [name=dataset]")).to_have_value("tides.jsonl")
    page.goto("/files")
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Yes").click()
    expect(row).to_have_count(0)


def test_models_are_listed_with_their_versions(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/models")
    row = page.get_by_role("row").filter(has_text="harbour-chat")
    row.get_by_text("v2 of 2").click()
    with page.expect_download() as found:
        row.get_by_role("link", name="v1", exact=True).click()
    assert found.value.suggested_filename == "harbour-chat-v1.tar"
    row.get_by_role("link", name="Train on").click()
    expect(page.locator("#new-run [name=model]")).to_have_value("harbour-chat")
    page.goto("/models")
    page.get_by_label("Compare with").select_option("harbour-chat:base")
    page.get_by_label("Message", exact=True).fill("Who is there?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_several_runs_are_compared(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/?kind=sft")
    page.get_by_label("Compare harbour-chat").check()
    expect(page.locator("#compare")).to_be_hidden()
    page.get_by_label(f"Compare {trained['evil']}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.locator("#compared li")).to_have_count(2)
    loss = page.locator("figure.chart").filter(has_text="Loss: train")
    expect(loss.locator(".legend li")).to_have_text(["harbour-chat", trained["evil"]])
    assert len({one["color"] for one in plotted(loss)["series"] if not one["faint"]}) == 2
    rows = page.locator("#table")
    expect(rows.get_by_role("rowheader", name="model", exact=True)).to_be_visible()
    expect(rows.get_by_role("row").filter(has_text="cost")).to_contain_text("0.20 USD")
    expect(rows).to_contain_text(measured.XSS[:20])
    for width in (390, 1280):  # the second run's column is seen beside a long address
        page.set_viewport_size({"width": width, "height": 900})
        box = rows.get_by_role("row").filter(has_text="file:///models").first.locator("td").nth(1).bounding_box()
        assert box is not None and box["x"] + box["width"] <= width, (width, box)
    page.get_by_label("Add").select_option(trained["rl"])
    expect(page.locator("#compared li")).to_have_count(3)
    expect(page.locator("figure.chart").filter(has_text="Reward: mean")).to_be_visible()
    page.get_by_role("button", name="Leave out harbour-chat").click()
    expect(page.locator("#compared li")).to_have_count(2)
    assert trained["sft"] not in page.url
