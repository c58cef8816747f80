"""POST /invoke: the user's function behind HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.http_server import events

from teneral.handlers.http.limits import Limits
from teneral.runtime.errors import RequestError


def echo(event: Any, context: Any) -> Any:
    return {"event": event, "request_id": context.request_id, "remaining_s": context.remaining_time_s()}


async def echo_async(event: Any, context: Any) -> Any:
    await asyncio.sleep(0)
    return echo(event, context)


def count(event: Any, context: Any) -> Iterator[Any]:
    for number in range(event["to"]):
        yield {"number": number}


async def count_async(event: Any, context: Any) -> AsyncIterator[Any]:
    for value in count(event, context):
        yield value


def count_by_return(event: Any, context: Any) -> Any:
    return count(event, context)


@pytest.mark.parametrize("function", [echo, echo_async])
async def test_a_function_gets_the_event_and_its_value_comes_back_as_json(start: Any, function: Any) -> None:
    async with start(handler=function, limits=Limits(request_timeout_s=60)) as server:
        answer = await server.post("/invoke", {"a": [1, None]}, headers={"x-request-id": "mine"})
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.json["event"] == {"a": [1, None]}
        assert answer.json["request_id"] == "mine"
        assert 0 < answer.json["remaining_s"] <= 60


@pytest.mark.parametrize("function", [count, count_async, count_by_return])
async def test_several_values_are_lines_unless_events_are_asked_for(start: Any, function: Any) -> None:
    async with start(handler=function) as server:
        lines = await server.post("/invoke", {"to": 3})
        assert lines.headers["Content-Type"].startswith("application/x-ndjson")
        assert [json.loads(line) for line in lines.body.splitlines()] == [{"number": n} for n in range(3)]

        stream = await server.post("/invoke", {"to": 3}, headers={"Accept": "text/event-stream"})
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        *values, done = events(stream.body)
        assert [json.loads(value) for value in values] == [{"number": n} for n in range(3)]
        assert done == "[DONE]"


@pytest.mark.parametrize("returned", [False, True])
async def test_values_come_as_they_are_made(start: Any, returned: bool) -> None:
    turn = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stepwise(event: Any, context: Any) -> Iterator[int]:
        yield 1
        asyncio.run_coroutine_threadsafe(turn.wait(), loop).result()
        yield 2

    handler = (lambda event, context: stepwise(event, context)) if returned else stepwise
    async with (
        start(handler=handler) as server,
        server.client.post("/invoke", json=None) as response,
    ):
        assert await response.content.readline() == b"1\n"
        turn.set()
        assert await response.content.readline() == b"2\n"


@pytest.mark.parametrize("function", [count, count_by_return])
async def test_a_generator_that_gives_nothing_is_an_empty_stream(start: Any, function: Any) -> None:
    async with start(handler=function) as server:
        answer = await server.post("/invoke", {"to": 0})
        assert (answer.status, answer.body) == (200, b"")


async def test_bytes_alone_are_sent_as_they_are(start: Any) -> None:
    async with start(handler=lambda event, context: b"\x00\xff") as server:
        answer = await server.post("/invoke", {})
        assert answer.headers["Content-Type"].startswith("application/octet-stream")
        assert answer.body == b"\x00\xff"


async def test_no_body_is_no_event(start: Any) -> None:
    async with start(handler=lambda event, context: [event]) as server:
        assert (await server.request("POST", "/invoke")).json == [None]


async def test_an_event_that_is_no_json_is_refused(start: Any) -> None:
    async with start(handler=echo) as server:
        assert (await server.request("POST", "/invoke", data=b"{")).status == 400


async def test_what_a_function_raises_is_an_error_of_the_server(start: Any) -> None:
    def broken(event: Any, context: Any) -> Any:
        raise KeyError("missing")

    async with start(handler=broken) as server:
        answer = await server.post("/invoke", {})
        assert (answer.status, answer.error["code"]) == (500, "handler_error")
        assert "KeyError" in answer.error["message"]
        assert "Traceback" not in answer.error["message"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_function_raises_stands_in_the_log_with_its_traceback(
    start: Any, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Any, context: Any) -> Any:
        return event["missing_key"]

    async def broken_async(event: Any, context: Any) -> Any:
        return event["missing_key"]

    async with start(handler=broken_async if is_async else broken) as server:
        await server.post("/invoke", {}, headers={"x-request-id": "mine-4711"})
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "mine-4711" in record.getMessage()
        assert 'return event["missing_key"]' in caplog.text


async def test_an_unknown_option_is_the_developers_error_not_the_callers(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def mistyped(event: Any, context: Any) -> Any:
        return context.model.generate("x", max_token=1).text

    async with start(handler=mistyped) as server:
        answer = await server.post("/invoke", {})
        assert (answer.status, answer.error["code"]) == (500, "handler_error")
        assert "max_token=1" in caplog.text


async def test_a_function_can_refuse_its_event(start: Any) -> None:
    def picky(event: Any, context: Any) -> Any:
        raise RequestError("text is missing", param="text")

    async with start(handler=picky) as server:
        answer = await server.post("/invoke", {})
        assert (answer.status, answer.error["param"]) == (400, "text")


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
async def test_what_is_raised_in_mid_stream_is_its_last_item(start: Any, accept: str) -> None:
    def breaking(event: Any, context: Any) -> Iterator[int]:
        yield 1
        raise ValueError("enough")

    async with start(handler=breaking) as server:
        answer = await server.post("/invoke", {}, headers={"Accept": accept})
        items = events(answer.body) if "event" in accept else answer.body.decode().splitlines()
        assert items[0] == "1"
        assert "enough" in json.loads(items[1])["error"]["message"]
        assert len(items) == 2


async def test_a_disconnect_cancels_the_invocation(start: Any) -> None:
    cancelled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def endless(event: Any, context: Any) -> Iterator[int]:
        try:
            while not context.cancelled:
                yield 1
        finally:
            loop.call_soon_threadsafe(cancelled.set)

    async with start(handler=endless) as server:
        async with server.client.post("/invoke", json=None) as response:
            await response.content.readline()
            response.close()
        await cancelled.wait()
        await server.eventually(lambda: len(server.service.in_flight) == 0)


async def test_an_invocation_has_a_deadline(start: Any) -> None:
    async def slow(event: Any, context: Any) -> None:
        await asyncio.sleep(60)

    async with start(handler=slow, limits=Limits(request_timeout_s=0.05)) as server:
        answer = await server.post("/invoke", {})
        assert (answer.status, answer.error["code"]) == (504, "request_timeout")


async def test_a_function_uses_the_model_that_is_served(start: Any) -> None:
    def generate(event: Any, context: Any) -> Any:
        return context.model.generate(event, max_tokens=4, temperature=0, ignore_eos=True).to_dict()

    async with start(handler=generate) as server:
        invoked = (await server.post("/invoke", "Once")).json
        asked = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        assert invoked["text"] == (await server.post("/v1/completions", asked)).json["choices"][0]["text"]


async def test_without_a_function_the_route_says_how_to_have_one(start: Any) -> None:
    async with start() as server:
        answer = await server.post("/invoke", {})
        assert (answer.status, answer.error["code"]) == (404, "no_handler")
        assert "--handler" in answer.error["message"]
