"""The page of schedules."""

import re
from urllib.parse import urlsplit

from tests.page.guest import Guest, expect
from tests.service.conftest import Service, sft, wait_until


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


def test_schedules_are_made_filled_in_and_removed(guest: Guest, service: Service, api) -> None:
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
