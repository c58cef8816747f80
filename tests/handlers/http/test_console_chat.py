"""The console's playground in Chromium: chats, completions, tokens, tools.

`scripts/conformance-console` installs Playwright and axe-core, and names the browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chat_families import family_parts
from tests.support.console_visits import SIZES, WAIT_MS, Browser, Visit, chromium, expect, url_of
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server
from tests.test_serve_draft import GatedStore

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
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
    path = tmp_path_factory.mktemp("chats")
    save_tiny("llama", path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    pack(FileStore(path / "model"), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def warm_server(folder: Path) -> Iterator[Server]:
    server = Server(folder / "bucket" / "model", "--name", "tiny")
    yield server
    server.close()


ANSWER = "Two **strong**\n\n- one `x`\n- *two*\n\n```python\nx = 1\n```\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_chat_is_drawn_as_markdown_and_goes_on(
    browser: Browser, warm_server: Server, size: str, scheme: str
) -> None:
    visit = Visit(browser, url_of(warm_server), size, scheme, path="/#playground")
    page = visit.page
    visit.show_parameters()
    page.locator("summary", has_text="Structured output").click()
    page.select_option("#form", "grammar")
    page.fill("#grammar", f"root ::= {json.dumps(ANSWER)}")
    if size != "desktop":
        page.locator("#show-parameters").click()
        expect(page.locator("#parameters")).to_be_hidden()
    for number in (1, 2):
        page.fill("#prompt", f"Question {number}\nof two")
        page.locator("#prompt").press("Enter")
        expect(page.locator("#transcript .assistant")).to_have_count(number)
        page.wait_for_selector("#stop[hidden]", state="attached")
        expect(page.locator("#prompt")).to_have_value("")
    answer = page.locator("#transcript .assistant").last
    for tag, text in (("strong", "strong"), ("li code", "x"), ("li em", "two"), ("pre code", "x = 1")):
        expect(answer.locator(tag)).to_have_text(text)
    expect(answer.locator(".language")).to_have_text("python")
    visit.check()
    curl = page.locator("#curl").text_content() or ""
    assert curl.count('"role": "user"') == 2
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#transcript .assistant")).to_have_count(2)
    page.wait_for_selector("#stop[hidden]", state="attached")
    assert (page.locator("#curl").text_content() or "").count('"role": "user"') == 2
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#transcript")).to_have_text(
        "Nothing is stored: what you write is gone with this page."
    )
    visit.close()


def test_a_chat_is_stopped_and_its_part_stays(browser: Browser, warm_server: Server) -> None:
    visit = Visit(browser, url_of(warm_server), "desktop", path="/#playground")
    page = visit.page
    page.fill("#max-tokens", "400")
    page.locator("summary", has_text="Structured output").click()
    page.select_option("#form", "regex")
    page.fill("#grammar", "[a-z]{400}")
    page.fill("#prompt", "Hello")
    page.locator("#prompt").press("Shift+Enter")
    expect(page.locator("#prompt")).to_have_value("Hello\n")
    # A tiny model has finished before a hand reaches the button.
    page.evaluate(
        """new MutationObserver(() => {
          if (document.querySelector("#transcript .markdown")?.textContent) document.getElementById("stop").click();
        }).observe(document.getElementById("transcript"), { childList: true, subtree: true })"""
    )
    page.locator("#send").click()
    expect(page.locator("#ask-state")).to_have_text("Stopped.")
    expect(page.locator("#transcript .assistant .markdown")).to_have_text(re.compile("^[a-z]{1,399}$"))
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    visit.check()
    visit.close()


def test_reasoning_is_folded_and_text_stays_text(browser: Browser, warm_server: Server) -> None:
    """The events of a server whose model reasons, which a random model does not."""
    deltas = [
        {"reasoning_content": "Let me <b>think</b>."},
        {"content": "<img src=x onerror=alert(1)> [no](javascript:alert(1)) "},
        {"content": "[yes](https://example.com) " + "> " * 1000 + "**" * 1000},
    ]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    visit = Visit(browser, url_of(warm_server), "desktop", path="/#playground")
    page = visit.page
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    page.fill("#prompt", "Hello")
    page.locator("#send").click()
    answer = page.locator("#transcript .assistant")
    expect(answer.locator("summary")).to_have_text(re.compile("Reasoned for"))
    expect(answer.locator(".reasoning div")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.locator(".reasoning div")).to_have_text("Let me <b>think</b>.")
    expect(answer.locator(".markdown")).to_contain_text(
        "<img src=x onerror=alert(1)> [no](javascript:alert(1))"
    )
    expect(answer.locator("a")).to_have_attribute("href", "https://example.com")
    assert answer.locator("img").count() == 0
    visit.check()
    visit.close()


def test_an_answer_comes_token_by_token_with_probabilities_and_code(
    browser: Browser, warm_server: Server
) -> None:
    visit = Visit(browser, url_of(warm_server), "desktop", path="/#playground")
    page = visit.page
    page.locator("input[value=completion]").check(force=True)
    expect(page.locator("#token-legend")).to_be_hidden()
    page.check("#logprobs")
    expect(page.locator("#token-legend")).to_contain_text("below 15 %")
    page.fill("#prompt", "hello there, it's me")
    page.fill("#max-tokens", "12")
    page.fill("#temperature", "0")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#ask-figures dt")
    page.wait_for_selector("#stop[hidden]", state="attached")
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
    page.locator("summary", has_text="Structured output").click()
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
    page.wait_for_selector("#stop[hidden]", state="attached")
    for form, rule, answer in (
        ("regex", "4[0-1]", re.compile("4[01]")),
        ("choice", "left\nright", re.compile("left|right")),
        ("grammar", 'root ::= "yes" | "no"', re.compile("yes|no")),
    ):
        page.select_option("#form", form)
        page.fill("#grammar", rule)
        page.locator("#send").click()
        expect(page.locator("#transcript")).to_have_text(answer, timeout=WAIT_MS)
        page.wait_for_selector("#stop[hidden]", state="attached")
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
            page.check("#logprobs")
            page.fill("#prompt", "hello there")
            page.fill("#max-tokens", "40")
            page.fill("#temperature", "0")
            page.select_option("#first-token", "draft")
            page.locator("#send").click()
            expect(page.locator("#transcript .token.drafted").first).to_be_attached(timeout=WAIT_MS)
            store.may_refine.set()
            page.wait_for_selector("#stop[hidden]", state="attached")
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
        visit.show_parameters()
        page.check("#logprobs")
        page.fill("#prompt", "Hello")
        page.fill("#max-tokens", "24")
        page.locator("#send").click()
        expect(page.locator("#transcript .assistant .token").first).to_be_attached(timeout=WAIT_MS)
        page.wait_for_selector("#stop[hidden]", state="attached")
        # A random model's tokens may have no text: special ones, and parts of a character.
        page.locator("#transcript .token", has_text=re.compile(r"\S")).first.hover()
        expect(page.locator("#token")).to_contain_text("logprob")
        page.locator("summary", has_text="Structured output").click()
        page.fill("#tools", json.dumps([TOOL]))
        page.select_option("#tool-choice", "required")
        page.fill("#max-tokens", "100")
        page.fill("#prompt", "And the weather?")
        page.locator("#send").click()
        expect(page.locator("#transcript .call").first).to_have_text(
            re.compile(r'^weather\(\{"city": ?"Oslo"\}\)$'), timeout=WAIT_MS
        )
        page.wait_for_selector("#stop[hidden]", state="attached")
        page.locator("#code summary").click()
        assert '"tool_choice": "required"' in (page.locator("#curl").text_content() or "")
        visit.check()
        visit.close()
    finally:
        server.close()
