"""OpenAI's own client against this server, with its strict validation of responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.support.http_server import Server
from tests.support.instances import TinyParts

from teneral.loader.errors import NotFoundError
from teneral.runtime.errors import ModelError

MODEL = "tiny/model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 8,
    "extra_body": {"ignore_eos": True},
}


def client_of(server: Server, *, strict: bool = True, api_key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, _strict_response_validation=strict
    )


@pytest.fixture
async def client(start: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with start() as server, client_of(server) as client:
        yield client


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=HELLO, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


async def test_a_streamed_chat_with_its_usage(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=HELLO, **GREEDY)
    stream = await client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


async def test_the_clients_own_stream_helper(client: openai.AsyncOpenAI) -> None:
    # Any byte ends the text: the helper raises for one that is cut off by max_tokens.
    body = {**GREEDY, "extra_body": {"stop_token_ids": list(range(256))}}
    async with client.chat.completions.stream(messages=HELLO, **body) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert "chunk" in kinds


async def test_a_chat_with_several_choices_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        messages=HELLO, n=3, logprobs=True, top_logprobs=2, seed=1, max_tokens=5, model=MODEL
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


async def test_streamed_logprobs(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        messages=HELLO, stream=True, logprobs=True, top_logprobs=1, **GREEDY
    )
    entries = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert len(entries) == 8


async def test_a_completion_with_everything(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        prompt=["one", "two"], n=2, logprobs=2, seed=3, stop=["\n\n\n"], presence_penalty=0.5, **GREEDY
    )
    assert len(answer.choices) == 4
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 8


async def test_an_echoed_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(prompt="Once", echo=True, **GREEDY)
    assert answer.choices[0].text.startswith("Once")


async def test_a_streamed_completion(start: Any) -> None:
    """Not strict: a chunk's finish_reason is null until the last one, as OpenAI sends it, but the client's
    type has no null there.
    """
    async with start() as server, client_of(server, strict=False) as client:
        whole = await client.completions.create(prompt="Once", **GREEDY)
        stream = await client.completions.create(prompt="Once", stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "teneral"


async def test_embeddings_in_the_clients_default_encoding(start: Any, encoder_parts: TinyParts) -> None:
    """The default is base64, which the client validates before it unpacks it: so its strictness is for floats
    only.
    """
    async with start(parts=encoder_parts) as server, client_of(server) as strict:
        plain = await strict.embeddings.create(model=MODEL, input=["hello", "there"], encoding_format="float")
        async with client_of(server, strict=False) as client:
            packed = await client.embeddings.create(model=MODEL, input=["hello", "there"])
        assert [entry.index for entry in packed.data] == [0, 1]
        for one, other in zip(packed.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding)
        assert packed.usage.total_tokens > 0


async def test_an_invalid_field_is_a_bad_request(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


async def test_another_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"


async def test_a_wrong_key_is_an_authentication_error(start: Any) -> None:
    async with start(api_key="right") as server:
        async with client_of(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(server, api_key="right") as client:
            assert [model.id async for model in client.models.list()] == [MODEL]


async def test_too_much_at_once_is_a_rate_limit(start: Any) -> None:
    async with start(loaded=False, max_running=1, max_queued=1) as server, client_of(server) as client:
        waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt=["a", "b"]))
        await server.eventually(lambda: server.service.admission.num_waiting == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt="c")
        server.instance.let_in()
        assert len((await waiting).choices) == 2
        assert caught.value.response.headers["retry-after"]


async def test_a_failed_load_is_a_server_error(start: Any) -> None:
    async with start(loaded=False) as server, client_of(server) as client:
        server.instance.engine.set_exception(NotFoundError("no such object"))
        server.instance.tokenizer.set_exception(NotFoundError("no such object"))
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 503


async def test_a_failure_in_mid_stream_is_an_api_error(start: Any) -> None:
    async with start() as server, client_of(server) as client:
        server.instance.model.step_s = 0.02
        body = {**GREEDY, "max_tokens": 400}
        stream = await client.chat.completions.create(messages=HELLO, stream=True, **body)
        await anext(stream)
        server.instance.model.failure = ModelError("a layer broke")
        with pytest.raises(openai.APIError, match="a layer broke"):
            async for _ in stream:
                pass
