"""The page in a real Chromium, in front of a real service: what people see, press and read."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import delete
from tokenizers import Tokenizer

from service.accounts.keys import COOKIE, CSRF_HEADER
from service.database.engine import open_database
from service.database.tables import RunRow
from service.runs.rows import run_row
from shared.contract import Fence
from shared.jobs.events import Step
from shared.runs.requests import RunRecord, SFTRun
from shared.runs.status import Problem, RunStatus
from shared.settings import DownloadSettings, Settings
from shared.storage import artifacts
from shared.storage.artifacts import FileEntry, Manifest, refer
from shared.storage.paths import RunKeys
from tests.conftest import S3Server
from tests.page import measured
from tests.service.conftest import (  # noqa: F401 - fixtures
    KEY,
    Service,
    acme,
    api,
    new_key,
    polling,
    postgres_server,
    reaches,
    service,
    serving,
    settings,
    sft,
    started,
    theirs,
    wait_until,
)
from tests.service.postgres import new_database
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
try:
    from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
except ImportError:
    pytest.skip("playwright is not installed", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip("there is no chromium on this machine: apt-get install chromium", allow_module_level=True)

expect.set_options(timeout=30_000)
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
QWEN = "file:///models/Qwen3-0.6B"
SCREENSHOTS = os.environ.get("LONGSHORE_TEST_SCREENSHOTS")
"""A folder for the pictures of docs/page.md: LONGSHORE_TEST_SCREENSHOTS=docs/images"""
PICTURES = ("list_desktop_light.png", "rl_desktop_light.png", "list_phone_dark.png", "run_phone_dark.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Guest:
    """A browser of its own, signed in, that notes what it should not have seen."""

    def __init__(self, browser: Browser, url: str, key: str = KEY, **options) -> None:
        self.context: BrowserContext = browser.new_context(base_url=url, **({"viewport": DESKTOP} | options))
        self.context.set_default_timeout(30_000)
        self.page: Page = self.context.new_page()
        self.troubles: list[str] = []
        self._origin = urlsplit(url).netloc
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.troubles.append(said.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", self._note)
        answer = self.context.request.post("/login", form={"key": key}, max_redirects=0)
        assert answer.status == 303, answer.text()

    def _note(self, request) -> None:
        if urlsplit(request.url).netloc != self._origin and not request.url.startswith("data:"):
            self.troubles.append(f"asked elsewhere: {request.url}")

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture(scope="module")
def trained(service: Service, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:  # noqa: F811
    """Runs of every kind and state, by what they are for."""

    def on_record(run_id: str) -> None:
        """A workflow says that it has ended a moment before."""
        wait_until(lambda: service.store.head(RunKeys(run_id).result), "its result is on record")

    with service.http() as client:
        runs = {
            "sft": started(client, seed=SUCCEEDS, name="harbour-chat", model=QWEN, steps=240),
            "failed": started(client, seed=FAILS, name="bad-rows", model=QWEN),
            "running": started(client, seed=WAITS, name="night-shift", model=QWEN),
            "evil": started(client, seed=SUCCEEDS, model=f"file:///models/{measured.XSS}"),
            "rl": client.post("/runs/rl", json={"model": QWEN, "name": "arithmetic"}).json()["run_id"],
        }
        for name in ("sft", "evil"):
            reaches(client, runs[name], "succeeded")
            on_record(runs[name])
        reaches(client, runs["failed"], "failed")
        on_record(runs["failed"])
        for name in ("sft", "evil"):
            measured.sft_course(service.store, runs[name])
        measured.finish(service.store, runs["sft"], tmp_path_factory.mktemp("adapter"))
        tokenizer = tiny_model / "tokenizer.json"
        entry = FileEntry(path="tokenizer.json", size=tokenizer.stat().st_size, sha256=artifacts.sha256_file(tokenizer))
        model = refer(service.store, "models/imported/tiny", Manifest(files=(entry,), root=tiny_model.as_uri()))
        ids = Tokenizer.from_file(str(tokenizer)).encode(f"How many crates? {measured.XSS} 42 crates.").ids
        measured.rl_course(service.store, runs["rl"], model, ids)
        client.post(f"/runs/{runs['rl']}/finish")
        reaches(client, runs["rl"], "succeeded")
        on_record(runs["rl"])
        times = {"started_at": measured.BEGAN, "ended_at": measured.BEGAN + 214, "gpu_seconds": 171.0}
        lost = {"trajectories": 32.0, "broken_trajectories": 3.0, "dropped_for_differs": 3.0}
        measured.ended_as(service.store, runs["rl"], step=30, num_steps=30, epoch=1, metrics=lost, **times)
    service.rebuild()
    return runs


@pytest.fixture
def guest(browser: Browser, service: Service, trained: dict[str, str]) -> Iterator[Guest]:  # noqa: F811
    """Signed in; whatever a test does, the browser must have had nothing to complain of, and have asked nobody else."""
    one = Guest(browser, service.url)
    yield one
    troubles = list(one.troubles)
    one.context.close()
    assert troubles == []


# Signing in.


def test_a_key_is_shown_once_and_never_kept_by_the_browser(browser: Browser, service: Service) -> None:  # noqa: F811
    context = browser.new_context(base_url=service.url)
    page = context.new_page()
    page.goto("/schedules")
    assert page.url.endswith("/login?after=%2Fschedules")
    page.get_by_label("API key").fill("ls-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known")
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
def session_of(service: Service, key: str = KEY) -> Iterator[httpx.Client]:  # noqa: F811
    with httpx.Client(base_url=service.url, trust_env=False, timeout=30) as client:
        assert client.post("/login", data={"key": key}).status_code == 303
        yield client


def test_a_session_is_its_keys_and_changes_things_from_its_own_page_alone(service: Service, api, theirs) -> None:  # noqa: F811
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


def test_nobody_is_sent_elsewhere_after_signing_in(service: Service) -> None:  # noqa: F811
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        for after in ("https://evil.example/", "//evil.example", "/\\evil.example", "/api/v1/runs", "javascript:x"):
            assert client.post("/login", data={"key": KEY, "after": after}).headers["location"] == "/"
        script = client.get("/static/page.js")
        assert (script.status_code, script.headers["cache-control"]) == (200, "no-cache")
        assert client.get("/static/page.js", headers={"if-none-match": script.headers["etag"]}).status_code == 304
        assert client.get("/static/../pages.py").status_code in (401, 404)
        assert client.get("/static/%2e%2e/pages.py").status_code == 404


def test_another_tenants_runs_have_no_files(theirs, trained: dict[str, str]) -> None:  # noqa: F811
    run = f"/runs/{trained['sft']}"
    fence = "e000002-a01"
    for path in ("report", "jobs", f"jobs/000001/{fence}", f"jobs/000001/{fence}/output", "steps/1/rollouts"):
        assert theirs.get(f"{run}/{path}").status_code == 404, path
    assert theirs.get(f"{run}/checkpoints/{fence}/240/download").status_code == 404
    assert theirs.get("/sparklines", params={"run_id": trained["sft"]}).json() == {}


def test_what_a_run_does_not_have_is_not_found(api, trained: dict[str, str]) -> None:  # noqa: F811
    run, fence = f"/runs/{trained['sft']}", "e000002-a01"
    for path in (f"jobs/000009/{fence}", "jobs/000001/e000001-a02", f"checkpoints/{fence}/3/download"):
        assert api.get(f"{run}/{path}").status_code == 404, path
    assert api.get(f"{run}/jobs/000001/..%2f..%2frun.json").status_code in (404, 422)
    assert api.get(f"{run}/jobs/000001/e000001-a00").status_code == 404  # the form of a fence, and none
    assert api.get(f"{run}/steps/1/rollouts").status_code == 409


# The list.


def test_the_list_shows_how_runs_stand(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="harbour-chat"))
    expect(row).to_contain_text("succeeded")
    expect(row).to_contain_text("240 / 240")
    expect(row).to_contain_text("worker lost")
    expect(row).to_contain_text("4 min 42 s")  # GPU time
    expect(row.get_by_role("img", name=re.compile(r"loss from 2\.\d+ to 0\.\d+"))).to_be_visible()
    rewards = page.get_by_role("row").filter(has_text="arithmetic")
    expect(rewards.get_by_role("img", name=re.compile("reward from"))).to_be_visible()
    page.get_by_role("button", name=re.compile("^failed")).click()
    expect(page.get_by_role("link", name="bad-rows")).to_be_visible()
    expect(page.get_by_role("link", name="harbour-chat")).to_have_count(0)
    assert page.url.endswith("/?state=failed")
    page.get_by_role("button", name=re.compile("^all")).click()
    page.get_by_label("Kind").select_option("rl")
    expect(page.locator("#rows tr")).to_have_count(1)
    page.get_by_label("Kind").select_option("")
    page.get_by_label("Search").fill("HARBOUR")
    expect(page.locator("#rows tr")).to_have_count(1)
    page.get_by_label("Search").fill("100%_")  # no pattern, but three letters that no run has
    expect(page.locator("#empty")).to_contain_text("No run matches these filters")


def test_a_waiting_run_has_a_place_in_the_queue(guest: Guest, service: Service, api, theirs) -> None:  # noqa: F811
    """Its place is among all tenants' runs, of which it learns nothing else."""
    run, began = SFTRun.model_validate(sft(name="patience")), time.time()
    ids = {"sft-first": "acme", "sft-second": "default", "sft-third": "default"}
    rows = [
        run_row(
            RunRecord(run_id=run_id, tenant=tenant, run=run, created_at=began + n),
            RunStatus(run_id=run_id, phase="waiting_for_worker"),
        )
        for n, (run_id, tenant) in enumerate(ids.items())
    ]
    database = open_database(service.settings)
    database.write(lambda session: session.add_all(rows))
    wait_until(lambda: "sft-second" in api.get("/overview").json()["waiting"], "an answer of before is used up")
    mine, others = (client.get("/overview").json()["waiting"] for client in (api, theirs))
    assert set(others) == {"sft-first"} and not others.keys() & mine.keys()
    assert [mine["sft-second"] - others["sft-first"], mine["sft-third"] - others["sft-first"]] == [1, 2]
    guest.page.goto("/?words=patience")
    row = guest.page.get_by_role("row").filter(has=guest.page.get_by_text("sft-third"))
    expect(row).to_contain_text(f"position {mine['sft-third']} in the queue")
    expect(row.locator(".state")).to_contain_text("queued")
    database.write(lambda session: session.execute(delete(RunRow).where(RunRow.run_id.in_(ids))))
    database.close()


