"""The console in Chromium: what its browser tests share.

`scripts/conformance-console` installs Playwright and axe-core, and names the browser. Importing this skips a module of
tests where they are missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s

TOOLS = Path(os.environ.get("CONSOLE_TOOLS", Path(__file__).parents[2] / ".conformance-console"))
BROWSER = os.environ.get("CONSOLE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
if not (TOOLS / "playwright").is_dir() or BROWSER is None:
    pytest.skip("Chromium and Playwright are needed: scripts/conformance-console", allow_module_level=True)
sys.path.append(str(TOOLS))
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

WAIT_MS = 1000 * patience_s(30)
SIZES = {"phone": (360, 740), "tablet": (820, 1100), "desktop": (1280, 900)}


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page of the console; at its end nothing was written to the browser's console as an error."""

    def __init__(self, browser: Browser, url: str, size: str, scheme: Any = "light", path: str = "/") -> None:
        width, height = SIZES[size]
        self.page: Page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.page.on(
            "console", lambda line: line.type in ("error", "warning") and self.errors.append(line.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url + path)

    def open(self, panel: str) -> None:
        self.page.evaluate("name => { location.hash = name; }", panel)
        expect(self.page.locator(f"#panel-{panel}")).to_be_visible(timeout=WAIT_MS)

    def show_parameters(self) -> None:
        if self.page.locator("#parameters").is_hidden():
            self.page.locator("#show-parameters").click()

    def check(self) -> None:
        """No overflow, no error, and nothing that axe-core finds."""
        spare = self.page.evaluate("innerWidth - document.documentElement.scrollWidth")
        assert spare >= 0, f"{-spare} px too wide"
        if AXE.exists():
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
            found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            seen = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]
            assert seen == []
        assert self.errors == []

    def close(self) -> None:
        self.page.close()


def url_of(server: Any) -> str:
    return f"http://127.0.0.1:{server.port}"
