"""The console without a browser: where it is, what it costs, what it may do, and the routes that it reads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import events
from tests.support.instances import StagedInstance, TinyParts

import teneral.handlers.console
from teneral.handlers.app import create_app
from teneral.handlers.console.files import PATHS, SCRIPTS, asset, page
from teneral.handlers.console.live import MAX_STREAMS
from teneral.handlers.platforms import PLATFORMS, Platform
from teneral.loader.timeline import Timeline

FILES = sorted((Path(teneral.handlers.console.__file__).parent / "page").iterdir())
MAX_BYTES = 150_000
KEY = "sesame"


def paths_of(parts: TinyParts, platform: Platform) -> set[str]:
    app = create_app(StagedInstance(parts), platform=platform)
    return {
        route.resource.canonical for route in app.router.routes() if route.resource and route.method == "GET"
    }


async def test_the_page_is_at_the_root_with_a_policy_that_permits_its_own_files_alone(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/")
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = dict(
            part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "connect-src", "img-src")} == {"'self'"}
        (style,) = re.findall(rb"<style>(.*?)</style>", answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style).digest()).decode()
        assert policy["style-src"] == f"'sha256-{digest}'", "STYLE_SHA256 is another file's"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        for path in sorted(PATHS):
            file = await server.get(path)
            assert (file.status, file.headers["X-Content-Type-Options"]) == (200, "nosniff")
            again = await server.get(path, headers={"If-None-Match": file.headers["ETag"]})
            assert (again.status, again.body) == (304, b"")
        for path in re.findall(r'(?:src|href)="(/[^"]*)"', answer.body.decode()):
            assert path in PATHS


def test_all_of_it_is_small() -> None:
    assert (
        sum(len(asset(path[1:])) for path in PATHS if path != "/") + len(page(mode="server", needs_key=False))
        <= MAX_BYTES
    )
    assert {file.name for file in FILES if file.suffix == ".js"} == set(SCRIPTS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_another_place_or_runs_text_as_code(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", text)


async def test_behind_a_key_the_page_is_open_and_everything_it_reads_is_not(start: Any) -> None:
    async with start(api_key=KEY) as server:
        answer = await server.get("/")
        assert b'data-mode="server" data-key="needed"' in answer.body
        assert KEY.encode() not in answer.body
        for path in ("/timeline/events", "/debug/artifact", "/debug/kv", "/metrics", "/timeline"):
            assert (await server.get(path)).status == 401
        assert (await server.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})).status == 200
        assert (await server.post("/", {})).status == 401


async def test_it_can_be_turned_off(start: Any) -> None:
    async with start(console=False) as server:
        assert (await server.get("/")).status == 405
        assert (await server.get("/console.js")).status == 404
        assert (await server.get("/timeline/events")).status == 200


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_only_a_platform_with_a_port_has_one(tiny_parts: TinyParts, platform: Platform) -> None:
    has_port = not platform.run
    assert (paths_of(tiny_parts, platform) >= PATHS) is has_port
    assert ("/timeline/events" in paths_of(tiny_parts, platform)) is has_port


async def test_the_timelines_events_add_up_to_its_snapshot(start: Callable[..., Any]) -> None:
    async with start(loaded=False) as server:
        timeline: Timeline = server.instance.timeline
        timeline.add("process", "import a", 0.0, 0.1)
        async with server.client.get("/timeline/events") as response:
            assert response.content_type == "text/event-stream"
            seen = [await next_event(response)]
            assert seen[0]["load"]["state"] == "loading"
            timeline.add("process", "import b", 0.1, 0.2)
            seen.append(await next_event(response))
            server.instance.let_in()
            rest = (await response.read()).decode()
        seen += [json.loads(data) for data in events(rest.encode()) if data != "[DONE]"]
        assert rest.endswith("data: [DONE]\n\n")
        whole = (await server.get("/timeline")).json
        spans = [span for event in seen for span in event["spans"]]
        assert sorted(spans, key=lambda span: span["start_s"]) == whole["spans"]
        assert {event["started_unix_s"] for event in seen} == {whole["started_unix_s"]}
        assert seen[-1]["load"]["state"] == "ready"


async def next_event(response: Any) -> Any:
    line = b""
    while not line.startswith(b"data: "):
        line = await response.content.readline()
    return json.loads(line.removeprefix(b"data: "))


async def test_the_number_of_listening_clients_is_bounded(start: Any) -> None:
    async with start(loaded=False) as server:
        listening = [await server.client.get("/timeline/events") for _ in range(MAX_STREAMS)]
        one_more = await server.get("/timeline/events")
        assert (one_more.status, one_more.error["code"]) == (503, "too_many_streams")
        assert "Retry-After" in one_more.headers
        for response in listening:
            response.close()
        while (await server.get("/livez")).status == 200:
            async with server.client.get("/timeline/events") as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.01)


async def test_a_drain_ends_the_events(start: Any) -> None:
    async with start(loaded=False) as server, server.client.get("/timeline/events") as response:
        await next_event(response)
        server.stop.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_there_is_no_artifact_before_its_manifest(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/debug/artifact")
        assert (answer.status, answer.error["code"]) == (503, "loading")