@pytest.fixture
def standing(service: Service) -> Iterator[None]:  # noqa: F811
    """Rows as other runs leave them: paused and resumed, refused for its data, on a published model, with two lost."""
    names = {"sft-resumed": "resumed", "sft-refused": "refused", "sft-on-harbour": None, "sft-bumpy": "bumpy"}
    before = measured.spans(*measured.PREPARED, *measured.PAUSED)
    after = measured.spans(*measured.PREPARED, *measured.RESUMED, at=measured.BEGAN + 600)
    done = {"state": "succeeded", "phase": "done", "step": 50, "num_steps": 50, "epoch": 2, "gpu_seconds": 50.0}
    times = {"started_at": measured.BEGAN, "ended_at": measured.BEGAN + 638}
    refused = Problem(kind="invalid_input", message="train.jsonl:3: no assistant turn")
    lost = (
        ("training", 9, 1),
        ("waiting_for_worker", 0, 1),
        ("waiting_for_worker", 5, 2),
        ("waiting_for_worker", 5, 3),
    )
    changes = {
        "sft-resumed": done | times | {"timeline": before + after, "metrics": {"loss": 0.25}},
        "sft-refused": {"state": "failed", "phase": "tokenizing", "problem": refused},
        "sft-on-harbour": done,
        "sft-bumpy": done | {"workers_lost": 2, "timeline": measured.spans(*lost, ("training", 9, 3))},
    }
    source = {"uri": "file:///data/rows.jsonl"}
    model = "file:///store/tenants/default/adapters/harbour/v000001"
    rows = []
    for n, (run_id, name) in enumerate(names.items()):
        run = SFTRun.model_validate(sft(name=name, model=model, eval_dataset=source))
        record = RunRecord(run_id=run_id, run=run, created_at=measured.BEGAN + n, owner="bootstrap")
        rows.append(run_row(record, RunStatus(run_id=run_id, **changes[run_id])))
    database = open_database(service.settings)
    database.write(lambda session: session.add_all(rows))
    yield
    database.write(lambda session: session.execute(delete(RunRow).where(RunRow.run_id.in_(names))))
    database.close()


