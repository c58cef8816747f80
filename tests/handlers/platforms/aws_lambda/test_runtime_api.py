"""The client of the Runtime API, against servers that do not speak as they should; and what an instance makes of its
surroundings.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from teneral.handlers.platforms.aws_lambda.command import concurrency, handler_spec
from teneral.handlers.platforms.aws_lambda.errors import InputError, report
from teneral.handlers.platforms.aws_lambda.loop import seed_anew
from teneral.handlers.platforms.aws_lambda.runtime_api import (
    MARGIN_S,
    MAX_EVENT_BYTES,
    Invocation,
    RuntimeAnswer,
    RuntimeApi,
    RuntimeApiError,
)
from teneral.loader.errors import UsageError
from teneral.runtime.config import ServeConfig


@asynccontextmanager
async def speaking(*answers: bytes) -> AsyncIterator[RuntimeApi]:
    """A client, and a server that sends these bytes, one for each connection, whatever it is asked, and closes."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if left else b"")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, RuntimeApi(f"127.0.0.1:{port}") as api:
        yield api


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name: a: b\r\n\r\n{}"


async def test_an_answer_is_read() -> None:
    async with speaking(OK) as api:
        assert await api.next() == RuntimeAnswer(200, {"content-length": "2", "x-name": "a: b"}, b"{}")


async def test_a_connection_that_ends_without_a_word_is_tried_once_more() -> None:
    async with speaking(b"", OK) as api:
        assert (await api.next()).body == b"{}"
    async with speaking(b"", b"", OK) as api:
        with pytest.raises(RuntimeApiError, match="lost"):
            await api.next()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % (MAX_EVENT_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (300 << 10),
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 two OK\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_an_error_and_not_waited_for(answer: bytes) -> None:
    async with speaking(answer) as api:
        with pytest.raises(RuntimeApiError) as caught:
            await api.next()
    assert caught.value.is_fatal


@pytest.mark.parametrize(("status", "is_fatal"), [(400, False), (403, False), (413, False), (500, True)])
async def test_a_refusal_says_what_was_refused(status: int, is_fatal: bool) -> None:
    async with speaking(b"HTTP/1.1 %d No\r\nContent-Length: 3\r\n\r\nwhy" % status) as api:
        with pytest.raises(RuntimeApiError, match="why") as caught:
            await api.respond("id", b"{}", "application/json", None)
    assert (caught.value.status, caught.value.is_fatal) == (status, is_fatal)


async def test_a_missing_listener_is_an_error() -> None:
    with pytest.raises(RuntimeApiError):
        await RuntimeApi("127.0.0.1:1").next()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:port", ":1", "host:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        RuntimeApi(address)


# -- invocations -------------------------------------------------------------------------------------------------------


def test_an_invocation_without_an_id_is_refused() -> None:
    for headers in ({}, {"lambda-runtime-aws-request-id": "a/../b"}):
        with pytest.raises(InputError):
            Invocation.of(RuntimeAnswer(200, headers, b""))


def test_some_of_an_invocations_time_is_kept_for_its_answer() -> None:
    def timeout_s(left_s: float) -> float | None:
        return Invocation("id", b"", deadline_unix_ms=int(1000 * (time.time() + left_s))).timeout_s()

    assert timeout_s(30.0) == pytest.approx(30 - MARGIN_S, abs=0.1)
    assert timeout_s(0.5) == pytest.approx(0.45, abs=0.1)
    assert timeout_s(-5.0) == 0
    assert Invocation("id", b"").timeout_s() is None


def test_an_event_declared_as_no_json_stays_bytes() -> None:
    assert Invocation("id", b"\xff", content_type="image/png").event() == b"\xff"


def test_an_error_whose_text_is_endless_or_raises_is_reported_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise OSError

    assert report(Unspeakable()).error_type == "Unspeakable"
    assert len(report(ValueError("x" * (1 << 20))).body("id")) < 100_000
    assert b"ud800" in report(ValueError("\ud800")).body("id")


# -- surroundings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "variable", "spec"),
    [
        ("app.handler", "", "app:handler"),
        ("app/main.handler", "", "app.main:handler"),
        ("pkg.app.handler", "other.handler", "pkg.app:handler"),
        ("app.py:handler", "", "app.py:handler"),
        ("pkg.app:handler", "", "pkg.app:handler"),
        ("handler", "", "handler"),  # whose error says what it should be
        (None, "app.handler", "app:handler"),
        (None, "app.py:handler", "app.py:handler"),
        (None, "", None),
        (None, "serve", None),
        (None, "s3://bucket/model", None),
        (None, "--port", None),
        (None, "models/my.model", None),
    ],
)
def test_the_function_is_found_in_a_flag_or_in_the_images_command(
    flag: str | None, variable: str, spec: str | None
) -> None:
    config = ServeConfig(model="models/my.model", handler=flag)
    assert handler_spec(config, {"_HANDLER": variable}) == spec


def test_how_many_may_run_is_what_lambda_says() -> None:
    assert concurrency({}) == 1
    assert concurrency({"AWS_LAMBDA_MAX_CONCURRENCY": "16"}) == 16
    for given in ("0", "-1", "x", "", "100000"):
        with pytest.raises(UsageError, match="MAX_CONCURRENCY"):
            concurrency({"AWS_LAMBDA_MAX_CONCURRENCY": given})


def test_a_copy_draws_other_numbers_than_the_others() -> None:
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = []
    for _ in range(2):
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        seed_anew()
        drawn.append((random.random(), np.random.random(), float(torch.rand(1)), os.urandom(4)))
    assert all(one != another for one, another in zip(*drawn, strict=True))
