"""The API keys: what asks for one, which open, and that nothing else does, however a path is written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.app import create_app, edge_rules
from teneral.handlers.function.handler import Handler
from teneral.handlers.http.keys import MAX_FILE_BYTES, MAX_KEYS, ApiKeys, parse_keys
from teneral.handlers.platforms import HTTP, PLATFORMS, Platform
from teneral.loader.errors import UsageError

KEY = "sesame-secret"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")

OPEN_PATHS = edge_rules(HTTP).open_paths


def echo(event: Any, context: Any) -> Any:
    return event


async def raw(server: Any, *heads: str) -> list[int]:
    """The statuses of requests whose targets are sent as they are: clients' libraries would tidy them up."""
    statuses: list[int] = []
    while len(statuses) < len(heads):
        reader, writer = await asyncio.open_connection(*server.address)
        for head in heads[len(statuses) :]:
            writer.write(f"{head} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            statuses.append(int(answer.split(" ")[1]))
            if "connection: close" in answer:
                break
            length = re.search(r"content-length: (\d+)", answer)
            if length and not head.startswith("HEAD"):
                await reader.readexactly(int(length[1]))
        writer.close()
        await writer.wait_closed()
    return statuses


def routes(parts: TinyParts, platform: Platform) -> set[tuple[str, str]]:
    """(method, path) of all that this version serves."""
    app = create_app(StagedInstance(parts), handler=Handler(echo), platform=platform)
    return {
        (route.method, re.sub(r"{[^}]*}", "x", route.resource.canonical))
        for route in app.router.routes()
        if isinstance(route.resource, web.Resource)
    }


def spellings(path: str) -> set[str]:
    """Other ways to write a path, that something between a client and a handler might take for it."""
    first, rest = path[1:2], path[2:]
    open_path = sorted(OPEN_PATHS)[0]
    return {
        path,
        f"/{path}",
        f"{path}/",
        f"/.{path}",
        f"{path}/.",
        f"{path}?key={KEY}",
        f"{path};x",
        f"{path}%00",
        f"{path}%20",
        path.upper(),
        f"/%{ord(first or '/'):02x}{rest}",
        f"/%2e{path}",
        f"/x/..{path}",
        f"/x/%2e%2e{path}",
        f"{open_path}/..{path}",
        f"{open_path}/%2e%2e{path}",
        f"{open_path}%2f..{path}",
        f"{path}/..{open_path}",
        f"{path}%2f..%2f..{open_path}",
        f"{open_path}?{path}",
        f"http://x{path}",
        f"/{path[1:].replace('/', '%2f')}",
    }


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda row: row.name)
async def test_every_route_but_the_probes_asks_for_the_key(
    start: Any, tiny_parts: TinyParts, platform: Platform
) -> None:
    found = routes(tiny_parts, platform)
    assert {("POST", "/invoke"), ("GET", "/metrics"), ("POST", "/v1/completions")} <= found
    opened = {re.sub(r"{[^}]*}", "x", pattern) for pattern in OPEN_PATHS}
    async with start(api_key=KEY, handler=echo, platform=platform) as server:
        for method, path in sorted(found | {("GET", "/not/there")}):
            without = await server.request(method, path)
            assert KEY.encode() not in without.body
            if path in opened and method in ("GET", "HEAD"):
                assert without.status != 401, path
            else:
                assert without.status == 401, (method, path)
                assert without.headers["WWW-Authenticate"] == "Bearer"
            with_key = await server.request(method, path, headers={"Authorization": f"Bearer {KEY}"})
            assert with_key.status != 401, path


async def test_no_spelling_of_a_path_and_no_method_goes_round_the_key(
    start: Any, tiny_parts: TinyParts
) -> None:
    paths = {path for _, path in routes(tiny_parts, HTTP)}
    async with start(api_key=KEY, handler=echo) as server:
        for path in sorted(paths):
            for spelling in sorted(spellings(path)):
                statuses = await raw(server, *(f"{method} {spelling}" for method in METHODS))
                for method, status in zip(METHODS, statuses, strict=True):
                    assert method in ("GET", "HEAD") or status in (400, 401), (method, spelling)
        counted = re.findall(r'requests_total{route="(.*)",status="(.*)"}', server.metrics_text())
    answered = {route for route, status in counted if status not in ("400", "401")}
    assert "/livez" in answered
    assert answered <= OPEN_PATHS


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer sesame", 200),
        ("bearer sesame", 200),
        ("Bearer  sesame", 200),
        ("Bearer sesam", 401),
        ("Bearer sesame2", 401),
        ("Bearer SESAME", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Basic sesame", 401),
        ("sesame", 401),
        ("Bearer sésame", 401),
        ("Bearer sesame,sesame", 401),
    ],
)
async def test_only_the_whole_key_opens(start: Any, header: str, status: int) -> None:
    async with start(api_key="sesame") as server:
        assert (await server.get("/v1/models", headers={"Authorization": header})).status == status


async def test_without_a_key_configured_none_is_asked_for(start: Any) -> None:
    async with start() as server:
        assert (await server.get("/v1/models")).status == 200


async def test_while_keys_are_exchanged_the_old_and_the_new_one_open(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the old one\nold\n\n new \n")
    for setting in ("old,new", f"@{file}"):
        async with start(api_key=setting) as server:
            for key, status in (("old", 200), ("new", 200), ("old,new", 401), ("# the old one", 401)):
                answer = await server.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert answer.status == status


@pytest.mark.parametrize("setting", ["", ",", " , ", "a b", "schlüssel", "x" * 5000, "@", "@/nowhere/at/all"])
def test_a_setting_that_holds_no_key_is_an_error_and_never_an_open_server(setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(setting)
    assert caught.value.key == "api_key"
    assert "schlüssel" not in str(caught.value)


def test_a_file_of_keys_is_bounded_and_must_hold_one(tmp_path: Path) -> None:
    for content in (
        b"",
        b"# only a comment\n",
        b"x" * (MAX_FILE_BYTES + 1),
        b"k\n" * (MAX_KEYS + 1),
        b"\xff\n",
    ):
        file = tmp_path / "keys"
        file.write_bytes(content)
        with pytest.raises(UsageError):
            parse_keys(f"@{file}")


def test_keys_are_compared_as_digests_of_one_length_and_none_is_kept() -> None:
    keys = ApiKeys(["first-secret", "second-secret-that-is-longer"])
    assert keys.opens(b"first-secret")
    assert keys.opens(b"second-secret-that-is-longer")
    assert not keys.opens(b"first-secret2")
    assert not keys.opens(b"")
    kept = vars(keys)
    assert "secret" not in repr(kept)
    assert {len(digest) for digest in kept["_digests"]} == {32}


async def test_no_key_stands_in_the_log(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    async with start(api_key=KEY) as server:
        await server.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        await server.get("/v1/models", headers={"Authorization": f"Bearer {KEY}x"})
        await server.get(f"/v1/models?api_key={KEY}")
    assert KEY not in caplog.text
    assert KEY not in repr(server.instance.config)