def test_the_list_says_what_became_of_runs(guest: Guest, standing: None) -> None:
    page = guest.page
    page.goto("/?words=harbour/v")

    def row(run_id: str):
        return page.locator("#rows tr").filter(has=page.locator(f'a[href="/runs/{run_id}"]'))

    expect(row("sft-refused")).to_contain_text("train.jsonl:3: no assistant turn")
    expect(row("sft-refused").locator("progress")).to_have_count(0)
    expect(row("sft-on-harbour").locator(".under")).to_have_text("harbour v1")  # its id is its title
    expect(row("sft-resumed").locator(".under")).to_have_text("sft-resumed · harbour v1")
    expect(row("sft-resumed")).to_contain_text("10 min 38 s")  # since it first began
    expect(row("sft-resumed").locator(".mark")).to_have_count(0)  # its user gave the worker back
    expect(row("sft-bumpy").locator(".mark")).to_have_text("2 workers lost")
    heights = page.locator("#rows .owner").evaluate_all("nodes => nodes.map((node) => node.firstChild.offsetHeight)")
    assert len(heights) == 4 and max(heights) < 30  # on one line


def test_runs_of_many_ways_are_told_apart(guest: Guest, standing: None) -> None:
    page = guest.page
    page.goto("/runs/sft-resumed")
    glance, phases = page.get_by_label("Summary"), page.locator("#timeline-body")
    for text in ("10 min 38 s", "9 min 07 s of it paused or stopped", "50 s", "Loss0.25", "API or CLI", "harbour v1"):
        expect(glance).to_contain_text(text)
    expect(page.locator("main .mark:not(.calm)")).to_have_count(0)
    phases.get_by_text("All 18 phases").click()
    for text in ("tokenizing (train)", "tokenizing (held out)", "resumed"):
        expect(phases.get_by_text(text).first).to_be_visible()
    expect(phases.get_by_text("waiting for worker")).to_have_count(2)
    page.goto("/runs/sft-refused")
    expect(page.locator("#actions button")).to_have_text(["Run again"])
    expect(glance).to_contain_text("no step was done")
    expect(page.locator("#chart-grid")).to_have_text("No step was done: there is nothing to draw.")
    expect(page.locator("#samples-body")).to_have_text("There were none.")
    assert "Phase" not in glance.inner_text()


