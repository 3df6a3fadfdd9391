"""The page of sweeps: a table, and the same in parallel coordinates."""

import re
from typing import Any

from tests.page.guest import PHONE, Browser, Guest, expect
from tests.service.conftest import Service, sft
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


def test_a_sweep_is_shown_as_lines_and_as_a_table(
    browser: Browser, service: Service, sweeper: str, swept: dict[str, Any]
) -> None:
    view = swept
    body = {key: swept["sweep"][key] for key in ("parameters", "metric", "sampler", "trials", "seed")}
    run = {"kind": "sft", **sft(seed=WAITS)}
    with service.http(sweeper) as api:
        held = api.post("/sweeps", json=body | {"name": "held", "run": run, "parallel": 2}).json()
    guest = Guest(browser, service.url, sweeper, viewport=PHONE)
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
    best = picture.locator("path.c0")
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
    with service.http(sweeper) as api:
        wait_until(lambda: api.get(f"/sweeps/{held['sweep_id']}").json()["state"] == "cancelled", "its end")
    assert guest.troubles == []
    guest.context.close()


def test_a_sweep_is_started_on_the_page(browser: Browser, service: Service, sweeper: str) -> None:
    """Values have the command line's notation, the dataset is uploaded, and refusals are shown at their fields."""
    rows = service.settings.root_path.parent / "currents.jsonl"
    rows.write_text('{"prompt": "Who climbs aboard?", "completion": "The pilot."}\n' * 5)
    guest = Guest(browser, service.url, sweeper)
    page = guest.page
    page.goto("/sweeps")
    page.get_by_text("New sweep", exact=True).click()
    form = page.locator("#new-sweep")
    form.get_by_label("Name of the sweep").fill("currents")
    form.get_by_label("Model").fill("file:///models/tiny")
    form.get_by_label("Upload the dataset").set_input_files(rows)
    expect(form.locator('[name="dataset"]')).to_have_value("currents.jsonl")
    form.get_by_label("Metric", exact=True).fill("loss")
    form.get_by_label("Values are chosen").select_option("random")
    form.get_by_label("Trials", exact=True).fill("3")
    form.get_by_label("Values of field 1").fill("1e-3..1e-5:log")
    page.get_by_role("button", name="Add a field").click()
    form.get_by_label("Field 2", exact=True).fill("trainable.rank")
    form.get_by_label("Values of field 2").fill("4, 8")
    form.get_by_role("button", name="Start sweep").click()
    expect(page.locator("#new-sweep-values_0-problem")).to_contain_text("a greater max")
    form.get_by_label("Values of field 1").fill("1e-5..1e-3:log")
    form.get_by_role("button", name="Start sweep").click()
    expect(page.locator("#toast")).to_contain_text("currents: started.")
    expect(page.get_by_label("Sweep currents").locator("tbody tr")).to_have_count(3)
    with service.http(sweeper) as api:
        [sweep] = [view["sweep"] for view in api.get("/sweeps").json() if view["sweep"]["name"] == "currents"]
    space = {"choices": None, "min": 1e-5, "max": 1e-3, "log": True, "integer": False}
    assert sweep["parameters"]["learning_rate"] == space
    assert sweep["parameters"]["trainable.rank"]["choices"] == [4, 8]
    assert (sweep["sampler"], sweep["trials"], sweep["metric"], sweep["direction"]) == ("random", 3, "loss", None)
    assert sweep["run"]["dataset"]["uri"].endswith("/currents.jsonl") and sweep["run"]["batch_size"] == 8
    assert [trouble for trouble in guest.troubles if "422" not in trouble] == []  # as Chromium notes refusals
    guest.context.close()
