from __future__ import annotations

import pytest

from teneral.handlers.function.handler import load_handler, run
from teneral.runtime.errors import ContextLengthError, RequestError


@pytest.fixture
def embed(make_context):
    handler = load_handler("teneral.handlers.embed:handler")

    async def invoke(event):
        return [value async for value in run(handler, event, make_context())]

    yield invoke
    handler.close()


async def test_each_text_gets_a_vector(embed, context):
    (answer,) = await embed({"input": ["a", "a b c"]})
    lengths = [len(await context.model.atokenize(text)) for text in ("a", "a b c")]
    assert answer["embeddings"] == [[length, 0.0] for length in lengths]
    assert (answer["model"], answer["dimensions"]) == ("small", 2)


async def test_one_text_may_stand_alone(embed):
    (answer,) = await embed({"input": "a"})
    assert len(answer["embeddings"]) == 1


@pytest.mark.parametrize("event", [None, [], {}, {"input": "a", "more": 1}, {"input": 1}, {"input": []}])
async def test_an_invalid_event_is_refused(embed, event):
    with pytest.raises(RequestError):
        await embed(event)


async def test_a_text_that_is_too_long_is_refused(embed):
    with pytest.raises(ContextLengthError):
        await embed({"input": "a" * 1000})