def test_time_left_is_the_runs_own_estimate(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/schedules")
    ask = "async (run) => (await import('/static/status.js')).etaSeconds(run)"
    now = page.evaluate("Date.now() / 1000")
    run = {"state": "running", "estimated_end": now + 250}
    assert page.evaluate(ask, run) == pytest.approx(250, abs=5)
    for change in ({"estimated_end": now - 1}, {"estimated_end": None}, {"state": "paused"}):
        assert page.evaluate(ask, run | change) is None


def test_many_runs_are_listed_at_once_and_paged(guest: Guest, service: Service, api, trained) -> None:  # noqa: F811
    """Ten thousand rows beside those that ran: the list asks for fifty."""
    database = open_database(service.settings)
    run = SFTRun.model_validate(sft())
    rows = [
        run_row(
            RunRecord(run_id=f"sft-old-{n:05d}", run=run, created_at=1000.0 + n),
            RunStatus(run_id=f"sft-old-{n:05d}", state="succeeded", phase="done", step=4, num_steps=4),
        )
        for n in range(10_000)
    ]
    database.write(lambda session: session.add_all(rows))
    database.close()
    page = guest.page
    page.goto("/")
    expect(page.locator("#summary")).to_contain_text("10,0")
    expect(page.locator("#rows tr")).to_have_count(50)
    early = (
        "performance.getEntriesByType('resource').filter((one) => one.initiatorType === 'link').map((one) => one.name)"
    )
    asked = [url.rsplit("/api/v1/")[1] for url in page.evaluate(early) if "/api/" in url]
    assert sorted(asked) == ["overview", "runs?limit=50"]  # on their way beside the scripts, and used: see Guest
    first = page.locator("#rows .title").first.inner_text()
    page.get_by_role("button", name="Older").click()
    expect(page.locator("#rows .title").first).not_to_have_text(first)
    expect(page.get_by_role("button", name="Newest")).to_be_enabled()
    page.get_by_role("button", name="Newest").click()
    expect(page.locator("#rows .title").first).to_have_text(first)


# A run.


def test_a_run_is_understood_at_a_glance(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['sft']}")
    expect(page.get_by_role("heading", level=1)).to_have_text("harbour-chat")
    glance = page.get_by_label("Summary")
    for text in ("succeeded", "4 min 42 s", "harbour-chat v3", "step 240 of 240"):
        expect(glance).to_contain_text(text)
    for title in ("Loss", "Learning rate", "Gradient norm", "Throughput", "Device memory"):
        expect(page.locator("figure.chart").filter(has_text=title).first).to_be_visible()
    loss = page.locator("figure.chart").filter(has_text="held out").first
    expect(loss.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"train 0\.\d+ at step 240"))
    expect(loss.locator("line.restart")).to_have_count(1)  # where the second worker went on
    loss.get_by_role("img").focus()
    page.keyboard.press("ArrowRight")
    expect(loss.locator(".tip")).to_contain_text("step 0")
    page.keyboard.press("ArrowRight")
    expect(loss.locator(".tip")).to_contain_text(re.compile(r"step 1\D*train \d"))
    expect(page.locator("#timeline-body")).to_contain_text("worker lost: lease 2")
    data = page.locator("#data-body")
    for text in ("6,361", "26.2 %", "≤512", "92.1 %"):
        expect(data).to_contain_text(text)
    data.get_by_text("Rows dropped").click()
    expect(data).to_contain_text("train.jsonl:88")


def test_logs_are_searched(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['sft']}#logs")
    lines = page.locator("#log-lines > div")
    expect(lines.last).to_contain_text("succeeded")
    page.locator("#log-words").fill("CHECKPOINT")
    expect(lines).to_have_count(1)
    expect(lines.first.locator("mark")).to_have_text("checkpoint")
    expect(page.locator("#log-count")).to_contain_text("1 of")


def test_files_are_downloaded_to_the_byte(guest: Guest, service: Service, trained: dict[str, str]) -> None:  # noqa: F811
    page, keys = guest.page, RunKeys(trained["sft"])
    page.goto(f"/runs/{trained['sft']}")
    with page.expect_download() as found:
        page.get_by_role("link", name="Download the checkpoint of step 240").click()
    assert found.value.suggested_filename == f"{trained['sft']}-e000002-a01-step-240.tar"
    assert bytes(range(256)) * 300 in Path(found.value.path()).read_bytes()
    page.get_by_text("Job file 000001, e000002-a01").click()
    shown = page.locator("details[open] pre")
    expect(shown).to_contain_text('"schema_version"')
    exact = next(i.key for i in service.store.list(f"{keys.logs}/000001/e000002-a01/job.json"))
    assert shown.inner_text() == service.store.get_bytes(exact).decode()
    page.get_by_text("Worker's output 000001, e000001-a01").click()
    expect(page.locator("#request-body")).to_contain_text("SIGKILL: the worker is gone")


