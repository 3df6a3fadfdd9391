"""A run's page: what it says, shows, hands out and does; and a run that is started on the page."""

import json
import re
import shutil
from pathlib import Path

from longshore.events import Evaluated, Evaluating, Step
from longshore.fields import Fence
from shared.settings import Settings
from shared.storage.paths import RunKeys
from tests.page import measured
from tests.page.guest import Browser, Guest, expect, plotted
from tests.service.conftest import Service, reaches, started
from tests.service.stand_in import SUCCEEDS, WAITS


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
    expect(loss.locator(".restart")).to_have_count(1)  # where the second worker went on
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


def test_files_are_downloaded_to_the_byte(guest: Guest, service: Service, trained: dict[str, str]) -> None:
    page, keys = guest.page, RunKeys(trained["sft"])
    page.goto(f"/runs/{trained['sft']}")
    with page.expect_download() as found:
        page.get_by_role("link", name="Download the checkpoint of step 240").click()
    assert found.value.suggested_filename == f"{trained['sft']}-e000002-a01-step-240.tar"
    assert bytes(range(256)) * 300 in Path(found.value.path()).read_bytes()
    page.get_by_text("Job file 000001, e000002-a01").click()
    shown = page.locator("#request-body details[open] pre")
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
    assert {one["label"] for one in plotted(loss)["series"] if one["dashed"]} == {"train", "held out"}
    expect(loss.locator(".legend i.dashed")).to_have_count(2)  # as their lines are
    assert f"with={trained['evil']}" in page.url


def test_compared_runs_of_one_name_are_told_apart(guest: Guest, service: Service, api) -> None:
    """In the legend, in the list and in the table; and smoothing smooths short lines, too."""
    page = guest.page
    ids = [started(api, seed=SUCCEEDS, name="twins", steps=12) for _ in range(2)]
    for run_id in ids:
        reaches(api, run_id, "succeeded")
        measured.sft_course(service.store, run_id, num_steps=12)
    page.goto(f"/compare?run={ids[0]}&run={ids[1]}")
    loss = page.locator("figure.chart").filter(has_text="Loss").first
    expect(loss.locator(".legend li")).to_have_text([f"twins …{run_id[-6:]}" for run_id in ids])
    expect(page.locator("#compared a")).to_have_text([f"twins …{run_id[-6:]}" for run_id in ids])
    expect(page.locator("#table thead th a")).to_have_text([f"twins …{run_id[-6:]}" for run_id in ids])

    smoothed = plotted(loss)["series"]
    assert [one["faint"] for one in smoothed] == [True, False, True, False]
    page.get_by_label("Smoothing").fill("0")
    expect(page.get_by_label("Smoothing")).to_have_value("0")
    plain = plotted(loss)["series"]
    assert [one["ys"] for one in plain] == [one["ys"] for one in smoothed if one["faint"]]
    assert all(one["ys"] != other["ys"] for one, other in zip(plain, smoothed[1::2], strict=True))


