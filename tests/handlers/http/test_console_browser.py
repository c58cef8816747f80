"""The console in Chromium, against real servers: each panel while a slow store is read, and warm.

`scripts/conformance-console` installs Playwright and axe-core, and names the browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.adapters import save_adapter
from tests.support.chat_families import family_parts
from tests.support.cold_start import cold_start
from tests.support.gated_server import GatedServer
from tests.support.load import patience_s
from tests.support.pool_runs import PoolRun
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny, tiny_model
from tests.test_serve import Server
from tests.test_serve_draft import GatedStore

from teneral.handlers.console.files import standalone
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.waterfall.command import checked_snapshot

TOOLS = Path(os.environ.get("CONSOLE_TOOLS", Path(__file__).parents[3] / ".conformance-console"))
BROWSER = os.environ.get("CONSOLE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
if not (TOOLS / "playwright").is_dir() or BROWSER is None:
    pytest.skip("Chromium and Playwright are needed: scripts/conformance-console", allow_module_level=True)
sys.path.append(str(TOOLS))
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_MS = 1000 * patience_s(30)
SIZES = {"phone": (360, 740), "desktop": (1280, 900)}
PANELS = ("start", "playground", "kv", "load", "artifact")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("console")
    save_tiny("llama", path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    pack(FileStore(path / "model"), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def slow_server(folder: Path) -> Iterator[Server]:
    """Needs some seconds for its weights."""
    with StoreServer(folder, rate_mb_s=0.6) as store:
        server = Server(f"{store.url}/bucket/model", "--name", "tiny")
        yield server
        server.close()


@pytest.fixture(scope="module")
def warm_server(folder: Path) -> Iterator[Server]:
    server = Server(folder / "bucket" / "model", "--name", "tiny")
    server.ask(
        "POST", "/v1/completions", {"prompt": "hello there " * 30, "max_tokens": 4, "ignore_eos": True}
    )
    yield server
    server.close()


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


@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_there_before_the_web_server(browser: Browser, tmp_path: Path, size: str) -> None:
    with GatedServer(tmp_path) as server:
        visit = Visit(browser, url_of(server), size)
        expect(visit.page.locator("#start-hero h1")).to_contain_text("Waiting for the server")
        visit.open("playground")
        visit.check()
        visit.open("start")
        visit.check()
        server.let_start()
        expect(visit.page.locator("#start-hero h1")).to_contain_text("Ready after", timeout=WAIT_MS)
        visit.page.wait_for_selector(".chart rect.fetch")
        visit.check()
        visit.close()


@pytest.mark.parametrize("size", SIZES)
def test_the_start_is_seen_as_it_happens(browser: Browser, slow_server: Server, size: str) -> None:
    asked = threading.Thread(
        target=slow_server.ask, args=("POST", "/v1/completions", {"prompt": "hello there", "max_tokens": 8})
    )
    asked.start()
    visit = Visit(browser, url_of(slow_server), size)
    page = visit.page
    page.wait_for_selector("[role=progressbar]")
    expect(page.locator("#start-hero h1")).to_contain_text("of the weights are here")
    page.wait_for_selector(".chart rect.fetch")
    first = page.locator(".chart rect.fetch").count()
    expect(page.locator(".chart rect.fetch").nth(first)).to_be_visible(timeout=WAIT_MS)
    for panel in ("playground", "kv", "artifact", "load", "start"):
        visit.open(panel)
        visit.check()
    expect(page.locator("#start-hero h1")).to_contain_text("First token after", timeout=WAIT_MS)
    asked.join()
    page.wait_for_selector(".chart rect.execute")
    page.wait_for_selector(".chart .first-token")
    visit.check()
    visit.close()


def test_a_server_that_has_ended_is_not_shown_as_ready(browser: Browser, folder: Path) -> None:
    server = Server(folder / "bucket" / "model", "--name", "tiny")
    server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 1, "ignore_eos": True})
    visits = [Visit(browser, url_of(server), "desktop", path=path) for path in ("/", "/#playground", "/#kv")]
    for visit in visits:
        expect(visit.page.locator("#state")).to_have_text("ready", timeout=WAIT_MS)
    server.close()
    for visit in visits:
        expect(visit.page.locator("#state")).to_have_text("the server does not answer", timeout=WAIT_MS)
        assert "trouble" in (visit.page.locator("#state").get_attribute("class") or "")
        visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_panel_of_a_warm_server(browser: Browser, warm_server: Server, size: str, scheme: str) -> None:
    visit = Visit(browser, url_of(warm_server), size, scheme)
    seen = {
        "start": "Ready after|First token after",
        "playground": "Answer",
        "kv": "of the KV pool is taken",
        "load": "sequences? runs?",
        "artifact": "stored",
    }
    for panel in PANELS:
        visit.open(panel)
        shown = visit.page.locator(f"#panel-{panel}")
        expect(shown).to_contain_text(re.compile(seen[panel]), timeout=WAIT_MS)
        visit.check()
    assert visit.page.locator("#panel-artifact tbody tr").count() >= 6
    visit.open("kv")
    assert visit.page.locator(".tree li").count() >= 1
    visit.open("load")
    for title in ("First token", "Between tokens", "Whole requests"):
        card = visit.page.locator(".histograms .card", has=visit.page.get_by_role("heading", name=title))
        expect(card).to_contain_text("half within", timeout=WAIT_MS)
    for name in ("waiting", "tokens a second", "refused, 429", "refused, 503"):
        expect(visit.page.locator("#panel-load dt", has_text=name).first).to_be_visible(timeout=WAIT_MS)
    visit.close()


def test_an_answer_comes_token_by_token_with_probabilities_and_code(
    browser: Browser, warm_server: Server
) -> None:
    visit = Visit(browser, url_of(warm_server), "desktop", path="/#playground")
    page = visit.page
    page.locator("input[value=completion]").check(force=True)
    page.fill("#prompt", "hello there, it's me")
    page.fill("#max-tokens", "12")
    page.fill("#temperature", "0")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#ask-figures dt")
    page.wait_for_selector("#stop:disabled")
    assert page.locator("#transcript .token").count() >= 1
    page.focus("#transcript")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token")).to_contain_text("logprob")
    page.locator("#code summary").click()
    curl = page.locator("#curl").text_content() or ""
    assert f"{url_of(warm_server)}/v1/completions" in curl
    assert "'\\''s me" in curl
    compile(page.locator("#python").text_content() or "", "shown", "exec")
    visit.check()
    page.locator("summary", has_text="Form of the answer").click()
    page.select_option("#form", "json_schema")
    page.fill("#grammar", "{")
    page.locator("#send").click()
    expect(page.locator("#ask-error")).to_contain_text("Schema")
    page.fill(
        "#grammar",
        '{"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": false}',
    )
    page.locator("#send").click()
    expect(page.locator("#transcript")).to_contain_text('"n"', timeout=WAIT_MS)
    page.wait_for_selector("#stop:disabled")
    for form, rule, answer in (
        ("regex", "4[0-1]", re.compile("4[01]")),
        ("choice", "left\nright", re.compile("left|right")),
        ("grammar", 'root ::= "yes" | "no"', re.compile("yes|no")),
    ):
        page.select_option("#form", form)
        page.fill("#grammar", rule)
        page.locator("#send").click()
        expect(page.locator("#transcript")).to_have_text(answer, timeout=WAIT_MS)
        page.wait_for_selector("#stop:disabled")
    visit.check()
    visit.close()


def test_tokens_that_the_draft_chose_are_marked(browser: Browser, folder: Path) -> None:
    store = GatedStore(folder)
    with store.server:
        server = Server(f"{store.server.url}/bucket/model", "--name", "tiny")
        try:
            visit = Visit(browser, url_of(server), "desktop", path="/#playground")
            page = visit.page
            page.locator("input[value=completion]").check(force=True)
            page.fill("#prompt", "hello there")
            page.fill("#max-tokens", "40")
            page.fill("#temperature", "0")
            page.select_option("#first-token", "draft")
            page.locator("#send").click()
            expect(page.locator("#transcript .token.drafted").first).to_be_attached(timeout=WAIT_MS)
            store.may_refine.set()
            page.wait_for_selector("#stop:disabled")
            page.focus("#transcript")
            page.keyboard.press("ArrowRight")
            expect(page.locator("#token .tag")).to_have_text("drafted")
            expect(page.locator("#ask-figures")).to_contain_text(re.compile(r"drafted\s*[1-9]"))
            visit.check()
            visit.close()
        finally:
            store.may_refine.set()
            server.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_chat_calls_tools(browser: Browser, tmp_path: Path, size: str) -> None:
    family_parts("hermes", tmp_path).tokenizer.close()
    server = Server(tmp_path, "--name", "tiny")
    try:
        visit = Visit(browser, url_of(server), size, path="/#playground")
        page = visit.page
        page.fill("#prompt", "Hello")
        page.fill("#max-tokens", "24")
        page.locator("#send").click()
        expect(page.locator("#transcript .assistant .token").first).to_be_attached(timeout=WAIT_MS)
        page.wait_for_selector("#stop:disabled", state="attached")
        # A random model's tokens may have no text: special ones, and parts of a character.
        page.locator("#transcript .token", has_text=re.compile(r"\S")).first.hover()
        expect(page.locator("#token")).to_contain_text("logprob")
        page.locator("summary", has_text="Form of the answer").click()
        page.fill("#tools", json.dumps([TOOL]))
        page.select_option("#tool-choice", "required")
        page.fill("#max-tokens", "100")
        page.fill("#prompt", "And the weather?")
        page.locator("#send").click()
        expect(page.locator("#transcript .call").first).to_have_text(
            re.compile(r'^weather\(\{"city": ?"Oslo"\}\)$'), timeout=WAIT_MS
        )
        page.wait_for_selector("#stop:disabled", state="attached")
        page.locator("#code summary").click()
        assert '"tool_choice": "required"' in (page.locator("#curl").text_content() or "")
        visit.check()
        visit.close()
    finally:
        server.close()


@pytest.mark.parametrize("size", SIZES)
def test_the_pool_shows_hits_sessions_spill_and_snapshot(
    browser: Browser, folder: Path, tmp_path: Path, size: str
) -> None:
    flags = ("--kv-host-bytes", "4MiB", "--kv-snapshot", str(tmp_path / "snapshot"))
    server = Server(folder / "bucket" / "model", "--name", "tiny", *flags)
    try:
        for _ in range(2):
            body = {"prompt": "hello there " * 30, "max_tokens": 4, "teneral": {"session": "mine"}}
            assert server.ask("POST", "/v1/completions", body)[0] == 200
        visit = Visit(browser, url_of(server), size)
        visit.open("kv")
        panel = visit.page.locator("#panel-kv")
        expect(panel).to_contain_text(re.compile(r"sessions\s*1 of 1 owners"), timeout=WAIT_MS)
        expect(panel.locator(".tree")).to_contain_text(re.compile("[1-9] hits?"))
        expect(panel.locator(".tree")).to_contain_text("1 sessions")
        expect(panel).to_contain_text(re.compile(r"memory\s*[\d.]+ .?B of"))
        for title in ("Spill", "Snapshot"):
            card = panel.locator(".card", has=visit.page.get_by_role("heading", name=title))
            expect(card.locator("dd").first).to_be_visible()
            expect(card).not_to_contain_text("Off:")
        visit.check()
        visit.close()
    finally:
        server.close()


@pytest.mark.parametrize("size", SIZES)
def test_an_adapter_is_asked_and_shown_with_what_the_others_did(
    browser: Browser, folder: Path, size: str
) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    for name in ("legal-german", "medical"):
        save_adapter(folder / "adapters" / name, model)
    server = Server(folder / "model", "--name", "tiny", "--adapters", f"{folder}/adapters/{{name}}")
    try:
        visit = Visit(browser, url_of(server), size, path="/#playground")
        page = visit.page
        expect(page.locator("#adapter")).to_be_visible(timeout=WAIT_MS)
        page.locator("input[value=completion]").check(force=True)
        page.fill("#prompt", "hello there")
        page.fill("#max-tokens", "4")
        for name in ("legal-german", "medical", "legal-german"):
            page.fill("#adapter", name)
            with page.expect_response("**/v1/completions"):
                page.locator("#send").click()
            page.wait_for_selector("#stop:disabled", state="attached")
        page.locator("#code summary").click()
        assert '"lora": "legal-german"' in (page.locator("#curl").text_content() or "")
        visit.check()
        page.fill("#adapter", "nowhere")
        page.locator("#send").click()
        expect(page.locator("#ask-error")).to_contain_text("nowhere", timeout=WAIT_MS)
        visit.errors.clear()  # the browser's own line about the 404
        visit.open("load")
        card = page.locator("#adapters-card")
        expect(card).to_contain_text("legal-german, medical", timeout=WAIT_MS)
        expect(card).to_contain_text(re.compile(r"found in memory\s*1"))
        expect(card).to_contain_text(re.compile(r"had to be read\s*[23]"))
        visit.check()
        visit.close()
    finally:
        server.close()


def test_without_adapters_none_is_offered(browser: Browser, warm_server: Server) -> None:
    visit = Visit(browser, url_of(warm_server), "desktop", path="/#playground")
    expect(visit.page.locator("#adapter-field[data-none]")).to_be_attached(timeout=WAIT_MS)
    assert visit.page.locator("#adapter-field").is_hidden()
    visit.check()
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_page_of_a_timeline_needs_no_server(
    browser: Browser, tmp_path: Path, size: str, scheme: str
) -> None:
    page = tmp_path / "cold start.html"
    page.write_text(standalone(checked_snapshot(cold_start(num_layers=24))), encoding="utf-8")
    visit = Visit(browser, page.as_uri(), size, scheme, path="")
    expect(visit.page.locator("#start-hero h1")).to_have_text("First token after 4.28 s")
    expect(visit.page.locator("#explained")).to_contain_text("bytes on their way")
    visit.page.locator("#start-table summary").click()
    expect(visit.page.locator("#start-table tbody tr")).to_have_count(26)
    visit.check()
    visit.close()


def test_tabs_and_phases_work_by_keyboard(browser: Browser, warm_server: Server) -> None:
    visit = Visit(browser, url_of(warm_server), "desktop")
    page = visit.page
    page.wait_for_selector("#legend button")
    page.focus("#tab-start")
    for panel in (*PANELS[1:], "start"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{panel}")).to_be_focused()
        expect(page.locator(f"#tab-{panel}")).to_have_attribute("aria-selected", "true")
    button = page.locator("#legend button").first
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "false")
    expect(button).to_be_focused()
    visit.check()
    visit.close()


def test_a_key_is_asked_for_and_kept_by_the_page_alone(browser: Browser, folder: Path) -> None:
    server = Server(folder / "bucket" / "model", "--name", "tiny", "--api-key", "sesame")
    try:
        visit = Visit(browser, url_of(server), "phone")
        page = visit.page
        expect(page.locator("#key-form")).to_be_visible()
        visit.check()
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#start-hero h1")).to_contain_text("Ready after", timeout=WAIT_MS)
        visit.check()
        kept = page.evaluate(
            "[localStorage.length, sessionStorage.length, document.cookie, document.getElementById('key').value]"
        )
        assert kept == [0, 0, "", ""]
        page.reload()
        expect(page.locator("#key-form")).to_be_visible()
        visit.close()
    finally:
        server.close()


@pytest.mark.parametrize("size", SIZES)
def test_in_front_of_a_pool_models_are_put_to_sleep_and_woken(
    browser: Browser, folder: Path, tmp_path: Path, size: str
) -> None:
    source = folder / "bucket" / "model"
    file = f'version = 1\n[models.tiny]\nsource = "{source}"\nmin_warm = 0\n[node]\nmemory = "8GiB"\n'
    with PoolRun(tmp_path, file, "--model-control") as pool:
        visit = Visit(browser, f"http://127.0.0.1:{pool.port}", size)
        page = visit.page
        page.get_by_role("button", name="Wake tiny").click()
        expect(page.locator("#pool-models .tag")).to_have_text("ready", timeout=WAIT_MS)
        visit.check()
        page.get_by_role("button", name="Put to sleep tiny").click()
        expect(page.locator("#pool-models .tag")).to_have_text("asleep", timeout=WAIT_MS)
        visit.check()
        visit.close()