def test_two_runs_are_compared(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['sft']}")
    page.get_by_label("Compare with").select_option(trained["evil"])
    expect(page.locator("#differences")).to_contain_text("fields of the request differ")
    expect(page.get_by_role("rowheader", name="name", exact=True)).to_be_visible()
    loss = page.locator("figure.chart").filter(has_text="held out").first
    expect(loss.locator("path.other").first).to_be_attached()
    expect(loss.locator(".legend i.dashed")).to_have_count(2)  # as their lines are
    assert f"with={trained['evil']}" in page.url


def test_rl_runs_show_rewards_and_what_was_sampled(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['rl']}")
    expect(page.locator("#facts")).to_contain_text(
        re.compile(r"Trajectories dropped in the last step\s*3 of 32\s*differs 3")
    )
    for title in ("Reward", "Spread within groups", "KL", "Entropy", "Clipped tokens", "Length of answers"):
        expect(page.locator("figure.chart").filter(has_text=title).first).to_be_visible()
    expect(page.locator("figure.chart path.band")).to_have_count(1)
    kl = page.locator("figure.chart").filter(has=page.get_by_role("img", name=re.compile("^KL:")))
    expect(kl.locator(".latest")).to_have_text(re.compile(r"^0\.002"))  # to the reference
    memory = page.locator("figure.chart").filter(has_text="Device memory")
    expect(memory.locator("text", has_text="GiB")).to_have_text(["0 GiB", "0.5 GiB", "1 GiB"])
    flat = """async () => {
        const { Chart } = await import("/static/chart.js");
        const chart = new Chart("none", { fromZero: true });
        chart.draw({ series: [{ name: "share", color: 0, points: [[1, 0], [2, 0]] }] });
        return [chart.bounds.low, chart.bounds.high];
    }"""
    assert page.evaluate(flat) == [0, 1]  # a share is never below zero
    time_split = page.locator("figure.chart").filter(has_text="Where the time goes")
    expect(time_split.locator("rect")).to_have_count(30 * 4 + 6)
    samples = page.locator("#samples-body")
    expect(samples).to_contain_text("How many crates?")
    expect(samples).to_contain_text("42 crates.")
    expect(samples).to_contain_text(re.compile(r"reward 0\.\d"))
    slider = samples.get_by_role("slider", name="Step")
    slider.focus()
    page.keyboard.press("Home")
    expect(samples).to_contain_text("train step 1")


def test_what_others_wrote_is_shown_as_text(guest: Guest, api, trained: dict[str, str]) -> None:  # noqa: F811
    page = guest.page
    for path in ("/", f"/runs/{trained['evil']}", f"/runs/{trained['rl']}"):
        page.goto(path)
        expect(page.locator("main")).to_contain_text("<script>" if path != "/" else "harbour-chat")
        assert page.locator("main img, main script").count() == 0
        assert "owned" not in page.title()
    page.goto(f"/runs/{trained['evil']}")
    expect(page.locator("#samples-body pre").filter(has_text=measured.XSS).first).to_be_visible()


def test_buttons_do_what_they_say(guest: Guest, api, trained: dict[str, str]) -> None:  # noqa: F811
    page, run_id = guest.page, started(api, seed=WAITS, name="to-be-stopped")
    page.goto(f"/runs/{run_id}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="No, go back").click()
    assert api.get(f"/runs/{run_id}").json()["state"] == "running"
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#toast")).to_contain_text("pauses after the current step")
    expect(page.get_by_label("Summary")).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_label("Summary")).to_contain_text("succeeded")
    expect(page.locator("#actions button")).to_have_count(0)
    page.goto(f"/runs/{trained['running']}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Yes").click()
    expect(page.get_by_label("Summary")).to_contain_text("cancelled")
    page.goto(f"/runs/{trained['failed']}")
    expect(page.get_by_role("alert")).to_contain_text("train.jsonl:3: no assistant turn")
    expect(page.locator("#actions button")).to_have_count(1)  # resumed it would meet the same row again
    page.get_by_role("button", name="Run again").click()
    page.get_by_role("button", name="Yes").click()
    page.wait_for_url(re.compile(rf"/runs/(?!{trained['failed']})sft-"))
    expect(page.get_by_role("heading", level=1)).to_have_text("bad-rows")


def test_a_live_run_moves_under_ones_eyes(guest: Guest, service: Service, api) -> None:  # noqa: F811
    run_id, page = started(api, seed=WAITS), guest.page
    page.goto(f"/runs/{run_id}")
    expect(page.locator("#chart-grid")).to_contain_text("Charts come with the first step")
    for step, loss in ((1, 2.5), (2, 1.25)):
        event = Step(seq=step, time=float(step), step=step, metrics={"loss": loss})
        part = RunKeys(run_id).log_part("000001", Fence(epoch=1), step)
        service.store.put_bytes(part, event.model_dump_json().encode() + b"\n")
        expect(page.locator("figure.chart .latest")).to_have_text(str(loss))
    expect(page.locator("#log-lines")).to_contain_text("step 2: loss 1.25")
    api.post(f"/runs/{run_id}/cancel")
    expect(page.get_by_label("Summary")).to_contain_text("cancelled")


