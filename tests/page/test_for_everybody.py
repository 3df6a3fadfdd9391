"""The page by keyboard, on every screen, in the reader's colours."""

import time
from pathlib import Path

import pytest

from tests.page.guest import DESKTOP, PHONE, PICTURES, SCREENSHOTS, Browser, Guest, expect
from tests.service.conftest import Service


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
    service: Service,
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
        ("new", "/new", "What is trained"),
        ("models", "/models", "Nothing is published"),
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
