"""A run that is started on the page: its data are uploaded, previewed and counted first."""

import json
import re
import shutil
from pathlib import Path

from tests.page.guest import Guest, expect
from tests.service.conftest import Service


def test_a_run_is_started_from_a_file_of_ones_own(guest: Guest, service: Service, api, tiny_model: Path) -> None:
    folder = service.settings.root_path.parent
    model = shutil.copytree(tiny_model, folder / "new_model")
    rows = folder / "boarding.jsonl"
    rows.write_text('{"prompt": "Who climbs aboard? <b>", "completion": "The pilot."}\n' * 5)
    page = guest.page
    page.goto("/")
    page.get_by_role("link", name="New run").click()
    form = page.locator("#new-run")
    start = page.get_by_role("button", name="Start run")
    expect(form.get_by_label("Other settings")).to_have_value(re.compile("epochs"))  # its script has run
    expect(form.get_by_label("Other settings")).to_be_hidden()
    start.click()
    expect(page.locator("#new-run-model-problem")).to_have_text("this must not be empty")
    expect(form.locator('[name="model"]')).to_be_focused()
    form.get_by_label("Model").fill(model.as_uri())
    form.get_by_label("Upload the dataset").set_input_files(rows)
    expect(form.locator('[name="dataset"]')).to_have_value("boarding.jsonl")
    expect(form.locator('[name="dataset"]')).to_have_attribute("title", re.compile("^file:///.*/boarding.jsonl$"))
    form.get_by_label("Upload the eval dataset").set_input_files(rows)
    expect(form.locator('[name="eval_dataset"]')).to_have_value("boarding.jsonl")
    form.get_by_label("Epochs").fill("0")
    start.click()
    expect(page.locator("#new-run-duration-problem")).to_contain_text("greater than 0")
    form.get_by_text("Settings as JSON").click()
    form.get_by_label("Other settings").fill('{"epochs": 2, "batch_size": 2, "max_tokens": 64, "learning_rate": 99}')
    start.click()
    expect(page.locator("#new-run-learning_rate-problem")).to_contain_text("less than or equal to 10")
    form.get_by_label("Other settings").fill('{"epochs": 2, "batch_size": 2, "max_tokens": 64}')
    page.get_by_role("button", name="Preview and estimate").click()
    preview = page.get_by_label("Preview", exact=True)
    expect(preview.locator("#estimate")).to_contain_text(
        re.compile(r"Steps6.*5 of 5 rows.*Tokens\d+.*not measured yet")
    )
    expect(preview.locator(".trained").nth(1)).to_contain_text("The pilot.")
    form.locator("[name=run_name]").fill("boarders")
    start.click()
    page.wait_for_url("**/runs/sft-*")
    expect(page.locator("#facts")).to_contain_text("Sourcethis page")
    view = api.get(f"/runs/{page.url.rpartition('/')[2]}").json()
    run = view["run"]
    assert (run["name"], run["model"], run["batch_size"]) == ("boarders", model.as_uri(), 2)
    assert (run["epochs"], run["eval_dataset"]["uri"], view["source"]["api"]) == (2, run["dataset"]["uri"], "page")
    guest.troubles[:] = [trouble for trouble in guest.troubles if "422" not in trouble]  # as Chromium notes refusals


def test_learning_rate_and_rank_are_among_the_first_fields(guest: Guest) -> None:
    """They show what a run takes that names none, and write the JSON as all fields do."""
    page = guest.page
    page.goto("/new")
    rate, rank = page.locator("#new-run [name=learning_rate]"), page.locator("#new-run [name=rank]")
    expect(rate).to_have_attribute("placeholder", "0.0001")
    expect(rank).to_have_attribute("placeholder", "16")
    page.get_by_label("Kind").select_option("rl")
    expect(rate).to_have_attribute("placeholder", "0.00001")
    page.get_by_label("Kind").select_option("sft")
    rate.fill("2e-5")
    rank.fill("4")
    page.get_by_text("Settings as JSON").click()
    settings = page.get_by_label("Other settings")
    expect(settings).to_have_value(re.compile('"rank": 4'))
    assert json.loads(settings.input_value()) == {
        "batch_size": 8,
        "epochs": 1,
        "learning_rate": 2e-5,
        "trainable": {"rank": 4},
    }
    settings.fill('{"trainable": {"kind": "full"}, "learning_rate": 0.003}')
    settings.blur()
    expect(rate).to_have_value("0.003")
    expect(rank).to_be_disabled()  # no adapter, no rank


def test_settings_are_fields_that_write_the_json(guest: Guest) -> None:
    page = guest.page
    page.goto("/new")
    settings, fields = page.get_by_label("Other settings"), page.locator("details.settings")
    page.get_by_text("Settings as JSON").click()
    expect(page.locator("[name=duration]")).to_have_value("1")
    fields.get_by_text("Settings, field by field").click()
    expect(fields.get_by_label("batch size")).to_have_value("8")
    expect(fields.get_by_label("learning rate")).to_have_attribute("placeholder", "0.0001")
    rank = fields.get_by_role("spinbutton", name="rank")
    rank.fill("4")
    fields.get_by_label("schedule").select_option("cosine")
    fields.get_by_label("epochs").fill("")
    fields.get_by_label("seed").fill("7")
    expect(settings).to_have_value(re.compile('"seed": 7'))
    assert json.loads(settings.input_value()) == {
        "batch_size": 8,
        "schedule": "cosine",
        "seed": 7,
        "trainable": {"rank": 4},
    }
    fields.get_by_label("trainable").select_option("full")
    expect(rank).to_have_count(0)
    assert json.loads(settings.input_value())["trainable"] == {"kind": "full"}
    page.locator("[name=duration]").fill("3")
    assert json.loads(settings.input_value())["epochs"] == 3
    expect(fields.get_by_label("epochs")).to_have_value("3")
    settings.fill('{"steps": 3}')
    settings.blur()
    expect(fields.get_by_label("steps", exact=True)).to_have_value("3")
    page.get_by_label("Kind").select_option("rl")
    expect(page.get_by_text("Eval prompts")).to_be_visible()
    expect(fields.get_by_text("rollouts", exact=True)).to_be_visible()