def test_examples_are_shown_with_the_trained_tokens_marked(
    guest: Guest,
    api,  # noqa: F811
    tiny_model: Path,
    settings: Settings,  # noqa: F811
) -> None:
    rows = settings.root_path.parent / "page_rows.jsonl"
    rows.write_text('{"prompt": "Who climbs aboard? <b>", "completion": "The pilot."}\n')
    model = settings.root_path.parent / "page_model"
    shutil.copytree(tiny_model, model)
    run_id = started(api, seed=SUCCEEDS, model=model.as_uri(), dataset={"uri": rows.as_uri()}, max_tokens=64)
    page = guest.page
    page.goto(f"/runs/{run_id}")
    page.get_by_role("button", name="Preview examples").click()
    shown = page.locator("#preview .spans-of-tokens")
    expect(shown).to_contain_text("Who climbs aboard? <b>")
    expect(shown.locator(".trained").first).to_contain_text("The pilot.")


def test_a_run_that_there_is_not_says_so(browser: Browser, service: Service) -> None:  # noqa: F811
    one = Guest(browser, service.url)
    one.page.goto("/runs/sft-nothing")
    expect(one.page.get_by_role("heading", level=1)).to_have_text("No such run")
    assert [trouble for trouble in one.troubles if "404" not in trouble] == []
    one.context.close()


def test_schedules_are_paused_and_act(guest: Guest, service: Service, api) -> None:  # noqa: F811
    rows = service.settings.root_path.parent / "nocturnal.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    body = {"name": "nocturnal", "cron": "0 2 * * *", "run": {"kind": "sft", **sft(dataset={"uri": rows.as_uri()})}}
    assert api.post("/schedules", json=body).status_code == 201
    page = guest.page
    page.goto("/schedules")
    card = page.get_by_label("Schedule nocturnal")
    expect(card).to_contain_text("0 2 * * * (UTC)")
    page.get_by_role("button", name="Pause: nocturnal").click()
    expect(card).to_contain_text("paused")
    page.get_by_role("button", name="Resume: nocturnal").click()
    expect(card).to_contain_text("next in")
    page.get_by_role("button", name="Trigger: nocturnal").click()
    expect(card.get_by_role("link", name=re.compile("^sft-"))).to_be_visible()
    api.delete("/schedules/nocturnal")


def test_schedules_are_made_filled_in_and_removed(guest: Guest, service: Service, api) -> None:  # noqa: F811
    rows = service.settings.root_path.parent / "weekly.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    page = guest.page
    page.goto("/schedules")
    page.get_by_text("New schedule").click()
    form, make = page.locator("#new-schedule"), page.get_by_role("button", name="Create schedule")

    def field(name: str):
        return form.locator(f'[name="{name}"]')

    def refused(name: str, rule: str) -> None:
        make.click()
        expect(field(name)).to_have_attribute("aria-invalid", "true")
        expect(field(name)).to_be_focused()
        expect(page.locator(f"#new-schedule-{name}-problem")).to_contain_text(rule)
        expect(form.locator(".field-problem")).to_have_count(1)

    make.click()
    expect(field("name")).to_be_focused()
    expect(page.locator("#new-schedule-dataset-problem")).to_contain_text("at least 1 character")
    expect(form.locator(".field-problem")).to_have_count(4)  # and the model's, and cron's
    field("model").fill("file:///models/tiny")
    field("dataset").fill(rows.as_uri())
    field("cron").fill("0 2 * * 1")
    refused("name", "a letter or digit first")
    field("name").fill("weekly")
    field("settings").fill("{")
    refused("settings", "This is no JSON")
    field("settings").fill('{"epochs": 1, "batch_size": 2, "learning_rate": 99}')
    refused("settings", "learning_rate")
    field("settings").fill('{"epochs": 1, "batch_size": 2}')
    field("model").fill("")
    refused("model", "at least 1 character")
    field("model").fill("file:///models/tiny")
    field("cron").fill("at two")
    refused("cron", "five fields")
    field("when").select_option("every")
    expect(field("cron")).to_be_hidden()
    refused("every", "valid integer")
    field("when").select_option("cron")
    field("cron").fill("0 2 * * 1")
    field("timezone").fill("Europe/Atlantis")
    refused("timezone", "no time zone is called")
    field("timezone").fill("Europe/Berlin")
    field("overlap").select_option("buffer_one")
    field("catch_up").fill("45")
    field("run_name").fill("Weekly notes")
    refused("run_name", "a letter or digit first")
    field("run_name").fill("weekly-notes")
    field("continues").check()
    make.click()
    card = page.get_by_label("Schedule weekly", exact=True)
    expect(card).to_contain_text("0 2 * * 1 (Europe/Berlin)")
    expect(card).to_contain_text("45 minutes")
    expect(form).to_be_hidden()
    made = api.get("/schedules/weekly").json()["scheduled"]
    wanted = {"cron": "0 2 * * 1", "timezone": "Europe/Berlin", "overlap": "buffer_one", "catch_up_s": 2700}
    assert made.items() >= (wanted | {"continues": True, "even_unchanged": False}).items()
    run = made["run"]
    assert (run["name"], run["dataset"]["uri"], run["batch_size"]) == ("weekly-notes", rows.as_uri(), 2)

    page.get_by_role("button", name="Backfill: weekly").click()
    ask = page.locator("#backfill")
    ask.get_by_label("From", exact=True).fill("2026-03-01T00:00:00")
    ask.get_by_label("To", exact=True).fill("2026-02-01T00:00:00")
    ask.get_by_role("button", name="Backfill").click()
    expect(ask.get_by_role("alert")).to_contain_text("end is not before begin")
    ask.get_by_label("To", exact=True).fill("2026-03-03T00:00:00")  # one Monday
    ask.get_by_role("button", name="Backfill").click()
    expect(ask).to_be_hidden()
    expect(card.get_by_role("link", name=re.compile("^sft-"))).to_have_count(1)

    polled: list[str] = []
    page.on("request", lambda request: polled.append(urlsplit(request.url).path))
    page.get_by_role("button", name="Remove: weekly").click()
    page.get_by_role("button", name="No, go back").click()
    expect(card).to_be_visible()
    page.get_by_role("button", name="Remove: weekly").click()
    page.get_by_role("button", name="Yes").click()
    expect(card).to_have_count(0)
    assert api.get("/schedules/weekly").status_code == 404 and "/api/v1/schedules" in polled
    guest.troubles[:] = [t for t in guest.troubles if "422" not in t and "404" not in t]  # as Chromium notes refusals