def test_people_see_names_where_the_store_has_addresses(guest: Guest, api, trained: dict[str, str]) -> None:
    page, store = guest.page, "s3://bucket/tenants/default"
    page.goto("/schedules")
    shown = "async (address) => (await import('/static/page.js')).nameOf(address)"
    for address, name in (
        (f"{store}/uploads/{'0d' * 32}/boarding%20chats.jsonl", "boarding chats.jsonl"),
        (f"file:///root/store/tenants/a/uploads/{'0d' * 32}/rows.jsonl?x=1", "rows.jsonl"),
        (f"{store}/adapters/harbour-chat/v000012", "harbour-chat v12"),
        (f"{store}/checkpoints/sft-1a/{'0d' * 16}", "checkpoint of sft-1a"),
        ("file:///models/harbour/model/", "harbour/model"),
        (f"file:///hub/models--Qwen--Qwen3-0.6B/snapshots/{'c1' * 20}", "Qwen/Qwen3-0.6B"),
        ("file:///models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("harbour-chat:v3", "harbour-chat:v3"),
    ):
        assert page.evaluate(shown, address) == name
    uri = f"{store}/uploads/{'0d' * 32}/boarding.jsonl"
    run_id = started(api, seed=SUCCEEDS, dataset={"uri": uri}, model=f"{store}/models/harbour-chat/v000002")
    reaches(api, run_id, "succeeded")
    page.goto(f"/runs/{run_id}?with={trained['sft']}")
    expect(page.locator("#data-body")).to_contain_text("boarding.jsonl")
    expect(page.locator("#facts")).to_contain_text("harbour-chat v2")
    expect(page.locator("#differences")).to_contain_text("boarding.jsonl")
    for path in (f"/runs/{run_id}?with={trained['sft']}", "/", "/models", "/files"):
        page.goto(path)
        expect(page.locator("main")).not_to_contain_text("Loading …")
        assert not re.search(r"(file|s3)://|[0-9a-f]{32}", page.locator("main").inner_text()), path
    page.goto(f"/runs/{run_id}")
    expect(page.get_by_title(uri)).to_have_text("boarding.jsonl")  # the address is where one points at the name


def test_rl_runs_show_rewards_and_what_was_sampled(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['rl']}")
    expect(page.locator("#facts")).to_contain_text(
        re.compile(r"Trajectories dropped in the last step\s*3 of 32\s*text differs from the sampled tokens: 3")
    )
    for title in ("Reward", "Spread within groups", "KL", "Entropy", "Clipped tokens", "Length of answers"):
        expect(page.locator("figure.chart").filter(has_text=title).first).to_be_visible()
    assert sum(plotted(chart)["bands"] for chart in page.locator("figure.chart").all()) == 1
    kl = page.locator("figure.chart").filter(has=page.get_by_role("img", name=re.compile("^KL:")))
    expect(kl.locator(".latest")).to_have_text(re.compile(r"^0\.002"))  # to the reference
    memory = page.locator("figure.chart").filter(has_text="Device memory")
    assert plotted(memory)["ticks"] == ["0 GiB", "0.5 GiB", "1 GiB"]
    flat = "async () => (await import('/static/chart.js')).axisRange(0, 0, true)"
    assert page.evaluate(flat) == [0, 1]  # a share is never below zero
    time_split = page.locator("figure.chart").filter(has_text="Where the time goes")
    assert sum(len(one["ys"]) for one in plotted(time_split)["series"]) == 30 * 4 + 6
    samples = page.locator("#samples-body")
    expect(samples).to_contain_text("How many crates?")
    expect(samples.locator("details.sample")).to_have_count(4)
    expect(samples.locator("details.sample[open]")).to_have_count(1)
    assert "im_start" not in samples.inner_text() and "im_end" not in samples.inner_text()
    expect(samples.locator("details[open] .who").first).to_have_text("user")
    expect(samples).to_contain_text("42 crates.")
    expect(samples).to_contain_text(re.compile(r"reward 0\.\d"))
    episode = samples.locator("details[open] > div:has(pre)").first
    expect(episode.locator(".who").first).to_have_text(re.compile(r"reward 1 · \d+ tokens · turn limit"))
    expect(episode.locator("pre.drawn")).to_have_count(2)
    assert "".join(episode.locator(".who").all_inner_texts()[1:]) == "answer · earned 0.25useranswer · earned 0.75"
    slider = samples.get_by_role("slider", name="Step")
    slider.focus()
    page.keyboard.press("Home")
    expect(samples).to_contain_text("train step 1")


def test_a_tip_stands_at_the_pointer(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['sft']}")
    loss = page.locator("figure.chart").filter(has_text="held out").first
    loss.scroll_into_view_if_needed()
    box = loss.bounding_box()
    assert box is not None
    for share in (0.25, 0.5, 0.9):
        x, y = box["x"] + share * box["width"], box["y"] + 0.6 * box["height"]
        page.mouse.move(x, y)
        tip = loss.locator(".tip").bounding_box()
        assert tip is not None and tip["y"] <= y <= tip["y"] + tip["height"]
        assert min(abs(tip["x"] - x), abs(tip["x"] + tip["width"] - x)) < 24, share


def test_charts_are_zoomed_together_and_reset(guest: Guest, trained: dict[str, str]) -> None:
    page = guest.page
    page.goto(f"/runs/{trained['sft']}")
    loss, rate = (page.locator("figure.chart").filter(has_text=text).first for text in ("held out", "Learning rate"))
    span = "({ plot }) => plot.scales.x.max - plot.scales.x.min"
    whole = [chart.locator(".plot").evaluate(span) for chart in (loss, rate)]
    loss.scroll_into_view_if_needed()
    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    expect(rate.get_by_role("button", name="Reset zoom")).to_be_visible()
    zoomed = [chart.locator(".plot").evaluate(span) for chart in (loss, rate)]
    assert all(0.4 < after / before < 0.6 for after, before in zip(zoomed, whole, strict=True))
    rate.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_have_count(0)
    assert [chart.locator(".plot").evaluate(span) for chart in (loss, rate)] == whole


def test_ten_thousand_steps_are_drawn_at_once(guest: Guest, trained: dict[str, str]) -> None:
    """A chart of 10,000 steps with their average has every step."""
    page = guest.page
    page.goto(f"/runs/{trained['sft']}")
    expect(page.locator("figure.chart").first).to_be_visible()
    draw = """async () => {
        const [{ html, render }, { Chart }] = [await import("/static/page.js"), await import("/static/chart.js")];
        const points = [...Array(10_000).keys()].map((x) => [x, Math.sin(x / 500)]);
        const series = [{ name: "long", color: 0, points }];
        const place = document.body.appendChild(document.createElement("div"));
        render(html`<${Chart} title="Long" series=${series} bands=${[]} marks=${[]} smooth=${0.9} />`, place);
        return place.querySelector(".plot").plot.data.map((values) => values.length);
    }"""
    assert page.evaluate(draw) == [10_000] * 3


def test_few_points_are_no_course(guest: Guest, trained: dict[str, str]) -> None:
    guest.page.goto("/schedules")
    draw = "async (values) => (await import('/static/status.js')).sparkline({ name: 'loss', values }).type ?? ''"
    assert [guest.page.evaluate(draw, [1.0] * n) for n in (0, 4, 5)] == ["", "", "svg"]


def test_what_others_wrote_is_shown_as_text(guest: Guest, api, trained: dict[str, str]) -> None:
    page = guest.page
    for path in ("/", f"/runs/{trained['evil']}", f"/runs/{trained['rl']}"):
        page.goto(path)
        expect(page.locator("main")).to_contain_text("<script>" if path != "/" else "harbour-chat")
        assert page.locator("main img, main script").count() == 0
        assert "owned" not in page.title()
    page.goto(f"/runs/{trained['evil']}")
    page.locator("#samples-body summary").filter(has_text="<img").first.click()
    expect(page.locator("#samples-body pre").filter(has_text=measured.XSS).first).to_be_visible()


def test_buttons_do_what_they_say(guest: Guest, api, trained: dict[str, str]) -> None:
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


def test_a_live_run_moves_under_ones_eyes(guest: Guest, service: Service, api) -> None:
    run_id, page = started(api, seed=WAITS), guest.page
    page.goto(f"/runs/{run_id}")
    expect(page.locator("#chart-grid")).to_contain_text("Charts appear after the first step")
    for step, loss in ((1, 2.5), (2, 1.25)):
        event = Step(seq=step, time=float(step), step=step, metrics={"loss": loss})
        part = RunKeys(run_id).log_part("000001", Fence(epoch=1), step)
        service.store.put_bytes(part, event.model_dump_json().encode() + b"\n")
        expect(page.locator("figure.chart .latest")).to_have_text(str(loss))
    expect(page.locator("#log-lines")).to_contain_text("step 2: loss 1.25")
    told = "evaluation: 40 % of the held-out rows"
    for event in (
        Evaluating(seq=3, time=3.0, step=2, fraction=0.4),
        Evaluated(seq=4, time=4.0, step=2, metrics={"loss": 1.0}),
    ):
        part = RunKeys(run_id).log_part("000001", Fence(epoch=1), event.seq)
        service.store.put_bytes(part, event.model_dump_json().encode() + b"\n")
        progress = expect(page.locator("#progress"))
        progress.to_contain_text(told) if event.seq == 3 else progress.not_to_contain_text(told)
    bar = """async ([run, share]) => {
        const bar = (await import("/static/status.js")).progressBar(run, share);
        return [bar.props["aria-label"], bar.props.value];
    }"""
    last = {"state": "running", "phase": "training", "step": 4, "num_steps": 4, "run": {"eval_dataset": {"uri": "x"}}}
    # The bar is not full while the last evaluation goes on.
    assert page.evaluate(bar, [last | {"step": 2}, None]) == ["Steps done", 2]
    assert page.evaluate(bar, [last, 0.25]) == ["evaluating and saving", 0.25]
    assert page.evaluate(bar, [last, None]) == ["evaluating and saving", None]
    assert page.evaluate(bar, [last | {"phase": "publishing"}, None]) == ["publishing", None]
    assert page.evaluate(bar, [last | {"state": "succeeded"}, None]) == ["Steps done", 4]
    api.post(f"/runs/{run_id}/cancel")
    expect(page.get_by_label("Summary")).to_contain_text("cancelled")


def test_evaluations_are_a_table_and_graded_samples_are_read(
    guest: Guest, service: Service, api, trained: dict[str, str]
) -> None:
    page, evaluations = guest.page, guest.page.locator("#evaluations-body")
    page.goto(f"/runs/{trained['sft']}")
    heads = ["after step", *(str(step) for step in range(0, 241, 40))]
    expect(evaluations.locator("thead th")).to_have_text(heads)
    expect(evaluations.get_by_role("rowheader")).to_have_text(["loss", "perplexity"])
    run_id, key = started(api, seed=SUCCEEDS), "sampled/of-a-test/samples"
    reaches(api, run_id, "succeeded")
    said = {"output_text": "7 <b>crates</b>.", "num_tokens": 4, "finish_reason": "length"}
    row = {"sample": said, "item": {"question": "How many?"}}
    service.store.put_bytes(f"{key}/samples.jsonl", json.dumps(row).encode() + b"\n")
    for step in range(0, 60, 4):
        drawn = {"eval": f"{service.store.uri}/{key}"}
        event = Evaluated(seq=step // 4 + 1, time=1.0, step=step, metrics={"reward_mean": step / 100}, drawn=drawn)
        part = RunKeys(run_id).log_part("000001", Fence(epoch=1), event.seq)
        service.store.put_bytes(part, event.model_dump_json().encode() + b"\n")
    page.goto(f"/runs/{run_id}")
    expect(evaluations.locator("thead th")).to_have_text(["after step", "0", *map(str, range(16, 60, 4))])
    expect(evaluations).to_contain_text("The first and the newest of 15")
    expect(page.locator("figure.chart").filter(has_text="Reward of held-out prompts")).to_be_visible()
    expect(page.locator("#samples-body pre.drawn")).to_have_text("7 <b>crates</b>.")
    expect(page.locator("#samples-body")).to_contain_text("4 tokens · cut off")


def test_examples_are_shown_with_the_trained_tokens_marked(
    guest: Guest, api, tiny_model: Path, settings: Settings
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


def test_a_run_that_there_is_not_says_so(browser: Browser, service: Service) -> None:
    one = Guest(browser, service.url)
    one.page.goto("/runs/sft-nothing")
    expect(one.page.get_by_role("heading", level=1)).to_have_text("No such run")
    assert [trouble for trouble in one.troubles if "404" not in trouble] == []
    one.context.close()


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
