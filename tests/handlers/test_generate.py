from __future__ import annotations

import pytest
from tests.support.drafting import tell_of_drafts
from tests.support.small_host import SENTENCE

from teneral.handlers.function.handler import load_handler, run
from teneral.runtime.errors import RequestError


@pytest.fixture
def generate(make_context):
    async def invoke(event):
        handler = load_handler("teneral.handlers.generate:handler")
        return [value async for value in run(handler, event, make_context())]

    return invoke


async def test_a_prompt_is_gone_on_with(generate):
    (answer,) = await generate({"prompt": "x", "temperature": 0})
    assert answer["text"] == SENTENCE
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 2  # <s>, x


async def test_messages_are_answered(generate):
    (answer,) = await generate(
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 1}
    )
    assert answer["finish_reason"] == "length"
    assert answer["text"]


async def test_a_stream_ends_with_what_it_took(generate):
    *pieces, last = await generate({"prompt": "x", "temperature": 0, "stream": True})
    assert "".join(piece["text"] for piece in pieces) == SENTENCE
    assert last["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] >= len(pieces)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_says_how_many_tokens_were_drafted(host, generate, stream):
    tell_of_drafts(host.real_engine, drafted=2)
    event = {"prompt": "x", "temperature": 0, "stream": stream}
    assert "drafted_tokens" not in (await generate(event))[-1]["usage"]
    assert (await generate({**event, "first_token": "draft"}))[-1]["usage"]["drafted_tokens"] == 2


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ([], ""),
        ("text", ""),
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"prompt": 1}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "first_token": "guess"}, "first_token"),
        ({"prompt": "x", "first_token": ["draft"]}, "first_token"),
    ],
)
async def test_an_invalid_event_is_refused_by_its_field(generate, event, param):
    with pytest.raises(RequestError) as caught:
        await generate(event)
    assert caught.value.param == param
