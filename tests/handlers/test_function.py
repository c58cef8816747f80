from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from contextlib import aclosing

import numpy as np
import pytest
from tests.support.load import patience_s
from tests.support.small_host import SENTENCE

from teneral.handlers.function.handler import MAX_AHEAD, Handler, HandlerKind, run
from teneral.runtime.errors import CancelledError, CapacityError, HandlerError, RequestError


@pytest.fixture
def handlers():
    """Makes handlers that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(function):
            handler = Handler(function)
            stack.callback(handler.close)
            return handler

        yield make


async def results(handler, event, context):
    return [value async for value in run(handler, event, context)]


async def until(condition):
    async with asyncio.timeout(patience_s(10)):
        while not condition():
            await asyncio.sleep(0.005)


# What a handler may be.


def plain(event, context):
    return {"event": event}


def generator(event, context):
    yield from event


async def coroutine(event, context):
    await asyncio.sleep(0)
    return {"event": event}


async def async_generator(event, context):
    for value in event:
        await asyncio.sleep(0)
        yield value


class Callable:
    async def __call__(self, event, context):
        return event

    def method(self, event, context):
        yield event


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (plain, HandlerKind.SYNC),
        (generator, HandlerKind.GENERATOR),
        (coroutine, HandlerKind.ASYNC),
        (async_generator, HandlerKind.ASYNC_GENERATOR),
        (Callable(), HandlerKind.ASYNC),
        (Callable().method, HandlerKind.GENERATOR),
        (functools.partial(lambda more, event, context: event, 1), HandlerKind.SYNC),
        (functools.partial(async_generator), HandlerKind.ASYNC_GENERATOR),
    ],
)
def test_a_handlers_kind_is_seen(function, kind):
    assert Handler(function).kind is kind


@pytest.mark.parametrize("function", [plain, coroutine])
async def test_a_function_gives_one_value(handlers, context, function):
    assert await results(handlers(function), [1], context) == [{"event": [1]}]


@pytest.mark.parametrize("function", [generator, async_generator])
async def test_a_generator_gives_any_number_of_values(handlers, context, function):
    assert await results(handlers(function), [], context) == []


@pytest.mark.parametrize("function", [generator, async_generator])
async def test_many_values_keep_their_order(handlers, context, function):
    values = list(range(5 * MAX_AHEAD))
    assert await results(handlers(function), values, context) == values


async def test_a_function_may_return_a_stream_of_the_model(handlers, context):
    pieces = await results(
        handlers(lambda event, context: context.model.stream("x", temperature=0)), {}, context
    )
    assert len(pieces) > 1
    assert "".join(pieces) == SENTENCE


async def test_an_async_function_may_return_a_stream_of_the_model(handlers, context):
    async def function(event, context):
        return await context.model.astream("x", temperature=0)

    assert "".join(await results(handlers(function), {}, context)) == SENTENCE


async def test_a_list_is_one_value_not_many(handlers, context):
    assert await results(handlers(lambda event, context: [1, 2]), {}, context) == [[1, 2]]


# Where it runs.


def blocks(event, context):
    event["entered"].set()
    event["go"].wait(patience_s(10))
    return threading.current_thread().name


async def blocks_its_loop(event, context):
    return blocks(event, context)


@pytest.mark.parametrize("function", [blocks, blocks_its_loop])
async def test_a_handler_that_blocks_does_not_block_who_asked(handlers, context, function):
    event = {"entered": threading.Event(), "go": threading.Event()}
    task = asyncio.create_task(results(handlers(function), event, context))
    await until(event["entered"].is_set)  # this loop runs, although the handler's thread does not
    event["go"].set()
    (name,) = await task
    assert name != threading.current_thread().name


async def test_async_invocations_share_a_loop_so_that_their_clients_stay_usable(handlers, make_context):
    seen = []

    async def function(event, context):
        seen.append(asyncio.get_running_loop())

    handler = handlers(function)
    await results(handler, 1, make_context())
    await results(handler, 2, make_context())
    assert seen[0] is seen[1]
    assert seen[0] is not asyncio.get_running_loop()


async def test_an_async_generator_runs_in_one_task(handlers, context):
    async def function(event, context):
        async with asyncio.timeout(
            patience_s(10)
        ):  # raises when it is left in another task than it was entered in
            for _ in range(3):
                yield asyncio.current_task().get_name()

    assert len(set(await results(handlers(function), {}, context))) == 1


async def test_two_invocations_run_side_by_side(handlers, make_context):
    meeting = threading.Barrier(2, timeout=patience_s(10))
    handler = handlers(lambda event, context: meeting.wait() >= 0)
    both = await asyncio.gather(results(handler, 1, make_context()), results(handler, 2, make_context()))
    assert both == [[True], [True]]


async def test_context_variables_of_the_caller_are_there(handlers, context):
    variable = contextvars.ContextVar("variable")
    variable.set("seen")
    assert await results(handlers(lambda event, context: variable.get()), {}, context) == ["seen"]


async def test_a_handler_waits_when_its_reader_does(handlers, context):
    made = []

    def function(event, context):
        for number in range(1000):
            made.append(number)
            yield number

    async with aclosing(run(handlers(function), {}, context)) as values:
        assert await anext(values) == 0
        await until(lambda: len(made) > MAX_AHEAD)
        await asyncio.sleep(0.05)
        assert len(made) <= MAX_AHEAD + 3


# What may come out.


@pytest.mark.parametrize("value", [None, 1, 1.5, "text", b"bytes", {"a": [True, None]}, [], ""])
async def test_json_and_bytes_come_out_as_they_are(handlers, context, value):
    assert await results(handlers(lambda event, context: value), {}, context) == [value]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.zeros(2), "numpy.ndarray"),
        ({"deep": [{"down": {1, 2}}]}, "set"),
        (object(), "object"),
        ({"a": b"bytes"}, "bytes"),
        (float("nan"), "not JSON"),
        ({(1, 2): 3}, "not JSON"),
        ("half of a pair: \ud83d", "not JSON"),
        ({"text": "half of a pair: \ud83d"}, "not JSON"),
        (Callable(), "Callable"),
    ],
)
async def test_a_value_that_is_not_json_is_refused_by_its_type(handlers, context, value, named):
    with pytest.raises(HandlerError, match=named):
        await results(handlers(lambda event, context: value), {}, context)


async def test_a_value_that_holds_itself_is_refused(handlers, context):
    value = []
    value.append(value)
    with pytest.raises(HandlerError, match="not JSON"):
        await results(handlers(lambda event, context: value), {}, context)


async def test_a_coroutine_from_a_plain_function_is_refused(handlers, context):
    with pytest.raises(HandlerError, match="coroutine"):
        await results(handlers(lambda event, context: coroutine(event, context)), {}, context)


async def test_values_before_the_wrong_one_come_out(handlers, context):
    def function(event, context):
        yield "right"
        yield object()

    values = run(handlers(function), {}, context)
    assert await anext(values) == "right"
    with pytest.raises(HandlerError, match="object"):
        await anext(values)


# What goes wrong inside.


def raises(event, context):
    raise event


async def raises_async(event, context):
    raise event


def raises_later(event, context):
    yield 1
    raise event


async def raises_later_async(event, context):
    yield 1
    raise event


RAISING = [raises, raises_async, raises_later, raises_later_async]


@pytest.mark.parametrize("function", RAISING)
async def test_an_exception_is_reported_and_kept_as_the_cause(handlers, context, function):
    with pytest.raises(HandlerError, match="raised ValueError: no good") as caught:
        await results(handlers(function), ValueError("no good"), context)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("function", RAISING)
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
async def test_nothing_that_a_handler_raises_ends_the_process(
    handlers, context, make_context, function, error
):
    handler = handlers(function)
    with pytest.raises((HandlerError, CancelledError)):
        await results(handler, error, context)
    with pytest.raises(HandlerError, match="ValueError"):
        await results(handler, ValueError(), make_context())  # it still serves


@pytest.mark.parametrize("function", RAISING)
@pytest.mark.parametrize("error", [RequestError("no", param="x"), CapacityError("full")])
async def test_errors_of_teneral_pass_through(handlers, context, function, error):
    with pytest.raises(type(error)) as caught:
        await results(handlers(function), error, context)
    assert caught.value is error


async def test_a_very_long_message_is_cut(handlers, context):
    with pytest.raises(HandlerError) as caught:
        await results(handlers(raises), ValueError("x" * 10**6), context)
    assert len(caught.value.message) < 2000


# When it ends before its time.


@pytest.mark.parametrize("function", [generator, async_generator])
async def test_leaving_early_cancels_the_context(handlers, context, function):
    async with aclosing(run(handlers(function), range(1000), context)) as values:
        assert await anext(values) == 0
        assert not context.cancelled
    assert context.cancelled


async def test_a_generator_whose_reader_left_runs_its_finally(handlers, context):
    ended = threading.Event()

    def function(event, context):
        try:
            yield from range(1000)
        finally:
            ended.set()

    async with aclosing(run(handlers(function), {}, context)) as values:
        await anext(values)
    await until(ended.is_set)


async def test_a_coroutine_whose_reader_left_is_cancelled(handlers, context):
    ended = threading.Event()

    async def function(event, context):
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with aclosing(run(handlers(function), {}, context)) as values:
        await anext(values)
    await until(ended.is_set)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_leaving_early_stops_the_generation(host, handlers, context, kind):
    host.model.gate.clear()

    async def function_async(event, context):
        return (await context.model.agenerate("x")).text

    handler = handlers(
        function_async if kind == "async" else lambda event, context: context.model.generate("x").text
    )
    task = asyncio.create_task(results(handler, {}, context))
    await until(lambda: host.real_engine.statistics().running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    host.model.gate.set()
    await until(lambda: host.real_engine.statistics().running == 0)
    assert host.real_engine.statistics().output_tokens_total <= 1


@pytest.mark.parametrize("function", [blocks, blocks_its_loop])
async def test_the_deadline_ends_the_wait_for_a_handler(handlers, make_context, function):
    event = {"entered": threading.Event(), "go": threading.Event()}
    with pytest.raises(CancelledError, match="deadline"):
        await results(handlers(function), event, make_context(timeout_s=0.1))
    event["go"].set()


async def test_what_a_handler_left_running_ends_with_it(host, handlers, context):
    host.model.gate.clear()

    def function(event, context):
        context.model.stream("x")  # never read, never closed

    assert await results(handlers(function), {}, context) == [None]
    host.model.gate.set()
    await until(lambda: host.real_engine.statistics().running == 0)


async def test_closing_a_handler_ends_its_coroutines(context):
    handler = Handler(blocked := Blocked())
    task = asyncio.create_task(results(handler, {}, context))
    await until(blocked.entered.is_set)
    await asyncio.to_thread(handler.close)
    with pytest.raises(CancelledError, match="was cancelled"):
        await task
    handler.close()  # again: nothing happens


class Blocked:
    def __init__(self):
        self.entered = threading.Event()

    async def __call__(self, event, context):
        self.entered.set()
        await asyncio.sleep(60)


def test_a_handler_whose_reader_is_gone_with_its_loop_ends(host, make_context):
    ended = threading.Event()

    def function(event, context):
        try:
            yield from range(100_000)
        finally:
            ended.set()

    async def read_one():
        return await anext(run(Handler(function), {}, make_context()))

    assert asyncio.run(read_one()) == 0
    assert ended.wait(patience_s(10))


async def test_an_exception_that_cannot_even_say_what_it_is_ends_the_invocation(handlers, context):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def handler(event, context):
        raise Mute

    with pytest.raises(HandlerError, match=r"raised Mute: \(its text raises RuntimeError\)"):
        await results(handlers(handler), None, context)
