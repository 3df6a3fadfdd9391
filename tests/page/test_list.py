"""The list of runs: how they stand, what became of them, and many of them; and the list of hosts."""

import re
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import delete

from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord
from longshore.views import Devices, Problem, RunStatus
from service.database.engine import RunRow, open_database
from service.runs.rows import run_row
from shared.storage.host_states import HostState, delete_state, write_state
from tests.page import measured
from tests.page.guest import Browser, Guest, expect
from tests.service.conftest import Service, sft
from tests.waiting import wait_until


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


def test_a_waiting_run_has_a_place_in_the_queue(guest: Guest, service: Service, api, theirs) -> None:
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
def standing(service: Service) -> Iterator[None]:
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
    expect(glance).to_contain_text("no step completed")
    expect(page.locator("#chart-grid")).to_have_text("The run completed no step, so there is nothing to draw.")
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


def test_many_runs_are_listed_at_once_and_paged(guest: Guest, service: Service, api, trained) -> None:
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


def test_hosts_are_listed_and_told_apart(browser: Browser, service: Service, acme: str) -> None:
    """Two of one machine differ by their ids; another tenant sees no machine's name."""
    now, shape = time.time(), service.settings.shape

    def host(own_id: str, **more) -> HostState:
        queue = f"host-quay-{own_id}"
        return HostState(**{"role": "gpu", "shape": shape, "name": "quay", "queue": queue, "seen_at": now} | more)

    devices = Devices(number=8, num_bytes=80 << 30)
    states = [
        host("11111111aaaa", devices=devices, max_ranks=8, lease_since=now - 754),
        host("22222222bbbb", devices=devices, max_ranks=8),
        host("33333333cccc", role="sampler", lacks=("torch is not installed",)),
    ]
    for state in states:
        write_state(service.store, state)
    with service.http() as api:
        [gpu] = [each for each in api.get("/hosts").json() if each["role"] == "gpu"]
    assert {(each["name"], each["id"]) for each in gpu["hosts"]} == {("quay", "11111111"), ("quay", "22222222")}
    guest = Guest(browser, service.url)
    guest.page.goto("/hosts")
    rows = guest.page.locator("#hosts tbody tr")
    expect(rows).to_have_count(3)
    working, waiting, broken = (rows.filter(has_text=state.id) for state in states)
    expect(working).to_contain_text(re.compile(rf"quay.*GPU.*{shape}.*8 . 80.0 GiB.*has been working for 12 min"))
    expect(waiting).to_contain_text("idle")
    expect(broken).to_contain_text(re.compile("Sampler.*takes no runs.*torch is not installed"))
    expect(guest.page.locator("#roles")).to_contain_text(
        re.compile("Control hosts[1-9].*GPU hosts2 up.*Sampler hosts1 up")
    )
    assert guest.troubles == []
    guest.context.close()
    other = Guest(browser, service.url, acme)
    other.page.goto("/hosts")
    expect(other.page.locator("#hosts tbody tr")).to_have_count(3)
    assert "quay" not in other.page.locator("main").inner_text()
    other.context.close()
    for state in states:
        delete_state(service.store, state)
