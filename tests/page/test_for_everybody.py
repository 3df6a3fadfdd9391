"""The page by keyboard, on every screen, in the reader's colours."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import drawn
from tests.page.guest import AXE, DESKTOP, PHONE, PICTURES, SCREENSHOTS, Browser, Guest, Page, expect
from tests.service.conftest import KEY, Service

ALL_PICTURES = os.environ.get("LONGSHORE_TEST_ALL_SCREENSHOTS")
TALLEST = 7000  # pixels of a page on a phone


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


def _pages(trained: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Every page: what it is, its path, and what it says once it is there."""
    compared = f"/compare?run={trained['sft']}&run={trained['evil']}&run={trained['rl']}"
    yield "list", "/?words=qwen", "harbour-chat"
    yield "run", f"/runs/{trained['sft']}", "Device memory"
    yield "rl", f"/runs/{trained['rl']}", "Where the time goes"
    yield "failed", f"/runs/{trained['failed']}", "no assistant turn"
    yield "compare", compared, "fields of the request differ"
    yield "sweeps", "/sweeps", "No sweeps"
    yield "schedules", "/schedules", "No schedules"
    yield "new", "/new", "What is trained"
    yield "models", "/models", "harbour-chat"
    yield "files", "/files", "boarding-chats.jsonl"
    yield "hosts", "/hosts", "Control hosts"
    yield "account", "/account", "127.0.0.1:9/told"
    yield "unknown", "/nothing-here", "nothing at this address"


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "width"), drawn([("phone", PHONE["width"]), ("tablet", 820), ("desktop", DESKTOP["width"])], 1)
)
def test_pages_fit_the_screen_and_can_be_read(
    browser: Browser, service: Service, trained: dict[str, str], name: str, width: int
) -> None:
    """Nothing is wider than the screen, no word is broken, no badge stands in a second line, text stands out from its
    ground by WCAG's ratio, and axe finds nothing serious: in light and in dark."""
    size = {"width": width, "height": 900}
    one = Guest(browser, service.url, viewport=size, color_scheme="light", is_mobile=name == "phone")
    page = one.page
    problems: dict[str, list] = {}
    for what, path, ready in _pages(trained):
        page.emulate_media(color_scheme="light")
        page.goto(path)
        expect(page.locator("main")).to_contain_text(ready)
        for fold in (
            "New schedule",
            "New sweep",
            "New key",
            "New webhook",
            "Settings, field by field",
            "Settings as JSON",
        ):
            if page.get_by_text(fold, exact=True).count():
                page.get_by_text(fold, exact=True).click()
        if path in ("/new", "/schedules", "/sweeps"):
            expect(page.locator("details.settings").get_by_label("learning rate")).to_be_visible()
        expect(page.locator("#toast")).to_have_text("")
        found = {"wide": page.evaluate(_WIDE) if one.overflow > 0 else []}
        found |= {"broken": page.evaluate(_BROKEN), "in two lines": page.evaluate(_IN_TWO_LINES)}
        found["cut off"] = page.evaluate(_CUT_OFF)
        tall = page.evaluate("document.documentElement.scrollHeight")
        found["tall"] = [tall] if name == "phone" and tall > TALLEST else []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found |= {f"pale, {scheme}": page.evaluate(_PALE), f"axe, {scheme}": axe(page, scheme == "dark")}
            picture = f"{what}_{name}_{scheme}.png"
            if SCREENSHOTS and (picture in PICTURES or ALL_PICTURES):
                time.sleep(1)  # charts have their final size
                page.screenshot(path=Path(SCREENSHOTS) / picture, full_page=picture not in PICTURES)
        problems |= {f"{what}: {rule}": places for rule, places in found.items() if places}
    assert problems == {}
    assert [trouble for trouble in one.troubles if "404" not in trouble] == []  # an address where nothing is
    one.context.close()


@pytest.mark.parametrize("width", [PHONE["width"], DESKTOP["width"]])
def test_nothing_is_cut_and_every_chart_is_drawn(
    browser: Browser, service: Service, sweeper: str, trained: dict[str, str], swept: dict[str, Any], width: int
) -> None:
    """On every page: nothing is wider than the screen, each button and link shows its whole text (or, of a name that
    somebody gave, an ellipsis, and the whole in a title), and what charts draw has a colour."""
    problems: dict[str, list[str]] = {}
    num_charts = 0
    for key, pages in (
        (KEY, [*_pages(trained)]),
        (sweeper, [("sweeps with trials", "/sweeps", "Trials by their values"), ("list of trials", "/", "succeeded")]),
    ):
        one = Guest(browser, service.url, key, viewport={"width": width, "height": 900}, is_mobile=width < 500)
        for what, path, ready in pages:
            one.page.goto(path)
            expect(one.page.locator("main")).to_contain_text(ready)
            one.page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            expect(one.page.locator("main")).not_to_contain_text("Loading …")
            found = {"wide": one.page.evaluate(_WIDE) if one.overflow > 0 else [], "cut": one.page.evaluate(_CUT_TEXT)}
            charts = one.page.evaluate(_CHARTS)
            num_charts += charts["drawn"]
            found["without a line"] = charts["pale"]
            problems |= {f"{what}: {rule}": places for rule, places in found.items() if places}
            if SCREENSHOTS and ALL_PICTURES:
                time.sleep(0.5)
                name = f"{what.replace(' ', '_')}_{width}.png"
                one.page.screenshot(path=Path(SCREENSHOTS) / name, full_page=True, clip=_AT_MOST | {"width": width})
        one.context.close()
    assert problems == {}
    assert num_charts >= 20


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


