"""OpenAI's own client: tools, streams of calls, parsed answers and reasoning, with its strict validation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from tests.support.chat_families import scripted

MODEL = "tiny/model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo","days":2}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> AsyncIterator[Any]:
    async with start(parts=chat_parts("reasoning")) as server:
        yield server


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_a_call_and_its_result(server: Any, client: openai.AsyncOpenAI) -> None:
    with scripted(server, f"Hm.\n</think>\n\n{CALL}"):
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[TOOL], temperature=0, max_tokens=200
        )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sun."}
    with scripted(server, "Sure.</think>It is sunny."):
        messages: list[Any] = [*HELLO, choice.message, result]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], temperature=0, max_tokens=200
        )
    assert answer.choices[0].message.content == "It is sunny."


async def test_the_clients_stream_helper_parses_strict_calls(server: Any, client: openai.AsyncOpenAI) -> None:
    with scripted(server, f"Hm.</think>{CALL}"):
        async with client.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=[TOOL], temperature=0, max_tokens=200
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.tool_calls is not None
    parsed = final.choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed == Weather(city="Oslo", days=2)


async def test_a_required_call_is_parsed_whatever_the_model_says(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=300,
        parallel_tool_calls=False,
        seed=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.tool_calls
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function"
    Weather.model_validate_json(call.function.arguments)


async def test_parsed_answers_behind_reasoning(server: Any, client: openai.AsyncOpenAI) -> None:
    with scripted(server, 'Hm.</think>{"city":"Rome","days":1}'):
        answer = await client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Weather, temperature=0, max_tokens=200
        )
    assert answer.choices[0].message.parsed == Weather(city="Rome", days=1)


async def test_what_is_refused_names_its_field(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=HELLO, tool_choice="required")
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=HELLO, web_search_options={"search_context_size": "low"}
        )
    assert caught.value.param == "web_search_options"