def test_the_schedules_page_asks_for_the_list_alone(guest: Guest, api) -> None:  # noqa: F811
    for name in ("one", "two"):
        body = {"name": name, "every_s": 86400, "run": {"kind": "sft", **sft()}}
        assert api.post("/schedules", json=body).is_success
    page, asked = guest.page, []
    page.goto("/schedules")
    expect(page.get_by_label("Schedule two")).to_contain_text("every 1 day")
    page.wait_for_load_state("networkidle")
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    wait_until(lambda: page.wait_for_timeout(100) or len(asked) > 1, "two more turns")
    assert set(asked) == {"/api/v1/schedules"}
    for name in ("one", "two"):
        api.delete(f"/schedules/{name}")


# On what a cluster has.


@pytest.fixture
def cluster(
    settings: Settings,  # noqa: F811
    postgres_server: str,  # noqa: F811
    s3_server: S3Server,
    tmp_path: Path,
) -> Iterator[Service]:
    """A service whose database is PostgreSQL and whose store is on S3."""
    changes = {
        "root": tmp_path / "root",
        "control_queue": f"control-cluster-{os.getpid()}",
        "database_url": SecretStr(new_database(postgres_server, f"page-{time.time_ns()}")),
        "store_uri": f"{s3_server.uri}/page-{os.getpid()}",
        "s3": s3_server.settings,
        "download": DownloadSettings(file_roots=(tmp_path,)),
    }
    chosen = settings.model_copy(update=changes)
    with serving(chosen) as service, polling(chosen):  # noqa: F811
        yield service


