"""Requests that come before the weights wait for them; they fail only when the load does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from msgspec.structs import replace
from tests.support.http_server import events

from teneral.handlers.http.limits import Limits
from teneral.loader.errors import NotFoundError
from teneral.runtime.errors import ModelError
from teneral.runtime.state import Forecast, State

BODY = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
IMPATIENT = Limits(keepalive_s=0.02)


async def test_a_request_that_comes_first_is_answered_when_the_model_is_there(start: Any) -> None:
    async with start(loaded=False) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        assert not waiting.done()
        server.instance.let_in()
        answer = await waiting
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 4
        assert server.service.admission.num_waiting == 0


async def test_a_stream_gives_signs_of_life_while_weights_arrive(start: Any) -> None:
    async with start(loaded=False, limits=IMPATIENT) as server:
        server.instance.fraction = 0.43
        async with server.stream("/v1/completions", BODY) as response:
            assert response.status == 200
            first = await response.content.readuntil(b"\n\n")
            assert first == b": loading 43 %\n\n"
            server.instance.let_in()
            rest = await response.read()
        assert events(rest)[-1] == "[DONE]"
        assert len(events(rest)) > 1


async def test_a_sign_of_life_has_the_rate_and_when_the_first_token_may_come(start: Any) -> None:
    async with start(loaded=False, limits=IMPATIENT) as server:
        server.instance.fraction = 0.43
        server.instance.expected = Forecast(118.4e6, 12.3)
        async with server.stream("/v1/completions", BODY) as response:
            first = await response.content.readuntil(b"\n\n")
            assert first == b": loading 43 %, 118 MB/s, first token in about 12 s\n\n"
            server.instance.expected = Forecast(1.25e6, 0.2)
            wanted = b": loading 43 %, 1.2 MB/s, first token in about 1 s\n\n"
            while await response.content.readuntil(b"\n\n") != wanted:
                pass
            server.instance.expected = Forecast(118.4e6, 12.3, is_upper_bound=True)
            wanted = b": loading 43 %, 118 MB/s, first token within about 12 s\n\n"
            while await response.content.readuntil(b"\n\n") != wanted:
                pass
            server.instance.let_in()
            assert events(await response.read())[-1] == "[DONE]"


async def test_a_stream_that_waits_at_a_gate_says_so(start: Any) -> None:
    async with start(limits=IMPATIENT) as server:
        server.instance.model.hold()
        server.instance.fraction = 0.99
        async with server.stream("/v1/completions", BODY) as response:
            assert await response.content.readuntil(b"\n\n") == b": loading 99 %\n\n"
            server.instance.fraction = 1.0
            while await response.content.readuntil(b"\n\n") != b": working\n\n":
                pass
            server.instance.model.release()
            assert events(await response.read())[-1] == "[DONE]"


async def test_waiting_requests_are_bounded_and_the_next_one_gets_retry_after(start: Any) -> None:
    async with start(loaded=False, max_running=2, max_queued=1) as server:
        waiting = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(3)]
        await server.eventually(lambda: server.service.admission.num_waiting == 3)
        refused = await server.post("/v1/completions", BODY)
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) >= 1
        server.instance.let_in()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200, 200]


async def test_a_failed_load_answers_all_waiting_requests_with_its_error(start: Any) -> None:
    async with start(loaded=False, limits=replace(IMPATIENT, keepalive_s=60)) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.instance.fail(NotFoundError("s3://bucket/model has no manifest.json"))
        answer = await waiting
        assert answer.status == 503
        assert answer.error["code"] == "model_unavailable"
        assert "manifest.json" in answer.error["message"]


async def test_a_failed_load_is_an_error_event_in_a_stream_that_has_begun(start: Any) -> None:
    async with start(loaded=False, limits=IMPATIENT) as server:
        async with server.stream("/v1/completions", BODY) as response:
            await response.content.readuntil(b"\n\n")
            server.instance.fail(ModelError("no such architecture: Xyz"))
            last = events(await response.read())
        assert len(last) == 1
        assert json.loads(last[0])["error"]["message"] == "no such architecture: Xyz"


async def test_a_server_whose_instance_fails_ends_with_its_error(start: Any) -> None:
    failure = NotFoundError("no such bucket")
    async with start(loaded=False) as server:
        server.instance.fail(failure)
        assert await server.task is failure
        assert server.service.state is State.FAILED


async def test_an_invalid_early_request_is_refused_at_once(start: Any) -> None:
    async with start(loaded=False) as server:
        answer = await server.post("/v1/completions", {**BODY, "temperature": "hot"})
        assert (answer.status, answer.error["param"]) == (400, "temperature")


async def test_an_invalid_early_stream_still_gets_its_own_status(start: Any) -> None:
    async with start(loaded=False) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", {"prompt": "x" * 600, "stream": True}))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.instance.let_in()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_a_client_that_gives_up_while_loading_leaves_the_others_alone(start: Any) -> None:
    async with start(loaded=False) as server:
        quitter = asyncio.create_task(server.post("/v1/completions", BODY))
        stayer = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.admission.num_waiting == 2)
        quitter.cancel()
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.instance.let_in()
        assert (await stayer).status == 200