def axe(page: Page, only_colours: bool) -> list[tuple[str, str]]:
    """What axe-core finds serious or critical: the rule, and the first place."""
    if not page.evaluate("'axe' in window"):
        assert AXE.exists(), "requirements/clients.sh brings axe-core"
        page.evaluate(AXE.read_text())
    options = {"runOnly": ["color-contrast"]} if only_colours else {}
    found = page.evaluate("async (options) => (await axe.run(document, options)).violations", options)
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [
        (each["id"], f"{node['html'][:200]} {node['failureSummary']}") for each in serious for node in each["nodes"][:2]
    ]


# Words that stand in two lines, though they would fit one: not code, whose lines are broken anywhere.
_BROKEN = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!parent.getClientRects().length || parent.closest("code, pre, .mono, .text, svg, option, .unseen")) continue;
    for (const { 0: run, index } of node.textContent.matchAll(/\\S+/g)) {
      if (run.length > 24) continue;
      const range = document.createRange();
      for (const part of run.split(/[-/.,]/).filter((text) => text.length > 2)) {
        const at = index + run.indexOf(part);
        range.setStart(node, at);
        range.setEnd(node, at + part.length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) found.push(`${run} in ${parent.tagName}.${parent.className}`);
      }
    }
  }
  return found.slice(0, 8);
})()
"""
# Badges and marks that belong beside what stands before them, and stand below it.
_IN_TWO_LINES = """
[...document.querySelectorAll(".state-cell, .titled, .compared li")].filter((row) => {
  const shown = [...row.children].filter((one) => one.getClientRects().length);
  const boxes = shown.map((one) => one.getBoundingClientRect());
  return boxes.some((box) => box.top > boxes[0].bottom - 4);
}).map((row) => `${row.className} ${row.textContent}`).slice(0, 5)
"""
# Cards whose content goes on behind their edge, where nobody can scroll to it.
_CUT_OFF = """
[...document.querySelectorAll(".card")].filter((card) => card.scrollWidth > card.clientWidth + 1)
  .map((card) => card.textContent.slice(0, 40))
"""
_AT_MOST: Any = {"x": 0, "y": 0, "height": 3000}  # of a picture
# Buttons and links whose text nobody can read to its end: it does not fit, or an ancestor cuts it off. A name that
# somebody gave may end in an ellipsis, if its title has the whole.
_CUT_TEXT = """
[...document.querySelectorAll("button, a, summary, th, label, .state, .mark, .kind, h1, h2, h3")].filter((node) => {
  if (!node.getClientRects().length || node.closest(".unseen, .skip")) return false;
  const shown = getComputedStyle(node), text = node.textContent.trim();
  const whole = (node.closest("[title]")?.title ?? "").includes(text);
  if (shown.display !== "inline" && node.scrollWidth > node.clientWidth + 1) {
    return !(shown.textOverflow === "ellipsis" && whole);
  }
  const box = node.getBoundingClientRect();
  for (let at = node.parentElement; at && at !== document.body; at = at.parentElement) {
    const frame = at.getBoundingClientRect(), style = getComputedStyle(at);
    const isCut = style.overflowX !== "visible" && (box.right > frame.right + 1 || box.left < frame.left - 1);
    if (isCut) return !(style.textOverflow === "ellipsis" && whole);
    if (style.position === "fixed") break;
  }
  return box.right > innerWidth + 1;
}).map((node) => `${node.tagName} ${node.textContent.trim().slice(0, 40)}`).slice(0, 8)
"""
# Lines, bars and dots of charts that have no colour, and how many pictures have some that do.
_CHARTS = """
(() => {
  const pale = [];
  let drawn = 0;
  for (const picture of document.querySelectorAll(".chart .plot")) {
    const { width, height } = picture.plot.ctx.canvas;
    const pixels = picture.plot.ctx.getImageData(0, 0, width, height).data;
    const isDrawn = ({ _stroke, _fill }) => {
      const rgb = [1, 3, 5].map((at) => parseInt((_stroke ?? _fill).slice(at, at + 2), 16));
      for (let n = 0; n < pixels.length; n += 4) {
        if (pixels[n + 3] > 200 && rgb.every((value, part) => Math.abs(value - pixels[n + part]) < 24)) return true;
      }
      return false;
    };
    const told = (n) => String([...picture.plot.data[n]]);  // two runs with the same values: one line covers the other
    const isCovered = (n) => picture.plot.data.slice(n + 1).some((_, later) => told(n + 1 + later) === told(n));
    const lost = picture.plot.series.filter((one, n) => (
      n > 0 && !one.isRaw && one.label !== "band" && !isCovered(n) && !isDrawn(one)
    ));
    if (lost.length) pale.push(`${picture.getAttribute("aria-label")}: ${lost.map(({ label }) => label)}`);
    else drawn += 1;
  }
  for (const picture of document.querySelectorAll(".chart svg, svg.spark")) {
    const parts = [...picture.querySelectorAll("path, rect, circle")];
    const seen = (part) => {
      const { stroke, strokeWidth, fill, opacity } = getComputedStyle(part);
      const isBlack = fill === "rgb(0, 0, 0)";  // as SVG fills what nobody has given a colour
      const hasLine = stroke !== "none" && parseFloat(strokeWidth) > 0;
      return Number(opacity) > 0.1 && !isBlack && (hasLine || fill !== "none");
    };
    const lost = parts.filter((part) => !seen(part));
    const label = picture.getAttribute("aria-label");
    if (lost.length || !parts.length) pale.push(`${label}: ${lost.length} of ${parts.length}`);
    else drawn += 1;
  }
  return { pale, drawn };
})()
"""
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
