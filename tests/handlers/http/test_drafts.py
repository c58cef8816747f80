"""Asking for tokens of the draft, and how a response tells of them: over HTTP, in front of a real engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.support.drafting import tell_of_drafts
from tests.support.http_server import events
from tests.support.instances import TinyParts

from teneral.handlers.generate import handler as generate
from teneral.handlers.openai.chat import ChatFormat
from teneral.handlers.openai.completions import CompletionFormat
from teneral.handlers.openai.prompts import ChatSettings
from teneral.handlers.openai.schemas import ChatBody, CompletionBody, Message
from teneral.runtime.step.requests import FinishReason, FirstToken, GenerationEvent

SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**SAMPLING, "prompt": "Once"}),
    ("/v1/chat/completions", {**SAMPLING, "messages": [{"role": "user", "content": "Hello"}]}),
]
DRAFT = {"teneral": {"first_token": "draft"}}
HEADER = "Teneral-Drafted-Tokens"
both_routes = pytest.mark.parametrize(("path", "body"), REQUESTS, ids=["completions", "chat"])


def engine_of(server: Any) -> Any:
    return server.instance.engine.result()


async def streamed(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await server.post(path, {**body, "stream": True})
    *chunks, done = events(answer.body)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


# -- asking


@both_routes
@pytest.mark.parametrize(
    ("default", "extras", "asked"),
    [
        ("exact", {}, "exact"),
        ("exact", {"teneral": None}, "exact"),
        ("exact", {"teneral": {}}, "exact"),
        ("exact", {"teneral": {"first_token": None}}, "exact"),
        ("exact", {"teneral": {"first_token": "draft"}}, "draft"),
        ("draft", {}, "draft"),
        ("draft", {"teneral": {"first_token": "exact"}}, "exact"),
    ],
)
async def test_a_request_says_it_or_else_the_server_does(
    start: Any, path: str, body: dict[str, Any], default: str, extras: dict[str, Any], asked: str
) -> None:
    async with start(first_token=default) as server:
        requests = tell_of_drafts(engine_of(server))
        assert (await server.post(path, {**body, "n": 2, **extras})).status == 200
        assert [request.first_token for request in requests] == [asked, asked]


@both_routes
@pytest.mark.parametrize(
    ("extras", "param"),
    [
        ({"first_token": "guess"}, "teneral.first_token"),
        ({"first_token": True}, "teneral.first_token"),
        ({"frist_token": "draft"}, "teneral.frist_token"),
        ("draft", "teneral"),
    ],
)
async def test_an_invalid_extra_is_refused_by_name(
    start: Any, path: str, body: dict[str, Any], extras: Any, param: str
) -> None:
    async with start() as server:
        refused = await server.post(path, {**body, "teneral": extras})
        assert (refused.status, refused.error["param"]) == (400, param)
        assert param in refused.error["message"]


async def test_vectors_never_come_from_a_draft(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        refused = await server.post("/v1/embeddings", {"input": "x", **DRAFT})
        assert (refused.status, refused.error["param"]) == (400, "teneral.first_token")


# -- telling


@both_routes
async def test_a_whole_response_tells_of_drafted_tokens_in_its_usage_and_a_header(
    start: Any, path: str, body: dict[str, Any]
) -> None:
    async with start() as server:
        tell_of_drafts(engine_of(server), drafted=3, accepted=2, rejected=1)
        answer = await server.post(path, {**body, "n": 2, **DRAFT})
        assert answer.json["usage"]["completion_tokens"] == 16
        assert answer.json["usage"]["completion_tokens_details"] == {
            "drafted_tokens": 6,
            "accepted_prediction_tokens": 4,
            "rejected_prediction_tokens": 2,
        }
        assert answer.headers[HEADER] == "6"
        assert "teneral" not in answer.json


@both_routes
async def test_who_asked_for_a_draft_learns_that_there_was_none(
    start: Any, path: str, body: dict[str, Any]
) -> None:
    async with start() as server:
        answer = await server.post(path, {**body, **DRAFT})
        assert set(answer.json["usage"]["completion_tokens_details"].values()) == {0}
        assert answer.headers[HEADER] == "0"


@both_routes
async def test_an_exact_response_tells_of_proposals_and_of_no_drafted_token(
    start: Any, path: str, body: dict[str, Any]
) -> None:
    async with start() as server:
        tell_of_drafts(engine_of(server), drafted=3, accepted=5, rejected=2)
        answer = await server.post(path, body)
        assert answer.json["usage"]["completion_tokens_details"] == {
            "drafted_tokens": 0,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        }
        assert answer.headers[HEADER] == "0"


@both_routes
async def test_without_drafted_tokens_no_count_appears(start: Any, path: str, body: dict[str, Any]) -> None:
    async with start() as server:
        answer = await server.post(path, body)
        assert set(answer.json["usage"]) == {
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
            "prompt_tokens_details",
        }
        assert HEADER not in answer.headers
        *chunks, last = await streamed(server, path, {**body, "stream_options": {"include_usage": True}})
        assert last["usage"] == answer.json["usage"]
        assert all("teneral" not in chunk for chunk in [*chunks, last])


@both_routes
async def test_the_chunks_of_a_stream_tell_of_their_drafted_tokens_and_the_last_of_all(
    start: Any, path: str, body: dict[str, Any]
) -> None:
    async with start() as server:
        tell_of_drafts(engine_of(server), drafted=3, accepted=1)
        asked = {**body, **DRAFT, "stream_options": {"include_usage": True}}
        *chunks, last = await streamed(server, path, asked)
        counts = [chunk["teneral"]["drafted_tokens"] for chunk in chunks if "teneral" in chunk]
        assert sum(counts) == 3
        assert "teneral" not in chunks[-1]
        assert "teneral" not in last
        assert last["usage"] == (await server.post(path, {**body, **DRAFT})).json["usage"]
        assert last["usage"]["completion_tokens_details"]["drafted_tokens"] == 3


def test_drafted_tokens_whose_text_is_held_back_count_with_that_text() -> None:
    body = CompletionBody(prompt="x", stream=True)
    fmt = CompletionFormat(body, model="m", max_sequences=1, first_token=FirstToken.DRAFT)
    assert fmt.chunks((0, GenerationEvent("", (1,), num_drafted=1))) == []
    (chunk,) = fmt.chunks((0, GenerationEvent("é", (2,), num_drafted=1)))
    assert json.loads(chunk)["teneral"] == {"drafted_tokens": 2}
    (chunk,) = fmt.chunks((0, GenerationEvent("a", (3,))))
    assert "teneral" not in json.loads(chunk)


def test_in_a_chat_they_count_with_the_text_or_with_the_end_and_never_with_the_role() -> None:
    body = ChatBody(messages=[Message(role="user", content="x")], stream=True)
    fmt = ChatFormat(body, model="m", settings=ChatSettings(first_token=FirstToken.DRAFT))
    events_of_both = [
        GenerationEvent("", (1,), num_drafted=1),
        GenerationEvent("é", (2,), num_drafted=1),
        GenerationEvent("", (3,), num_drafted=1, finish_reason=FinishReason.STOP),
    ]
    role, text, end = (json.loads(chunk) for event in events_of_both for chunk in fmt.chunks((0, event)))
    assert "teneral" not in role
    assert (text["choices"][0]["delta"], text["teneral"]) == ({"content": "é"}, {"drafted_tokens": 2})
    assert (end["choices"][0]["finish_reason"], end["teneral"]) == ("stop", {"drafted_tokens": 1})


async def test_openais_own_client_reads_it_all(start: Any) -> None:
    async with start() as server:
        tell_of_drafts(engine_of(server), drafted=3, accepted=2, rejected=1)
        asked: dict[str, Any] = {
            "model": "tiny/model",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "extra_body": {"ignore_eos": True, **DRAFT},
        }
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="-", max_retries=0, _strict_response_validation=True
        ) as client:
            raw = await client.chat.completions.with_raw_response.create(**asked)
            answer = raw.parse()
            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert raw.headers[HEADER] == "3"
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 1)
        assert details.drafted_tokens == 3
        assert sum(chunk.teneral["drafted_tokens"] for chunk in chunks if hasattr(chunk, "teneral")) == 3
        assert chunks[-1].usage.completion_tokens_details == details


async def test_a_function_asks_in_its_own_call_and_finds_the_count_in_its_usage(start: Any) -> None:
    async with start(handler=generate) as server:
        tell_of_drafts(engine_of(server), drafted=3)
        event = {**SAMPLING, "prompt": "Once"}
        drafted = await server.post("/invoke", {**event, "first_token": "draft"})
        assert drafted.json["usage"]["drafted_tokens"] == 3
        exact = await server.post("/invoke", event)
        assert set(exact.json["usage"]) == {"prompt_tokens", "completion_tokens"}
        refused = await server.post("/invoke", {**event, "first_token": "guess"})
        assert (refused.status, refused.error["param"]) == (400, "first_token")


async def test_the_servers_default_holds_for_functions_too(start: Any) -> None:
    async with start(handler=generate, first_token="draft") as server:
        requests = tell_of_drafts(engine_of(server))
        await server.post("/invoke", {**SAMPLING, "prompt": "Once"})
        await server.post("/invoke", {**SAMPLING, "prompt": "Once", "first_token": "exact"})
        assert [request.first_token for request in requests] == ["draft", "exact"]


async def test_the_counters_are_there_before_anything_was_drafted(start: Any) -> None:
    async with start() as server:
        lines = (await server.get("/metrics")).body.decode().splitlines()
        assert "teneral_drafted_tokens_total 0.0" in lines
        assert 'teneral_proposals_total{outcome="accepted"} 0.0' in lines
        assert 'teneral_proposals_total{outcome="rejected"} 0.0' in lines
