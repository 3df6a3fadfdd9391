"""A real Chromium in front of a real service: what people see, press and read."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.service.conftest import KEY

# The one without windows costs half as much: each page of the others has a window, whose frame is a page, too.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
try:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
except ImportError:
    pytest.skip("playwright is not installed", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip(
        "there is no Chromium on this machine: apt-get install chromium-headless-shell", allow_module_level=True
    )

expect.set_options(timeout=30_000)
AXE = Path(__file__).parents[2] / ".venv" / "clients" / "axe" / "axe_playwright_python" / "axe.min.js"
"""axe-core, as requirements/clients.txt pins it."""
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
SCREENSHOTS = os.environ.get("LONGSHORE_TEST_SCREENSHOTS")
"""A folder for the pictures of docs/page.md: LONGSHORE_TEST_SCREENSHOTS=docs/images"""
PICTURES = ("list_desktop_light.png", "rl_desktop_light.png", "list_phone_dark.png", "run_phone_dark.png")


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def plotted(figure: Locator) -> dict[str, Any]:
    """What a chart draws: its series (labels, colours, dashes, y values, faint or not), its bands and ticks."""
    return figure.locator(".plot").evaluate(
        """({ plot }) => ({
            series: plot.series.slice(1).map(({ label, isRaw, dash, _stroke, _fill }, n) => ({
                label, faint: isRaw ?? false, dashed: (dash ?? []).length > 0, color: _stroke ?? _fill,
                ys: [...plot.data[n + 1]].filter((y) => y != null),
            })),
            bands: plot.bands.length,
            ticks: plot.axes[1]._values,
        })"""
    )


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
