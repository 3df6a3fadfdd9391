"""The pages of schedules and of sweeps: these as a table, and the same in parallel coordinates."""

import re
from typing import Any
from urllib.parse import urlsplit

from tests.page.guest import PHONE, Browser, Guest, Locator, Page, expect
from tests.service.conftest import Service, sft
from tests.service.stand_in import WAITS
from tests.waiting import wait_until


def test_schedules_are_paused_and_act(guest: Guest, service: Service, api) -> None:
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


class Form:
    """The form of a new schedule."""

    def __init__(self, page: Page) -> None:
        self.page, self.element = page, page.locator("#new-schedule")
        self.make = page.get_by_role("button", name="Create schedule")

    def field(self, name: str) -> Locator:
        return self.element.locator(f'[name="{name}"]')

    def refused(self, name: str, rule: str) -> None:
        self.make.click()
        expect(self.field(name)).to_have_attribute("aria-invalid", "true")
        expect(self.field(name)).to_be_focused()
        expect(self.page.locator(f"#new-schedule-{name}-problem")).to_contain_text(rule)
        expect(self.element.locator(".field-problem")).to_have_count(1)


def test_schedules_are_made_filled_in_and_removed(guest: Guest, service: Service, api) -> None:
    rows = service.settings.root_path.parent / "weekly.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    page = guest.page
    page.goto("/schedules")
    page.get_by_text("New schedule").click()
    form = Form(page)
    fill_in_what_is_trained(form, rows.as_uri())
    fill_in_when(form)
    form.make.click()
    card = page.get_by_label("Schedule weekly", exact=True)
    expect(card).to_contain_text("0 2 * * 1 (Europe/Berlin)")
    expect(card).to_contain_text("45 minutes")
    expect(form.element).to_be_hidden()
    made = api.get("/schedules/weekly").json()["scheduled"]
    wanted = {"cron": "0 2 * * 1", "timezone": "Europe/Berlin", "overlap": "buffer_one", "catch_up_s": 2700}
    assert made.items() >= (wanted | {"continues": True, "even_unchanged": False}).items()
    run = made["run"]
    assert (run["name"], run["dataset"]["uri"], run["batch_size"]) == ("weekly-notes", rows.as_uri(), 2)
    backfill(page, card)
    polled: list[str] = []
    page.on("request", lambda request: polled.append(urlsplit(request.url).path))
    remove(page, card)
    assert api.get("/schedules/weekly").status_code == 404 and "/api/v1/schedules" in polled
    guest.troubles[:] = [t for t in guest.troubles if "422" not in t and "404" not in t]  # as Chromium notes refusals


def fill_in_what_is_trained(form: Form, dataset: str) -> None:
    """Nothing at first; then name, settings and model as they may not be, and as they may."""
    form.make.click()
    expect(form.field("name")).to_be_focused()
    expect(form.page.locator("#new-schedule-dataset-problem")).to_contain_text("must not be empty")
    expect(form.element.locator(".field-problem")).to_have_count(4)  # and the model's, and cron's
    form.field("model").fill("file:///models/tiny")
    form.field("dataset").fill(dataset)
    form.field("cron").fill("0 2 * * 1")
    form.refused("name", "a letter or digit first")
    form.field("name").fill("weekly")
    form.page.get_by_text("Settings as JSON").click()
    form.field("settings").fill("{")
    form.refused("settings", "This is not valid JSON")
    form.field("settings").fill('{"epochs": 1, "batch_size": 2, "learning_rate": 99}')
    form.refused("learning_rate", "less than or equal to 10")
    form.field("settings").fill('{"epochs": 1, "batch_size": 2}')
    form.field("model").fill("")
    form.refused("model", "must not be empty")
    form.field("model").fill("file:///models/tiny")


def fill_in_when(form: Form) -> None:
    """By a cron expression, and what its runs are called; refused first, as above."""
    form.field("cron").fill("at two")
    form.refused("cron", "five fields")
    form.field("when").select_option("every")
    expect(form.field("cron")).to_be_hidden()
    form.refused("every", "valid integer")
    form.field("when").select_option("cron")
    form.field("cron").fill("0 2 * * 1")
    form.field("timezone").fill("Europe/Atlantis")
    form.refused("timezone", "no time zone is called")
    form.field("timezone").fill("Europe/Berlin")
    form.field("overlap").select_option("buffer_one")
    form.field("catch_up").fill("45")
    form.field("run_name").fill("Weekly notes")
    form.refused("run_name", "a letter or digit first")
    form.field("run_name").fill("weekly-notes")
    form.field("continues").check()


def backfill(page: Page, card: Locator) -> None:
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


def remove(page: Page, card: Locator) -> None:
    """On second thoughts."""
    page.get_by_role("button", name="Remove: weekly").click()
    page.get_by_role("button", name="No, go back").click()
    expect(card).to_be_visible()
    page.get_by_role("button", name="Remove: weekly").click()
    page.get_by_role("button", name="Yes").click()
    expect(card).to_have_count(0)


def test_the_schedules_page_asks_for_the_list_alone(guest: Guest, api) -> None:
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
