"""The header `Deadline-Ms`: how long a caller still waits, and that nothing is done for it afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.http_server import events
from tests.support.instances import TinyParts
from tests.support.load import patience_s

from teneral.handlers.http.limits import Limits

LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}
# Time for a request to reach the engine, whatever else the machine does, and for its first tokens.
ENOUGH_MS = int(1000 * patience_s(0.5))


def within(milliseconds: object) -> dict[str, Any]:
    return {"headers": {"Deadline-Ms": str(milliseconds)}}


@pytest.mark.parametrize("given", ["", "-1", "1.5", "1e3", "soon", "0x10", "+5", "86400001", "9" * 40, "１"])
async def test_an_invalid_deadline_is_refused_by_name(start: Any, given: str) -> None:
    async with start() as server:
        answer = await server.post("/v1/completions", LONG, headers={"Deadline-Ms": given})
        assert (answer.status, answer.error["param"]) == (400, "Deadline-Ms")


async def test_two_deadlines_are_refused(start: Any) -> None:
    async with start() as server:
        headers = [("Deadline-Ms", "5"), ("Deadline-Ms", "6")]
        assert (await server.post("/v1/completions", LONG, headers=headers)).status == 400


async def test_a_deadline_that_has_passed_is_answered_before_any_work(start: Any) -> None:
    async with start() as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/invoke"):
            answer = await server.request("POST", path, data=b"not even JSON", **within(0))
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded"), path
        assert server.instance.engine.result().statistics().ended_total == {}


async def test_a_request_that_ends_in_time_is_answered_as_ever(start: Any) -> None:
    async with start() as server:
        answer = await server.post("/v1/completions", {**LONG, "max_tokens": 2}, **within(86_400_000))
        assert answer.status == 200


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)])
async def test_a_generation_ends_with_its_callers_deadline(start: Any, path: str, body: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        answer = await server.post(path, body, **within(ENOUGH_MS))
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert f"{ENOUGH_MS} ms" in answer.error["message"]
        server.instance.model.release()
        await server.eventually(lambda: server.running() == 0)
        statistics = server.instance.engine.result().statistics()
        assert statistics.ended_total == {"cancelled": 1}
        assert statistics.free_blocks == statistics.num_blocks


async def test_a_stream_ends_with_an_error_event(start: Any) -> None:
    async with start() as server:
        server.instance.model.step_s = 0.02
        async with server.stream("/v1/completions", LONG, **within(ENOUGH_MS)) as response:
            assert response.status == 200
            begun = await response.content.readuntil(b"\n\n")
            server.instance.model.hold()
            items = events(begun + await response.read())
        server.instance.model.release()
        assert len(items) > 1
        assert json.loads(items[-1])["error"]["code"] == "deadline_exceeded"
        assert 'requests_total{route="/v1/completions",status="504"} 1.0' in server.metrics_text()


async def test_the_engine_makes_no_step_more_once_a_deadline_has_passed(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        waiting = asyncio.create_task(server.post("/v1/completions", LONG, **within(ENOUGH_MS)))
        await server.eventually(lambda: server.running() == 1)
        assert (await waiting).status == 504
        server.instance.model.release()
        await server.eventually(lambda: server.running() == 0)
        assert server.instance.engine.result().statistics().steps_total == 1  # the one that was under way


async def test_who_still_waits_in_the_queue_leaves_it_unworked(start: Any) -> None:
    async with start(max_running=1) as server:
        engine = server.instance.engine.result()
        server.instance.model.hold()
        first = asyncio.create_task(server.post("/v1/completions", {**LONG, "max_tokens": 2}))
        await server.eventually(lambda: server.running() == 1)
        queued = asyncio.create_task(server.post("/v1/completions", LONG, **within(ENOUGH_MS)))
        await server.eventually(lambda: server.queued() == 1)
        assert (await queued).status == 504
        assert server.queued() == 0  # at once, while the step goes on
        server.instance.model.release()
        assert (await first).status == 200
        assert engine.statistics().output_tokens_total == 2
        assert engine.statistics().prompt_tokens_total == 4  # "Once", of the first


async def test_a_deadline_counts_while_weights_arrive_and_the_servers_limit_does_not(start: Any) -> None:
    async with start(loaded=False, limits=Limits(request_timeout_s=0.05)) as server:
        answer = await server.post("/v1/completions", LONG, **within(200))
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert server.service.admission.num_waiting == 0


async def test_a_deadline_counts_while_the_body_arrives(start: Any) -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with start() as server:
        answer = await server.request("POST", "/v1/completions", data=stalling(), **within(50))
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert server.service.admission.body_bytes == 0


@pytest.mark.parametrize(("deadline_ms", "code"), [(60_000, "request_timeout"), (100, "deadline_exceeded")])
async def test_the_smaller_of_the_callers_and_the_servers_limit_counts(
    start: Any, deadline_ms: int, code: str
) -> None:
    async def forever(event: Any, context: Any) -> None:
        await asyncio.sleep(60)

    limit_s = 0.1 if code == "request_timeout" else 60.0
    async with start(limits=Limits(request_timeout_s=limit_s), handler=forever) as server:
        server.instance.model.step_s = 0.02
        for path in ("/v1/completions", "/invoke"):
            answer = await server.post(path, LONG, **within(deadline_ms))
            assert (answer.status, answer.error["code"]) == (504, code), path


async def test_embeddings_have_a_deadline_too(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts, loaded=False) as server:
        answer = await server.post("/v1/embeddings", {"input": ["a"] * 50}, **within(50))
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


async def test_a_function_sees_the_deadline_of_who_calls_it(start: Any) -> None:
    def tell(event: Any, context: Any) -> Any:
        return {"remaining_s": context.remaining_time_s(), "has_deadline": context.deadline is not None}

    async with start(handler=tell, limits=Limits(request_timeout_s=60)) as server:
        assert 55 < (await server.post("/invoke", {})).json["remaining_s"] <= 60
        reply = (await server.post("/invoke", {}, **within(30_000))).json
        assert 20 < reply["remaining_s"] <= 30
        assert reply["has_deadline"]


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
async def test_a_functions_stream_ends_with_an_error_item(start: Any, accept: str) -> None:
    def endless(event: Any, context: Any) -> Iterator[int]:
        yield 1
        context.model.generate("Once", max_tokens=400, ignore_eos=True)

    async with start(handler=endless) as server:
        server.instance.model.hold()
        headers = {"Accept": accept, "Deadline-Ms": str(ENOUGH_MS)}
        try:
            answer = await server.post("/invoke", {}, headers=headers)
        finally:
            server.instance.model.release()
        items = events(answer.body) if "event" in accept else answer.body.decode().splitlines()
        assert items[0] == "1"
        assert json.loads(items[-1])["error"]["code"] == "deadline_exceeded"
        await server.eventually(lambda: server.running() == 0)


async def test_every_route_that_does_work_has_deadlines(start: Any) -> None:
    async with start(handler=lambda event, context: event) as server:
        paths = server.post_paths()
        assert "/invoke" in paths
        for path in paths:
            answer = await server.request("POST", path, **within(0))
            assert answer.status == 504, path
            assert (await server.request("POST", path, **within("soon"))).status == 400, path
