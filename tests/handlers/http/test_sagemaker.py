"""SageMaker's contract: /ping, /invocations, sessions; asked by its own client, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.config import Config
from tests.support.http_server import events
from tests.support.instances import TinyParts
from tests.support.sagemaker_endpoint import sagemaker_endpoint

from teneral.handlers.http.errors import expected_wait_s
from teneral.handlers.platforms import HTTP, Platform, platform_of
from teneral.runtime.errors import RequestError
from teneral.runtime.state import State

GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
SESSION = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"


def echo(event: Any, context: Any) -> Any:
    return {"event": event.decode() if isinstance(event, bytes) else event, "session": context.session}


def count(event: Any, context: Any) -> Iterator[Any]:
    yield from range(event)


async def count_async(event: Any, context: Any) -> AsyncIterator[Any]:
    for number in range(event):
        yield number


# /ping


@pytest.mark.parametrize(
    ("platform", "loading"),
    [(HTTP, 503), (platform_of("sagemaker", {}), 503), (platform_of("runpod", {}), 204)],
)
async def test_a_ping_says_whether_requests_can_be_answered(
    start: Any, platform: Platform, loading: int
) -> None:
    async with start(loaded=False, platform=platform, api_key="secret") as server:
        answer = await server.get("/ping")
        assert (answer.status, answer.body) == (loading, b"")
        assert "Retry-After" in answer.headers
        server.instance.let_in()
        server.instance.fraction = 0.5
        assert server.instance.state is State.PARTIAL
        assert (await server.get("/ping")).status == 200
        server.instance.fraction = 1.0
        answer = await server.get("/ping")
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("platform", [platform_of("sagemaker", {}), platform_of("runpod", {})])
async def test_a_ping_takes_a_server_that_drains_out_of_the_pool(start: Any, platform: Platform) -> None:
    async with start(platform=platform) as server:
        server.instance.model.hold()
        running = asyncio.create_task(server.post("/invocations", {"prompt": "Once", **GREEDY}))
        await server.eventually(lambda: server.running() == 1)
        server.stop.set()
        await server.eventually(lambda: server.service.in_flight.draining)
        assert (await server.get("/ping")).status == 503
        server.instance.model.release()
        assert (await running).status == 200


async def test_a_ping_is_answered_while_the_model_computes(start: Any) -> None:
    async with start(platform=platform_of("sagemaker", {})) as server:
        server.instance.model.hold()
        running = asyncio.create_task(server.post("/invocations", {"prompt": "Once", **GREEDY}))
        await server.eventually(lambda: server.running() == 1)
        assert (await server.get("/ping")).status == 200
        server.instance.model.release()
        assert (await running).status == 200


@pytest.mark.parametrize(
    ("fraction", "elapsed_s", "wait_s"), [(0, 9, 1), (0.5, 9, 9), (0.9, 9, 1), (0.01, 9, 30), (1, 9, 1)]
)
def test_a_server_that_loads_says_when_to_come_back(fraction: float, elapsed_s: float, wait_s: float) -> None:
    assert expected_wait_s(fraction, elapsed_s) == pytest.approx(wait_s)


# /invocations without a function


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "Once", **GREEDY}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "Hello"}], **GREEDY}, "/v1/chat/completions"),
    ],
)
async def test_a_body_of_openais_api_is_answered_as_its_route_does(
    start: Any, body: dict[str, Any], path: str
) -> None:
    async with start() as server:
        invoked = (await server.post("/invocations", body)).json
        routed = (await server.post(path, body)).json
        for answer in (invoked, routed):
            del answer["id"], answer["created"], answer["usage"]
        assert invoked == routed


async def test_an_input_is_embedded(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        answer = await server.post("/invocations", {"input": ["a", "b"]}, headers={SESSION: "ignored"})
        assert [item["index"] for item in answer.json["data"]] == [0, 1]


async def test_a_stream_comes_as_it_is_made(start: Any) -> None:
    async with start() as server, server.stream("/invocations", {"prompt": "Once", **GREEDY}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Transfer-Encoding"] == "chunked"
        first = await response.content.readuntil(b"\n\n")
        assert first.startswith(b"data: {")
        assert events(first + await response.read())[-1] == "[DONE]"


@pytest.mark.parametrize(
    "body", [{}, {"text": "x"}, {"prompt": "x", "input": "y"}, [], "x", {"prompt": "x", "teneral": 5}]
)
async def test_a_body_that_is_none_of_these_is_refused(start: Any, body: Any) -> None:
    async with start() as server:
        answer = await server.post("/invocations", body, headers={SESSION: "s"})
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


async def test_what_comes_while_the_model_loads_waits_for_it(start: Any) -> None:
    async with start(loaded=False) as server:
        answer = asyncio.create_task(server.post("/invocations", {"prompt": "Once", **GREEDY}))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.instance.let_in()
        assert (await answer).status == 200


# /invocations with a function


@pytest.mark.parametrize(
    ("content_type", "body", "event"),
    [
        ("application/json", b'{"a": 1}', {"a": 1}),
        ("application/problem+json; charset=utf-8", b"[1]", [1]),
        ("application/json", b"", None),
        ("application/jsonlines", b'{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("text/csv; charset=UTF-8", "a,ü\n".encode(), "a,ü\n"),
        ("application/octet-stream", b"plain", "plain"),
        ("image/png", b"png", "png"),
    ],
)
async def test_the_content_type_says_what_the_event_is(
    start: Any, content_type: str, body: bytes, event: Any
) -> None:
    async with start(handler=echo) as server:
        headers = {"Content-Type": content_type}
        answer = await server.request("POST", "/invocations", data=body, headers=headers)
        assert answer.json["event"] == event


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{", 400),
        ("application/jsonlines", b"{}\n{", 400),
        ("application/jsonlines", b"1\n" * 70_000, 400),
        ("application/jsonlines", (b"[" + b"[]," * 9 + b"[]]\n") * 27_000, 400),
        ("text/csv", b"\xff", 400),
        ("text/csv; charset=latin-1", b"\xff", 415),
    ],
)
async def test_a_body_that_is_not_what_it_says_is_refused(
    start: Any, content_type: str, body: bytes, status: int
) -> None:
    async with start(handler=echo) as server:
        headers = {"Content-Type": content_type}
        assert (await server.request("POST", "/invocations", data=body, headers=headers)).status == status


@pytest.mark.parametrize("function", [count, count_async])
@pytest.mark.parametrize(
    ("accept", "content_type", "body"),
    [
        ("*/*", "application/x-ndjson", b"0\n1\n"),
        ("application/json", "application/json", b"[0,1]"),
        ("application/json;q=0.5, text/plain", "application/json", b"[0,1]"),
        ("application/jsonlines", "application/jsonlines", b"0\n1\n"),
        ("text/event-stream", "text/event-stream", b"data: 0\n\ndata: 1\n\ndata: [DONE]\n\n"),
    ],
)
async def test_accept_says_how_values_come_back(
    start: Any, function: Any, accept: str, content_type: str, body: bytes
) -> None:
    async with start(handler=function) as server:
        answer = await server.post("/invocations", 2, headers={"Accept": accept})
        assert answer.headers["Content-Type"].partition(";")[0] == content_type
        assert answer.body == body


@pytest.mark.parametrize(
    ("value", "accept", "content_type", "body"),
    [
        ({"a": 1}, "application/json", "application/json", b'{"a":1}'),
        ([1], "text/plain", "application/json", b"[1]"),
        (None, "application/json", "application/json", b"null"),
        ("text", "application/json", "application/json", b'"text"'),
        ("text", "text/plain", "text/plain", b"text"),
        (b"\x89PNG", "image/png", "image/png", b"\x89PNG"),
        (b"\x89PNG", "*/*", "application/octet-stream", b"\x89PNG"),
        (b"\x89PNG", "image/*", "application/octet-stream", b"\x89PNG"),
    ],
)
async def test_accept_says_how_one_value_comes_back(
    start: Any, value: Any, accept: str, content_type: str, body: bytes
) -> None:
    async with start(handler=lambda event, context: value) as server:
        answer = await server.post("/invocations", {}, headers={"Accept": accept})
        assert answer.headers["Content-Type"].partition(";")[0] == content_type
        assert answer.body == body


async def test_a_function_sees_the_client_s_attributes_of_its_request(start: Any) -> None:
    async with start(handler=lambda event, context: dict(context.platform)) as server:
        headers = {"X-Amzn-SageMaker-Custom-Attributes": "trace=7", "X-Amzn-SageMaker-Inference-Id": "i-1"}
        answer = await server.post("/invocations", {}, headers=headers)
        assert answer.json == {"name": "sagemaker", "custom_attributes": "trace=7", "inference_id": "i-1"}


# sessions


async def test_a_session_keeps_what_was_computed_for_its_next_turn(start: Any) -> None:
    tokens = [(number * 7) % 90 for number in range(50)]
    body = {"prompt": tokens, **GREEDY}
    async with start() as server:
        first = await server.post("/invocations", body, headers={SESSION: "NEW_SESSION"})
        session = first.headers[NEW_SESSION].partition(";")[0]
        assert server.instance.engine.result().statistics().sessions == 1
        second = await server.post(
            "/invocations", {**body, "prompt": [*tokens, 5]}, headers={SESSION: session}
        )
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert NEW_SESSION not in second.headers
        assert server.instance.engine.result().statistics().sessions == 1


async def test_a_body_may_name_another_session(start: Any) -> None:
    body = {"prompt": [1] * 40, **GREEDY}
    async with start() as server:
        for extras in ({}, {"teneral": {"session": "mine"}}, {"teneral": {"tenant": "t"}}, {"teneral": None}):
            answer = await server.post("/invocations", {**body, **extras}, headers={SESSION: "theirs"})
            assert answer.status == 200
        assert server.instance.engine.result().statistics().sessions == 3


async def test_a_session_can_be_begun_and_closed_without_any_work(start: Any) -> None:
    async with start(handler=echo, session_idle_s=60) as server:
        begun = await server.post("/invocations", {"requestType": "NEW_SESSION"})
        session, expires = begun.headers[NEW_SESSION].split("; Expires=")
        assert datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) > datetime.now(UTC)
        used = await server.post("/invocations", {"x": 1}, headers={SESSION: session})
        assert used.json["session"] == session
        closed = await server.post("/invocations", {"requestType": "CLOSE"}, headers={SESSION: session})
        assert (closed.status, closed.headers[CLOSED_SESSION]) == (200, session)


@pytest.mark.parametrize("session", ["-a", "a-", "a b", "ü", "a" * 257, "a/b"])
async def test_a_session_that_cannot_be_one_is_refused(start: Any, session: str) -> None:
    async with start(handler=echo) as server:
        answer = await server.post("/invocations", {}, headers={SESSION: session})
        assert (answer.status, answer.error["param"]) == (400, SESSION)


@pytest.mark.parametrize("headers", [{}, {SESSION: "NEW_SESSION"}, {SESSION: "-"}])
async def test_only_a_session_that_is_named_is_closed(start: Any, headers: dict[str, str]) -> None:
    async with start() as server:
        assert (await server.post("/invocations", {"requestType": "CLOSE"}, headers=headers)).status == 400


# the service's own client


async def test_the_services_own_client_invokes_an_endpoint(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        if event == "refuse":
            raise RequestError("no such event")
        return {"session": context.session}

    async with start(handler=handler) as server, sagemaker_endpoint(server.url) as url:
        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=url,
            region_name="eu-central-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
            config=Config(retries={"max_attempts": 1}, proxies={}),
        )

        def invoke(**arguments: Any) -> Any:
            answer = client.invoke_endpoint(EndpointName="tiny", ContentType="application/json", **arguments)
            with answer["Body"] as body:
                return answer | {"Body": json.loads(body.read())}

        first = await asyncio.to_thread(invoke, Body=b"{}", SessionId="NEW_SESSION")
        session = first["NewSessionId"].partition(";")[0]
        assert first["Body"] == {"session": session}
        second = await asyncio.to_thread(invoke, Body=b"{}", SessionId=session)
        assert second["Body"] == {"session": session}
        assert "NewSessionId" not in second
        closed = await asyncio.to_thread(invoke, Body=b'{"requestType": "CLOSE"}', SessionId=session)
        assert closed["ClosedSessionId"] == session
        with pytest.raises(client.exceptions.ModelError) as refused:
            await asyncio.to_thread(invoke, Body=b'"refuse"')
        assert refused.value.response["OriginalStatusCode"] == 400
        client.close()
