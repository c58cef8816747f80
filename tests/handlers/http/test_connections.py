"""Connections have bounds before and between requests: how many there are, how long and how large a head is."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s

from teneral.handlers.http.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_REQUEST_LINE_BYTES,
    Limits,
)

PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


class Connection:
    """Bytes to and from a server, as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, server: Any) -> Connection:
        return cls(*await asyncio.open_connection(*server.address))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> bytes:
        """One answer whose body is that of /livez."""
        return await self._reader.readuntil(b'{"status":"ok"}')

    async def line(self) -> bytes:
        return await self._reader.readline()

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()


async def test_a_head_that_does_not_arrive_is_not_waited_for_for_ever(start: Any) -> None:
    async with start(limits=Limits(head_timeout_s=0.05)) as server:
        slow = await Connection.to(server)
        await slow.send(PROBE[:-2])
        assert (await slow.rest()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        await server.eventually(lambda: len(server.service.connections) == 0)


async def test_a_head_that_comes_byte_by_byte_has_no_more_time(start: Any) -> None:
    async with start(limits=Limits(head_timeout_s=0.1)) as server:
        slow = await Connection.to(server)

        async def drip() -> None:
            await slow.send(b"GET /livez HTTP/1.1\r\nx: ")
            while True:
                await slow.send(b"y")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        answer = await slow.rest()
        assert b" 408 " in answer or not answer  # what is still sent by then may reset the connection
        dripping.cancel()
        await asyncio.wait({dripping})


async def test_the_time_for_a_head_does_not_count_while_a_request_is_worked_on(start: Any) -> None:
    async with start(loaded=False, limits=Limits(head_timeout_s=1.0)) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        await asyncio.sleep(1.5)
        server.instance.let_in()
        assert (await waiting).status == 200


async def test_an_idle_connection_may_wait_longer_than_a_head(start: Any) -> None:
    async with start(limits=Limits(head_timeout_s=0.5)) as server:
        kept = await Connection.to(server)
        for _ in range(2):
            await asyncio.sleep(0.7)
            await kept.send(PROBE)
            assert (await kept.answer()).startswith(b"HTTP/1.1 200 OK\r\n")
        kept.close()


async def test_a_head_in_two_pieces_and_several_requests_at_once_are_taken(start: Any) -> None:
    async with start() as server:
        client = await Connection.to(server)
        for cut in (1, 10, len(PROBE) - 3, len(PROBE) - 1):
            await client.send(PROBE[:cut])
            await asyncio.sleep(0.01)
            await client.send(PROBE[cut:] + PROBE)
            assert b" 200 OK" in await client.answer()
            assert b" 200 OK" in await client.answer()
        client.close()


async def test_headers_that_are_small_each_but_large_together_are_refused(start: Any) -> None:
    async with start() as server:
        client = await Connection.to(server)
        line = b"x-%d: " + b"y" * 2000 + b"\r\n"
        await client.send(
            b"GET /livez HTTP/1.1\r\n" + b"".join(line % n for n in range(MAX_HEAD_BYTES // 2000))
        )
        await client.send(line % 100)
        assert b" 431 " in await client.rest()


async def test_the_connection_that_was_idle_the_longest_gives_way_to_a_new_one(start: Any) -> None:
    async with start(limits=Limits(max_connections=3)) as server:
        first, second, third = [await Connection.to(server) for _ in range(3)]
        await server.eventually(lambda: len(server.service.connections) == 3)
        await first.send(PROBE)  # the second one is now the one that has done nothing for the longest
        await first.answer()
        fourth = await Connection.to(server)
        await fourth.send(PROBE)
        assert b" 200 OK" in await fourth.answer()
        assert await second.rest() == b""
        for kept in (first, third):
            await kept.send(PROBE)
            assert b" 200 OK" in await kept.answer()
        assert len(server.service.connections) == 3
        for connection in (first, third, fourth):
            connection.close()


@pytest.mark.parametrize("num_files", [64, 100, 128])
async def test_where_few_files_may_be_open_few_connections_are_served(
    start: Any, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    async with start() as server:
        assert (await server.get("/livez")).status == 200
        clients = [await Connection.to(server) for _ in range(num_files)]
        await clients[-1].send(PROBE)
        assert b" 200 OK" in await clients[-1].answer()
        assert len(server.service.connections) == num_files - 40
        for client in clients:
            client.close()


def test_where_too_few_files_may_be_open_the_server_does_not_start(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "teneral", "serve", str(tmp_path), "--port", "0"]
    command = ["sh", "-c", 'ulimit -n 63; exec "$@"', "sh", *serve]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(30))
    assert ended.returncode == 2
    assert "ulimit -n" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_connection_beyond_the_working_ones_gets_retry_after(start: Any) -> None:
    async with start(loaded=False, limits=Limits(max_connections=2)) as server:
        waiting = [
            asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
            for _ in range(2)
        ]
        await server.eventually(lambda: server.service.admission.num_waiting == 2)
        refused = await (await Connection.to(server)).rest()
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 1\r\n" in refused
        server.instance.let_in()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (await server.get("/livez")).status == 200


async def test_a_client_that_does_not_speak_http_is_one_line_in_the_log(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "teneral.http.wire")
    async with start() as server:
        client = await Connection.to(server)
        await client.send(b"POST /invoke HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in await client.rest()
    (record,) = [record for record in caplog.records if record.name == "teneral.http.wire"]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 3\r\nContent-Length: 4",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Content-Length: 3, 3",
        b"Content-Length: +3",
        b"Content-Length: 0x3",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"x : y",
        b"x: a\r\n b",
        b"x: a\nContent-Length: 3",
        b"x: a\0b",
    ],
)
async def test_a_head_that_could_be_read_in_two_ways_is_refused(start: Any, lines: bytes) -> None:
    async with start() as server:
        client = await Connection.to(server)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n0\r\n\r\n")
        answer = await client.rest()
        assert b" 400 " in answer
        assert answer.count(b"HTTP/1.") == 1  # nothing behind it was taken for another request


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nx : y\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_answered_as_other_errors_and_without_a_version(
    start: Any, head: bytes
) -> None:
    async with start() as server:
        client = await Connection.to(server)
        await client.send(head)
        answered, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"\r\nServer: teneral\r\n" in answered + b"\r\n"
    assert b"aiohttp" not in answered + body
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert error["message"].startswith("the request is not valid HTTP: ")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (
            b"GET /" + b"y" * (MAX_REQUEST_LINE_BYTES + 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            414,
            "url_too_long",
        ),
        (b"GET /" + b"y" * 4 * MAX_HEAD_BYTES, 414, "url_too_long"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"y" * (MAX_HEADER_BYTES + 1) + b": x\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 4 * MAX_HEAD_BYTES, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431, "headers_too_large"),
    ],
    ids=["URL", "URL without an end", "header", "name", "header without an end", "number"],
)
async def test_a_head_that_is_too_large_has_its_own_status(
    start: Any, head: bytes, status: int, code: str
) -> None:
    async with start() as server:
        client = await Connection.to(server)
        await client.send(head)
        answered, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert answered.startswith(f"HTTP/1.1 {status} ".encode()), answered
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


EXPECTING = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-Continue\r\n"
)


async def test_a_body_is_invited_only_where_it_is_wanted(start: Any) -> None:
    async with start(api_key="secret", limits=Limits(max_body_bytes=1000)) as server:
        key = b"Authorization: Bearer secret\r\n"
        refused = {
            EXPECTING + key + b"Content-Length: 1001\r\n\r\n": 413,
            EXPECTING + b"Content-Length: 3\r\n\r\n": 401,
            EXPECTING + key + b"Content-Length: 3\r\nOrigin: http://evil.example\r\n\r\n": 403,
            EXPECTING + key + b"Content-Length: 3\r\nContent-Encoding: br\r\n\r\n": 415,
            EXPECTING.replace(b"/v1/completions", b"/nothing") + key + b"Content-Length: 3\r\n\r\n": 404,
        }
        for head, status in refused.items():
            client = await Connection.to(server)
            await client.send(head)
            assert (await client.line()).startswith(f"HTTP/1.1 {status} ".encode()), head
            client.close()
        body = b'{"prompt": "x", "max_tokens": 1}'
        client = await Connection.to(server)
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        await client.send(EXPECTING + key + length)
        assert await client.line() == b"HTTP/1.1 100 Continue\r\n"
        assert await client.line() == b"\r\n"
        await client.send(body)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"100 Continue" not in answer


async def test_other_expectations_are_ignored(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/livez", headers={"Expect": "the-unexpected"})
        assert answer.status == 200
