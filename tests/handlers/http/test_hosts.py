"""A server without a key is called by its address, or by a name that no web page can have."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance

from teneral.handlers.http.web_pages import parse_hosts
from teneral.loader.errors import UsageError

EVIL = (
    "evil.example",
    "evil.example:8080",
    "EVIL.example.",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "local",  # a name without a dot is private: control
)
OWN = (
    "127.0.0.1:8080",
    "localhost",
    "LOCALHOST:1",
    "app.localhost",
    "[::1]:8080",
    "10.1.2.3",
    "teneral:8080",
    "gpu-box.local",
    "host.docker.internal:8080",
    "model.aws.local:8080",
    "chat.default.svc.cluster.local",
    socket.gethostname(),
    "",
)


def all_paths(server: Any) -> list[tuple[str, str]]:
    """Each route's method and path, with something in place of what is variable in it, and a path without a route."""
    found = {
        (route.method, re.sub(r"{[^}]*}", "x", route.resource.canonical))
        for route in server.app.router.routes()
        if route.resource
    }
    return [*sorted(found), ("GET", "/there-is-no-such-path")]


async def raw_status(server: Any, headers: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /timeline HTTP/1.1\r\n" + headers + b"\r\n\r\n")
    status = (await reader.readline()).split()[1]
    writer.close()
    return status


async def test_a_page_whose_name_was_led_here_reads_and_sends_nothing(start: Any) -> None:
    async with start(handler=lambda event, context: event) as server:
        paths = all_paths(server)
        assert {path for _, path in paths} >= {
            "/",
            "/metrics",
            "/timeline",
            "/timeline/events",
            "/debug/kv",
            "/livez",
        }
        for method, path in paths:
            answer = await server.request(method, path, headers={"Host": "evil.example:8080"})
            assert answer.status == 403, (method, path)
            if method != "HEAD":
                assert b"--allowed-hosts" in answer.body, "in the shape of the path's API"
        for host in EVIL[:-1]:
            assert (await server.get("/metrics", headers={"Host": host})).status == 403, host
        assert await raw_status(server, b"Host: localhost:8080@evil.example") == b"403"


async def test_programs_that_call_it_by_an_address_or_a_private_name_are_answered(start: Any) -> None:
    async with start() as server:
        for host in (*OWN, EVIL[-1]):
            assert (await server.get("/timeline", headers={"Host": host})).status == 200, host


async def test_two_hosts_in_one_request_are_both_looked_at(start: Any) -> None:
    async with start() as server:
        assert await raw_status(server, b"Host: localhost\r\nHost: evil.example") in (b"400", b"403")


async def test_a_key_keeps_pages_out_whatever_the_name(start: Any) -> None:
    async with start(api_key="secret") as server:
        evil = {"Host": "evil.example"}
        assert (await server.get("/timeline", headers=evil)).status == 401
        with_key = {**evil, "Authorization": "Bearer secret"}
        assert (await server.get("/timeline", headers=with_key)).status == 200


async def test_the_operator_names_hosts(start: Any) -> None:
    async with start(allowed_hosts="Models.example.com., gpu.example") as server:
        for host, status in (("models.example.com:80", 200), ("gpu.example", 200), ("evil.example", 403)):
            assert (await server.get("/timeline", headers={"Host": host})).status == status, host
        # The console under that name may send as well, and no other page.
        page = {"Host": "gpu.example:8080", "Origin": "http://gpu.example:8080"}
        body = {"prompt": "x", "max_tokens": 1}
        assert (await server.post("/v1/completions", body, headers=page)).status == 200
        other = {**page, "Origin": "http://gpu.example:9090"}
        assert (await server.post("/v1/completions", body, headers=other)).status == 403
    async with start(allowed_hosts="gpu.example", api_key="secret") as server:
        evil = {"Host": "evil.example", "Authorization": "Bearer secret"}
        assert (await server.get("/timeline", headers=evil)).status == 403, "an explicit list always holds"
    async with start(allowed_hosts="*") as server:
        assert (await server.get("/timeline", headers={"Host": "chat.example.com"})).status == 200
        page = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert (await server.post("/v1/completions", body, headers=page)).status == 403


async def test_a_named_origin_names_its_host(start: Any) -> None:
    async with start(cors_origin="http://gpu.example:8080") as server:
        assert (await server.get("/timeline", headers={"Host": "gpu.example:8080"})).status == 200
        assert (await server.get("/timeline", headers={"Host": "evil.example"})).status == 403


async def test_an_ipv6_address_is_checked_too(tiny_parts: Any) -> None:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        sock.listen()
        instance = StagedInstance(tiny_parts)
        instance.let_in()
        async with running_server(instance, listener=sock) as server:
            url = f"http://[::1]:{sock.getsockname()[1]}/timeline"
            for host, status in (("evil.example", 403), ("[::1]", 200)):
                async with server.client.get(url, headers={"Host": host}) as answer:
                    assert answer.status == status


@pytest.mark.parametrize(
    "setting", ["", " , ", "http://gpu.example", "gpu.example/path", "a b", "-x", "user@host"]
)
def test_a_host_that_none_can_have_is_an_error(setting: str) -> None:
    with pytest.raises(UsageError, match="allowed_hosts"):
        parse_hosts(setting)
