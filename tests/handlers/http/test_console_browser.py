"""The console in Chromium, against real servers: each panel while a slow store is read, and warm.

`scripts/conformance-console` installs Playwright and axe-core, and names the browser.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.adapters import save_adapter
from tests.support.cold_start import cold_start
from tests.support.console_visits import SIZES, WAIT_MS, Browser, Visit, chromium, expect, url_of
from tests.support.gated_server import GatedServer
from tests.support.pool_runs import PoolRun
from tests.support.ports import free_port
from tests.support.standby_processes import until
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny, tiny_model
from tests.test_serve import Server

import teneral
from teneral.handlers.console.files import standalone
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.waterfall.command import checked_snapshot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PANELS = ("start", "playground", "kv", "load", "artifact")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("console")
    save_tiny("llama", path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    pack(FileStore(path / "model"), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


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
        "playground": "Nothing is stored",
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
        visit.show_parameters()
        expect(page.locator("#adapter")).to_be_visible(timeout=WAIT_MS)
        page.locator("input[value=completion]").check(force=True)
        page.fill("#prompt", "hello there")
        page.fill("#max-tokens", "4")
        for name in ("legal-german", "medical", "legal-german"):
            page.fill("#adapter", name)
            with page.expect_response("**/v1/completions"):
                page.locator("#send").click()
            page.wait_for_selector("#stop[hidden]", state="attached")
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


@pytest.mark.parametrize("size", SIZES)
def test_layers_beyond_a_screen_are_folded(browser: Browser, tmp_path: Path, size: str) -> None:
    page = tmp_path / "start.html"
    page.write_text(standalone(checked_snapshot(cold_start(num_layers=80))), encoding="utf-8")
    visit = Visit(browser, page.as_uri(), size, path="")
    fold = visit.page.locator("#fold")
    expect(fold).to_have_text("Show each of 82 layers")
    rows = visit.page.locator(".chart .row")
    folded = rows.count()
    visit.check()
    fold.click()
    expect(fold).to_have_text("Fold the layers")
    assert rows.count() > 80 > folded
    visit.check()
    visit.close()


def test_the_page_works_below_a_mount_point(browser: Browser, folder: Path) -> None:
    fastapi = pytest.importorskip("fastapi", reason="FastAPI is not installed: scripts/conformance-asgi")
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: scripts/conformance-asgi")
    llm = teneral.asgi_app(folder / "model", name="tiny")
    app = fastapi.FastAPI(lifespan=llm.lifespan)
    app.mount("/llm", llm)
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the server did not start")
        visit = Visit(browser, f"http://127.0.0.1:{server.config.port}", "desktop", path="/llm/")
        expect(visit.page.locator("#state")).to_have_text("ready", timeout=WAIT_MS)
        for panel in PANELS:
            visit.open(panel)
            visit.check()
        visit.close()
    finally:
        server.should_exit = True
        thread.join()


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
