"""The page of sweeps: a table, and the same in parallel coordinates."""

import re

import httpx

from shared.runs.requests import RunRecord
from shared.storage.paths import RunKeys
from tests.page import measured
from tests.page.guest import PHONE, Browser, Guest, expect
from tests.service.conftest import Service, sft
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


def swept(api: httpx.Client, **changes) -> dict:
    run = {"kind": "sft", **sft(**changes.pop("run", {}))}
    rates, ranks = {"choices": [0.001, 0.01]}, {"min": 4, "max": 64, "integer": True, "log": True}
    body = {"name": "tides", "run": run, "metric": "loss", "sampler": "random", "trials": 4, "seed": 1}
    body |= {"parameters": {"learning_rate": rates, "trainable.rank": ranks}}
    answer = api.post("/sweeps", json=body | changes)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_sweep_is_shown_as_lines_and_as_a_table(browser: Browser, service: Service, acme: str) -> None:
    """It is another tenant's, so that its runs are in no list that other tests count."""
    with service.http(acme) as api:
        sweep = swept(api)

        def look() -> dict | None:
            view = api.get(f"/sweeps/{sweep['sweep_id']}").json()
            return view if view["state"] != "running" else None

        view = wait_until(look, "the sweep's end")
        for trial in view["trials"][:3]:
            record = RunRecord.model_validate_json(service.store.get_bytes(RunKeys(trial["run_id"]).record))
            rank = record.run.trainable.rank
            measured.ended_as(service.store, trial["run_id"], metrics={"loss": 1 / rank + record.run.learning_rate})
        measured.ended_as(service.store, view["trials"][3]["run_id"], metrics={})
        service.rebuild()
        view = api.get(f"/sweeps/{sweep['sweep_id']}").json()
        held = swept(api, name="held", run={"seed": WAITS}, parallel=2)

    guest = Guest(browser, service.url, acme, viewport=PHONE)
    page = guest.page
    page.goto("/sweeps")
    card = page.get_by_label("Sweep tides")
    expect(card.locator("tbody tr")).to_have_count(4)
    # The text form has all that the lines have: every trial, its values, and the best.
    for trial in view["trials"]:
        row = card.locator("tbody tr").nth(trial["number"])
        expect(row.get_by_role("link")).to_have_attribute("href", f"/runs/{trial['run_id']}")
        expect(row).to_contain_text(str(trial["values"]["trainable.rank"]))
    expect(card.locator("tbody tr").nth(view["best"])).to_contain_text(f"{view['best']} (best)")
    picture = card.get_by_role(
        "img", name=re.compile("Parallel coordinates of 3 trials: learning_rate, trainable.rank, loss")
    )
    expect(picture.locator("path")).to_have_count(3)
    best = picture.locator("path.s0")
    expect(best).to_have_count(1)
    assert f"trial {view['best']}: loss" in (best.locator("title").text_content() or "")

    # Each line is where its trial's values are, from the lower end of an axis to the upper one.
    ends = [
        [float(y) for y in re.findall(r" ([\d.]+)", path.get_attribute("d") or "")]
        for path in picture.locator("path").all()
    ]
    values = {t["number"]: t for t in view["trials"]}
    shown = [int(re.findall(r"trial (\d+)", p.text_content() or "")[0]) for p in picture.locator("path title").all()]
    by_rank = sorted(range(3), key=lambda n: -ends[n][1])
    assert [values[shown[n]]["values"]["trainable.rank"] for n in by_rank] == sorted(
        values[n]["values"]["trainable.rank"] for n in shown
    )
    by_loss = sorted(range(3), key=lambda n: -ends[n][2])
    assert [values[shown[n]]["value"] for n in by_loss] == sorted(values[n]["value"] for n in shown)
    assert guest.overflow <= 0

    expect(page.get_by_label("Sweep held")).to_contain_text("running")
    page.get_by_role("button", name="Cancel: held").click()
    page.get_by_role("dialog").get_by_role("button", name=re.compile("^Yes")).click()
    expect(page.locator("#toast")).to_contain_text("held: cancelled.")
    with service.http(acme) as api:
        wait_until(lambda: api.get(f"/sweeps/{held['sweep_id']}").json()["state"] == "cancelled", "its end")
    assert guest.troubles == []
    guest.context.close()
