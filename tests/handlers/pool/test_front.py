"""The pool's front between its clients and instances that hang, in the test's own process. The instance is a server of
the test.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.pool_front import BODY, answer, running

from teneral.handlers.http.limits import Limits
from teneral.handlers.pool import front, run
from teneral.handlers.pool.deployment import ROLLBACK_MIN_ANSWERS
from teneral.runtime.config import ServeConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it")


async def test_a_connection_that_only_asks_the_pool_itself_is_not_taken_for_a_slow_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Limits", functools.partial(Limits, head_timeout_s=0.3))
    async with running(tmp_path, answer) as rig:
        for path in ("/livez", "/v1/models", "/nowhere"):
            reader = await rig.connect(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 ")
            await reader.readuntil(b"\r\n\r\n")
            rest = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(0.6):
                    while piece := await reader.read(4096):
                        rest += piece
            assert b"408" not in rest, path
            assert not reader.at_eof(), path


async def test_a_slow_body_gives_its_connection_up_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "max_files", lambda: 0)  # the fewest connections
    monkeypatch.setattr("teneral.handlers.http.connections.SLOW_BODY_S", 0.1)
    async with running(tmp_path, answer) as rig:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        slow = [await rig.connect(head) for _ in range(64)]
        await asyncio.sleep(0.3)
        async with rig.client.get("/livez") as live:
            assert live.status == 200
        assert len(slow) == 64


async def test_a_stream_whose_instance_hangs_ends_with_an_error_and_so_does_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "UPSTREAM_GRACE_S", 0.1)
    released = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await released.wait()
        return response

    async with running(tmp_path, hang) as rig:
        async with rig.client.post("/v1/completions", json=BODY) as streamed:
            body = await streamed.read()
        first, last = body.strip().split(b"\n\n")
        assert first == b"data: {}"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "request_timeout"
        assert rig.process.ends == 1
        released.set()


async def test_an_instance_that_hangs_before_it_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front, "UPSTREAM_GRACE_S", 0.1)
    released = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await released.wait()
        return await answer(request)

    async with running(tmp_path, hang) as rig:
        with suppress(
            aiohttp.ClientError, TimeoutError
        ):  # a client that gives up says nothing of the instance
            await rig.client.post("/v1/completions", json=BODY, timeout=aiohttp.ClientTimeout(total=0.3))
        await asyncio.sleep(0.1)
        assert (rig.process.ends, rig.server.in_work) == (0, 0)
        async with rig.client.post("/v1/completions", json=BODY) as late:
            assert late.status == 504
        assert (rig.process.ends, rig.deployment.errors) == (1, 1)
        assert "m#1 hangs" in caplog.text
        released.set()


async def test_a_place_that_comes_as_the_wait_ends_is_not_lost(tmp_path: Path) -> None:
    async with running(tmp_path, answer) as rig:
        held = await rig.supervisor.acquire(rig.deployment)
        assert held is not None
        waiting = asyncio.create_task(rig.supervisor.acquire(rig.deployment))
        while not rig.deployment.waiting:
            await asyncio.sleep(0)
        time.sleep(0.25)  # the loop is late, so that both happen in its next round
        asyncio.get_running_loop().call_soon(rig.supervisor.release, held)
        lease = await waiting
        assert lease is not None
        rig.supervisor.release(lease)
        assert rig.server.in_work == 0


async def test_a_place_given_back_at_an_instance_that_is_to_end_ends_it(tmp_path: Path) -> None:
    async with running(tmp_path, answer) as rig:
        lease = await rig.supervisor.acquire(rig.deployment)
        assert lease is not None
        rig.server.closing = True  # as `sleep` does it
        rig.supervisor.hand_back(lease)
        await asyncio.sleep(0)
        assert rig.process.ends == 1


async def test_a_model_with_a_key_of_its_own_is_not_started_by_a_request_without_it(tmp_path: Path) -> None:
    async with running(tmp_path, answer, ServeConfig(model="/m", api_key="right")) as rig:
        rig.deployment.servers.clear()
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with rig.client.post("/v1/completions", json=BODY, headers=headers) as refused:
                assert refused.status == 401
        assert not rig.deployment.starting
        assert rig.supervisor.metrics.counts()["cold_requests"] == {}
        async with rig.client.post("/v1/completions", json=BODY, headers={"x-api-key": "right"}) as late:
            assert late.status == 503, "no instance within the time"


async def test_a_pool_without_files_left_is_not_taken_for_an_instances_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with running(tmp_path, answer) as rig:
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        for _ in range(2 * ROLLBACK_MIN_ANSWERS):
            reader = await rig.connect(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", refuse)
            assert b" 503 " in await reader.readline()
            assert b"too_many_connections" in await reader.readuntil(b"}}")
            monkeypatch.undo()
        assert not rig.deployment.fails_too_often
        async with rig.client.post("/v1/completions", json=BODY) as received:
            assert received.status == 200


async def test_an_answer_may_have_long_headers(tmp_path: Path) -> None:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"ce-subject": "x" * 60_000})

    client = aiohttp.ClientSession(max_field_size=1 << 20)
    async with running(tmp_path, reply) as rig, client:
        url = f"http://127.0.0.1:{rig.port}/v1/completions"
        async with client.post(url, json=BODY) as received:
            assert (received.status, len(received.headers["ce-subject"])) == (200, 60_000)


async def test_clients_that_do_not_speak_http_leave_one_line_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, answer) as rig:
        with caplog.at_level(logging.INFO):
            reader = await rig.connect(b"POST / HTTP/1.1\r\nX: a\rb\r\n\r\n")
            assert b" 400 " in await reader.readline()
        found = [record for record in caplog.records if "Error handling request" in record.getMessage()]
        assert [(record.levelno, record.exc_info) for record in found] == [(logging.INFO, None)]