def test_postgresql_and_s3_carry_the_page_and_the_api(
    browser: Browser, cluster: Service, tiny_model: Path, tmp_path: Path
) -> None:
    with cluster.http() as api:  # noqa: F811
        run_id = started(api, seed=SUCCEEDS, name="harbour-chat", steps=240)
        again = [api.post("/runs/sft", json=sft(), headers={"idempotency-key": "once"}) for _ in range(2)]
        assert [answer.status_code for answer in again] == [201, 201]
        assert again[0].json()["run_id"] == again[1].json()["run_id"]
        reaches(api, run_id, "succeeded")
        measured.sft_course(cluster.store, run_id)
        measured.finish(cluster.store, run_id, tmp_path)
        cluster.rebuild()
        found = api.get("/runs", params={"words": "HARBOUR", "kind": "sft", "state": "succeeded"}).json()["runs"]
        assert [run["run_id"] for run in found] == [run_id]
        assert api.get("/runs", params={"words": "100%_"}).json()["runs"] == []
        page = api.get("/runs", params={"limit": 1}).json()
        assert [run["run_id"] for run in api.get("/runs", params={"after": page["next"]}).json()["runs"]] == [run_id]
        assert len(api.get(f"/runs/{run_id}/metrics").json()["steps"]) == 240
        assert len(api.get(f"/runs/{run_id}/events", params={"limit": 5}).json()["events"]) == 5

        rows = b'{"prompt": "Who climbs aboard?", "completion": "The pilot."}\n'
        file = api.post("/files", params={"name": "rows.jsonl"}, content=rows).json()
        assert file["uri"].startswith(f"{cluster.settings.store_uri}/tenants/default/")
        shutil.copytree(tiny_model, tmp_path / "model")
        asked = {"source": {"uri": file["uri"]}, "model_uri": (tmp_path / "model").as_uri(), "max_tokens": 64}
        checked = api.post("/validate", json=asked)
        assert checked.status_code == 200, checked.text
        hook = api.post("/webhooks", json={"url": "https://example.org/hook"}).json()
        assert [view["id"] for view in api.get("/webhooks").json()] == [hook["id"]]
        assert api.post(
            "/schedules", json={"name": "s", "cron": "0 2 * * *", "run": {"kind": "sft", **sft()}}
        ).is_success
        assert [one["scheduled"]["name"] for one in api.get("/schedules").json()] == ["s"]
        assert api.delete("/schedules/s").is_success and api.delete(f"/webhooks/{hook['id']}").is_success
        made = new_key(api, title="of the browser", scopes=["read", "write"])
        usage = api.get("/usage").json()
        assert usage["stored_bytes"] >= len(rows) and usage["concurrent_runs"] <= 1

        one = Guest(browser, cluster.url, made["key"])
        one.page.goto("/")
        row = one.page.get_by_role("row").filter(has=one.page.get_by_role("link", name="harbour-chat"))
        expect(row).to_contain_text("240 / 240")
        expect(row.get_by_role("img", name=re.compile(r"loss from 2\.\d+ to 0\.\d+"))).to_be_visible()
        row.get_by_role("link", name="harbour-chat").click()
        expect(one.page.get_by_label("Summary")).to_contain_text("step 240 of 240")
        with one.page.expect_download() as download:
            one.page.get_by_role("link", name="Download the checkpoint of step 240").click()
        assert bytes(range(256)) * 300 in Path(download.value.path()).read_bytes()
        assert one.troubles == []
        signed_in = api.get("/audit", params={"limit": 1}).json()["entries"][0]
        assert (signed_in["path"], signed_in["key_id"]) == ("/login", made["key_id"])
        assert api.delete(f"/keys/{made['key_id']}").is_success
        assert one.context.request.get("/api/v1/runs").status == 401
        one.context.close()


# For everybody.


def test_everything_is_reached_by_keyboard(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto("/")
    expect(page.get_by_role("link", name="harbour-chat")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#main:focus").wait_for(state="attached")

    def focused() -> str:
        return page.evaluate("document.activeElement.textContent")

    def tab_to(text: str, most: int = 120) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if text in focused():
                return
        raise AssertionError(f"Tab never came to {text}")

    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.get_by_label("Search").focus()
    page.keyboard.type("night-shift")
    expect(page.locator("#rows tr")).to_have_count(1)
    tab_to("night-shift")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{trained['running']}")
    expect(page.locator("#actions > *").first).to_be_visible()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, a, input, select, [role=img]")].filter((node) =>
            !node.textContent.trim() && !node.getAttribute("aria-label") && !(node.labels && node.labels.length)
        ).map((node) => node.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize(("name", "size", "scheme"), [("phone", PHONE, "dark"), ("desktop", DESKTOP, "light")])
def test_pages_fit_the_screen_and_can_be_read(
    browser: Browser,
    service: Service,  # noqa: F811
    trained: dict[str, str],
    name: str,
    size: dict[str, int],
    scheme: str,
) -> None:
    """Nothing is wider than the screen, and text stands out from its ground by WCAG's ratio."""
    one = Guest(browser, service.url, viewport=size, color_scheme=scheme, is_mobile=name == "phone")
    page = one.page
    for what, path, ready in (
        ("list", "/?words=qwen", "harbour-chat"),
        ("run", f"/runs/{trained['sft']}", "Device memory"),
        ("rl", f"/runs/{trained['rl']}", "Where the time goes"),
        ("schedules", "/schedules", "No schedules"),
    ):
        page.goto(path)
        expect(page.locator("main")).to_contain_text(ready)
        if what == "schedules":
            page.get_by_text("New schedule").click()
        expect(page.locator("#toast")).to_have_text("")
        assert one.overflow <= 0, (path, page.evaluate(_WIDE))
        assert page.evaluate(_PALE) == [], path
        picture = f"{what}_{name}_{scheme}.png"
        if SCREENSHOTS and picture in PICTURES:
            time.sleep(1)  # charts have their final size
            page.screenshot(path=Path(SCREENSHOTS) / picture)
    assert one.troubles == []
    one.context.close()


def test_colours_are_the_readers_choice(guest: Guest) -> None:
    page = guest.page
    page.goto("/")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate(ground) != before
    dark = page.evaluate(ground)
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(ground) == before


_WIDE = """
[...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
  .map((node) => `${node.tagName}#${node.id}.${node.className}`).slice(0, 12)
"""
_PALE = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!text || node.closest("svg, :disabled, dialog, .unseen") || !node.getClientRects().length) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const what = `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`;
    if (ratio < 4.5) found.push(`${what} ${ratio.toFixed(2)}`);
  }
  return found.slice(0, 8);
})()
"""
