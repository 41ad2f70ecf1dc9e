"""A page in Chromium, opened from disk: with all that it complains of, and all that it asks for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from scripts import BASELINES

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser is here: {', '.join(NAMES)}")
PATIENCE_MS = 60_000  # on a busy machine; what is waited for comes in a second on an idle one
DISABLED = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in DISABLED)]
PHONE = {"width": 390, "height": 844}
UNFOLD = "dispatchEvent(new Event('beforeprint'))"  # paper has every part and every chart
ALL_DRAWN = "document.querySelectorAll('.chart:not(:has(svg))').length == 0"


def stored(name: str) -> str:
    """The path of a committed archive."""
    return str(BASELINES / f"{name}.jsonl.xz")


def launched() -> Iterator[Any]:
    """A browser, for a fixture."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in the browser. trouble: messages of its console, errors and requests."""

    page: Any
    trouble: list[str] = field(default_factory=list)

    def fill(self, **values: str) -> None:
        for name, value in values.items():
            self.page.fill(f"#{name}", value)

    def cells(self, table: str) -> list[list[str]]:
        rows = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        found: list[list[str]] = self.page.eval_on_selector_all(f"{table} tbody tr", rows)
        return found

    def again(self) -> None:
        """Leave the page, and come back by its address."""
        address = self.page.url
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=yes]")

    @property
    def width(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth"))

    def violations(self) -> list[tuple[str, list[str]]]:
        """Rules of axe-core that are broken, and where, with all parts of the page unfolded."""
        self.page.evaluate(UNFOLD)
        found = Axe().run(self.page).response["violations"]
        return [(rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]) for rule in found]


@contextmanager
def opened_in(browser: Any, written: Path, **words: Any) -> Iterator[Opened]:
    """The page, drawn, in a context of its own. words: of the context."""
    words = {"viewport": {"width": 1400, "height": 900}, "permissions": ["clipboard-read", "clipboard-write"], **words}
    with browser.new_context(**words) as context:
        seen = Opened(context.new_page())
        seen.page.set_default_timeout(PATIENCE_MS)
        seen.page.on("console", lambda message: seen.trouble.append(f"{message.type}: {message.text}"))
        seen.page.on("pageerror", lambda error: seen.trouble.append(f"error: {error}"))
        context.on("request", lambda asked: seen.trouble.append(asked.url))
        seen.page.goto(written.as_uri())
        seen.page.wait_for_selector("html[data-ready=yes]")
        yield seen
        own = (written.as_uri(), "data:", "blob:", "about:blank")
        assert [what for what in seen.trouble if not what.startswith(own)] == [], "it is quiet, and asks nobody"
