from __future__ import annotations

import asyncio
import functools
import itertools
import threading

import pytest
from tests.support.small_host import SENTENCE

from teneral.handlers.contrib.processing import handler
from teneral.handlers.function.handler import HandlerKind, kind_of
from teneral.runtime.errors import HandlerError, RequestError


def double(event, context):
    assert context.request_id
    return event * 2


async def adouble(event, context):
    await asyncio.sleep(0)
    return double(event, context)


def add_one(result, context):
    return result + 1


async def aadd_one(result, context):
    return add_one(result, context)


def one(event, context):
    return event


async def aone(event, context):
    return event


def many(event, context):
    yield event
    yield event * 10


async def amany(event, context):
    yield event
    yield event * 10


def returned_iterator(event, context):
    return iter([event, event * 10])


EXPECTED = {one: [7], aone: [7], many: [7, 61], amany: [7, 61], returned_iterator: [7, 61]}


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("pre", [double, adouble])
@pytest.mark.parametrize("post", [add_one, aadd_one])
async def test_functions_of_any_kind_stand_around_handlers_of_any_kind(invoke, function, pre, post):
    assert await invoke(handler(pre=pre, post=post)(function), 3) == EXPECTED[function]


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_a_handler_stays_of_its_kind(function):
    assert kind_of(handler(pre=double, post=add_one)(function)) is kind_of(function)
    assert kind_of(handler()(function)) is kind_of(function)


@pytest.mark.parametrize("function", [one, many])
def test_a_plain_handler_with_an_async_function_at_its_side_is_async(function):
    streams = kind_of(function) is HandlerKind.GENERATOR
    expected = HandlerKind.ASYNC_GENERATOR if streams else HandlerKind.ASYNC
    assert kind_of(handler(post=aadd_one)(function)) is expected


async def test_functions_are_applied_in_their_order(invoke):
    assert await invoke(handler(pre=[double, add_one], post=(add_one, double))(one), 3) == [16]


async def test_a_decorated_handler_can_be_decorated(invoke):
    assert await invoke(handler(post=add_one)(handler(pre=double)(one)), 3) == [7]


def test_name_and_documentation_stay():
    @handler(pre=double)
    def documented(event, context):
        """What it does."""

    assert (documented.__name__, documented.__doc__) == ("documented", "What it does.")
    assert handler(pre=double)(functools.partial(one)) is not None


async def test_a_stream_can_be_changed_as_a_whole(invoke):
    def pairs(values, context):
        for first in values:
            yield [first, next(values)]

    async def apairs(values, context):
        async for first in values:
            yield [first, await anext(values)]

    for function, post_stream in itertools.product((many, returned_iterator), (pairs, apairs)):
        assert await invoke(handler(post_stream=post_stream)(function), 1) == [[1, 10]]
    assert await invoke(handler(post_stream=apairs)(amany), 1) == [[1, 10]]


async def test_pieces_of_a_model_pass_through_as_they_come(invoke):
    @handler(post=lambda piece, context: piece.upper())
    def shout(event, context):
        return context.model.stream(event, temperature=0)

    pieces = await invoke(shout, "x")
    assert len(pieces) > 1
    assert "".join(pieces) == SENTENCE.upper()


async def test_each_function_may_use_the_calls_of_its_own_kind(invoke):
    def count(event, context):
        return {"text": event, "tokens": len(context.model.tokenize(event))}

    async def acount(event, context):
        return {"text": event, "tokens": len(await context.model.atokenize(event))}

    def generate(event, context):
        return event | {"answer": context.model.generate(event["text"], temperature=0).text}

    async def agenerate(event, context):
        return event | {"answer": (await context.model.agenerate(event["text"], temperature=0)).text}

    for pre, function in itertools.product((count, acount), (generate, agenerate)):
        assert await invoke(handler(pre=pre)(function), "x") == [
            {"text": "x", "tokens": 2, "answer": SENTENCE}
        ]


def fail(value, context):
    raise ValueError("no")


async def afail(value, context):
    raise ValueError("no")


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("failing", [fail, afail])
@pytest.mark.parametrize("where", ["pre", "post"])
async def test_an_error_names_the_function_that_raised_it(invoke, function, failing, where):
    with pytest.raises(HandlerError, match=f"{where} {failing.__name__} of {function.__name__}") as caught:
        await invoke(handler(**{where: [double, failing]})(function), 1)
    assert isinstance(caught.value.__cause__, ValueError)


def failing_stream(values, context):
    for value in values:
        yield value
        raise ValueError("no")


async def afailing_stream(values, context):
    async for value in values:
        yield value
        raise ValueError("no")


def forwarded(values, context):
    yield from values


async def aforwarded(values, context):
    async for value in values:
        yield value


def failing_values(event, context):
    yield 1
    raise KeyError("its own")


@pytest.mark.parametrize("post_stream", [failing_stream, afailing_stream])
async def test_an_error_in_the_midst_of_a_stream_names_its_function_too(invoke, post_stream):
    with pytest.raises(HandlerError, match=f"post_stream {post_stream.__name__} of many raised ValueError"):
        await invoke(handler(post_stream=post_stream)(many), 1)


@pytest.mark.parametrize("post_stream", [forwarded, aforwarded])
async def test_what_a_stream_itself_raises_is_not_its_readers_fault(invoke, post_stream):
    with pytest.raises(HandlerError, match=r"^(?!post_stream).*failing_values raised KeyError"):
        await invoke(handler(post_stream=post_stream)(failing_values), 1)


async def test_a_refusal_passes_through_as_it_is_with_a_note(invoke):
    def refuse(event, context):
        raise RequestError("too long", param="text")

    with pytest.raises(RequestError) as caught:
        await invoke(handler(pre=refuse)(one))
    assert caught.value.param == "text"
    assert caught.value.__notes__ == ["raised by pre refuse of one"]


async def test_the_handlers_own_errors_are_its_own(invoke):
    with pytest.raises(HandlerError) as caught:
        await invoke(handler(pre=double, post=add_one)(fail), 1)
    assert "post" not in caught.value.message


@pytest.mark.parametrize("post", [add_one, aadd_one])
async def test_leaving_a_stream_closes_the_handlers_own(make_context, post):
    closed = threading.Event()

    kept = []  # or the end of the last reference would close it in any case

    def count():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    def endless(event, context):
        kept.append(count())
        return kept[0]

    from teneral.handlers.function.handler import Handler, run

    decorated = Handler(handler(post=post)(endless))
    values = run(decorated, None, make_context())
    assert [await anext(values), await anext(values)] == [1, 2]
    await values.aclose()
    assert await asyncio.to_thread(closed.wait, 10)
    decorated.close()


@pytest.mark.parametrize(
    ("stages", "error_text"),
    [
        ({"pre": 5}, "is not a function"),
        ({"pre": lambda event: event}, "cannot be called"),
        ({"post": many}, "yields"),
        ({"pre": amany}, "yields"),
        ({"post_stream": aone}, "is a coroutine"),
        ({"post_stream": many, "pre": adouble}, "plain iterator"),
    ],
)
def test_functions_that_cannot_be_put_together_are_refused_at_once(stages, error_text):
    with pytest.raises(HandlerError, match=error_text):
        handler(**stages)(one)
