from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time

import numpy as np
import pytest
from tests.support.drafting import tell_of_drafts
from tests.support.inspection import replace_lock
from tests.support.load import patience_s
from tests.support.small_host import SENTENCE

from teneral.handlers.function.context import Context
from teneral.handlers.function.lifetime import Lifetime
from teneral.handlers.http.logs import JsonLines
from teneral.runtime.errors import (
    CancelledError,
    CapacityError,
    ContextLengthError,
    HandlerError,
    ModelError,
    RequestError,
)
from teneral.runtime.step.requests import FinishReason


def in_a_thread(function):
    """Run it in a thread of its own; returns a function that waits for its result or raises its error."""
    outcome = {}

    def target():
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target)
    thread.start()

    def join():
        thread.join(patience_s(20))
        assert not thread.is_alive()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    return join


def until(condition):
    deadline_s = time.monotonic() + patience_s(10)
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.005)


def test_it_has_the_request_and_the_session_of_the_caller(host):
    context = Context(host, request_id="r-1", session="s-7")
    assert (context.request_id, context.session, context.model.name) == ("r-1", "s-7", "small")
    assert repr(context) == "Context(request_id='r-1', model='small')"


def test_without_a_timeout_there_is_no_deadline(context):
    assert context.deadline is None
    assert context.remaining_time_s() == math.inf


def test_the_remaining_time_shrinks_to_zero_and_not_below(make_context):
    long, short = make_context(timeout_s=100.0), make_context(timeout_s=0.0)
    assert 90 < long.remaining_time_s() <= 100
    assert long.deadline == pytest.approx(time.monotonic() + 100, abs=10)
    assert short.remaining_time_s() == 0


def test_log_records_carry_the_request_id(context, caplog):
    with caplog.at_level(logging.INFO, logger="teneral.handler"):
        context.logger.info("hello %s", "there")
    (record,) = caplog.records
    assert record.getMessage() == "hello there"
    assert record.request_id == context.request_id
    assert json.loads(JsonLines().format(record))["request_id"] == context.request_id


def test_a_prompt_is_gone_on_with(context):
    completion = context.model.generate("Tell me", temperature=0)
    assert completion.text == SENTENCE
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage.prompt_tokens == len(context.model.tokenize("Tell me"))
    assert (
        completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )
    assert completion.to_dict()["usage"] == {
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
    }


def test_messages_are_rendered_by_the_chat_template(context):
    completion = context.model.generate([{"role": "user", "content": "Tell me"}], temperature=0)
    prompt = context.model.tokenize("User: Tell me\n\nAssistant:", add_special_tokens=False)
    assert completion.text == SENTENCE
    assert completion.usage.prompt_tokens == len(prompt)


def test_max_tokens_and_stop_strings_end_a_generation(context):
    short = context.model.generate("x", temperature=0, max_tokens=2)
    assert (short.finish_reason, short.usage.completion_tokens) == (FinishReason.LENGTH, 2)
    stopped = context.model.generate("x", temperature=0, stop=" quickly")
    assert stopped.text == " café dragonflies"


def test_a_stream_gives_the_same_text_in_pieces_and_then_the_whole(context):
    with context.model.stream("x", temperature=0) as stream:
        pieces = list(stream)
    assert len(pieces) > 3
    assert all(pieces)
    assert "".join(pieces) == stream.completion.text == SENTENCE


def test_a_stream_says_how_many_of_the_tokens_read_so_far_were_drafted(host, context):
    tell_of_drafts(host.real_engine, drafted=2)
    with context.model.stream("x", temperature=0, first_token="draft") as stream:
        assert stream.drafted_tokens == 0
        counts = [stream.drafted_tokens for _ in stream]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == stream.completion.usage.drafted_tokens == 2


def test_by_default_no_token_is_drafted(host, context):
    requests = tell_of_drafts(host.real_engine, drafted=2)
    completion = context.model.generate("x", temperature=0)
    assert [request.first_token for request in requests] == ["exact"]
    assert completion.usage.drafted_tokens == 0
    assert "drafted_tokens" not in completion.to_dict()["usage"]


def test_what_was_read_before_is_part_of_the_whole(context):
    stream = context.model.stream("x", temperature=0)
    first = next(stream)
    assert stream.read().text.startswith(first)
    assert stream.read().text == SENTENCE  # reading again changes nothing


def test_the_whole_is_not_there_before_the_end(context):
    with context.model.stream("x") as stream, pytest.raises(HandlerError, match="not been read"):
        _ = stream.completion


def test_leaving_a_stream_gives_its_capacity_back(host, context):
    host.model.gate.clear()
    with context.model.stream("x"):
        pass
    host.model.gate.set()
    until(lambda: host.real_engine.statistics().running == 0)
    assert host.real_engine.statistics().ended_total == {FinishReason.CANCELLED: 1}


def test_a_closed_stream_has_no_more_pieces(host, context):
    host.model.gate.clear()
    stream = context.model.stream("x")
    stream.close()
    assert list(stream) == []


def test_an_option_that_there_is_not_is_the_developers_error(context):
    with pytest.raises(HandlerError, match="temprature"):
        context.model.generate("x", temprature=1)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": "1"}, "seed"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {1: 1000}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"tools": {}}, "tools"),
        ({"template": {1: 2}}, "template"),
    ],
)
def test_an_invalid_option_is_named(context, options, param):
    with pytest.raises(RequestError) as caught:
        context.model.generate("x", **options)
    assert caught.value.param == param


def test_none_means_the_default(context):
    assert context.model.generate("x", temperature=0, stop=None, max_tokens=None, seed=None).text == SENTENCE


def test_a_logit_bias_may_have_the_strings_for_keys_that_json_has(context):
    (token,) = context.model.tokenize("!", add_special_tokens=False)
    completion = context.model.generate("x", logit_bias={str(token): 100}, temperature=0, max_tokens=0)
    assert completion.text == ""


def test_a_request_beyond_capacity_is_refused_at_once(host, context):
    host.model.gate.clear()
    running = [context.model.stream("x") for _ in range(2)]
    until(lambda: host.real_engine.statistics().running + host.real_engine.statistics().queued == 2)
    running += [context.model.stream("x") for _ in range(2)]  # these wait in the queue
    with pytest.raises(CapacityError):
        context.model.stream("x")
    for stream in running:
        stream.close()


def test_a_generation_waits_for_the_model_to_arrive(loading_host):
    context = Context(loading_host, request_id="r")
    join = in_a_thread(lambda: context.model.generate("x", temperature=0))
    loading_host.arrive()
    assert join().text == SENTENCE


def test_a_load_that_fails_fails_what_waits_for_it(loading_host):
    context = Context(loading_host, request_id="r")
    join = in_a_thread(lambda: context.model.generate("x"))
    loading_host.tokenizer.set_exception(ModelError("the tokenizer is broken"))
    with pytest.raises(ModelError, match="broken"):
        join()


def test_cancelling_wakes_a_call_that_waits_for_the_model(loading_host):
    context = Context(loading_host, request_id="r")
    join = in_a_thread(lambda: context.model.generate("x"))
    context.cancel()
    with pytest.raises(CancelledError):
        join()
    assert not loading_host.tokenizer.cancelled()  # others wait for it, too


def test_the_deadline_ends_a_call_that_waits_for_the_model(loading_host):
    context = Context(loading_host, request_id="r", timeout_s=0.05)
    with pytest.raises(CancelledError, match="deadline"):
        context.model.generate("x")


def test_cancelling_ends_a_generation_that_runs(host, context):
    host.model.gate.clear()
    join = in_a_thread(lambda: context.model.generate("x"))
    until(lambda: host.real_engine.statistics().running == 1)
    context.cancel()
    with pytest.raises(CancelledError):
        join()
    assert context.cancelled
    host.model.gate.set()
    until(lambda: host.real_engine.statistics().running == 0)


def test_the_deadline_ends_a_generation_that_runs(host, make_context):
    host.model.gate.clear()
    with pytest.raises(CancelledError, match="deadline"):
        make_context(timeout_s=0.2).model.generate("x")
    host.model.gate.set()
    until(lambda: host.real_engine.statistics().running == 0)


def test_nothing_is_begun_after_the_end(host, context):
    context.cancel()
    with pytest.raises(CancelledError):
        context.model.generate("x")
    assert host.real_engine.statistics().steps_total == 0


def test_a_callback_that_comes_too_late_is_called_at_once():
    lifetime, called = Lifetime(), threading.Event()
    lifetime.cancel()
    lifetime.on_cancel(called.set)
    assert called.is_set()


def test_a_callback_is_called_once_however_late_the_end_comes():
    """Between the registration and the look at whether it was in time."""
    lifetime, calls = Lifetime(), []

    class EndsAfterRegistration:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            replace_lock(lifetime, threading.Lock())
            lifetime.cancel()

    replace_lock(lifetime, EndsAfterRegistration())
    lifetime.on_cancel(lambda: calls.append(1))
    assert calls == [1]


async def test_the_async_forms_give_the_same(context):
    completion = await context.model.agenerate("x", temperature=0)
    pieces = [text async for text in await context.model.astream("x", temperature=0)]
    assert completion.text == "".join(pieces) == SENTENCE
    assert await context.model.atokenize("x") == context.model.tokenize("x")


async def test_the_loop_runs_on_while_a_generation_does(host, context):
    host.model.gate.clear()
    task = asyncio.create_task(context.model.agenerate("x", temperature=0))
    await asyncio.sleep(0.05)
    assert not task.done()
    host.model.gate.set()
    assert (await task).text == SENTENCE


async def test_cancelling_the_task_ends_the_generation(host, context):
    host.model.gate.clear()
    task = asyncio.create_task(context.model.agenerate("x"))
    while host.real_engine.statistics().running == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    host.model.gate.set()
    while host.real_engine.statistics().running:
        await asyncio.sleep(0.005)
    assert host.real_engine.statistics().ended_total == {FinishReason.CANCELLED: 1}


async def test_cancelling_the_context_ends_an_async_generation(host, context):
    host.model.gate.clear()
    task = asyncio.create_task(context.model.agenerate("x"))
    while host.real_engine.statistics().running == 0:
        await asyncio.sleep(0.005)
    context.cancel()
    with pytest.raises(CancelledError):
        await task


async def test_the_deadline_ends_an_async_generation(host, make_context):
    host.model.gate.clear()
    with pytest.raises(CancelledError, match="deadline"):
        await make_context(timeout_s=0.2).model.agenerate("x")


async def test_an_async_call_waits_for_the_model_and_its_end(loading_host):
    waiting = Context(loading_host, request_id="a")
    impatient = Context(loading_host, request_id="b", timeout_s=0.05)
    cancelled = Context(loading_host, request_id="c")
    task = asyncio.create_task(waiting.model.agenerate("x", temperature=0))
    other = asyncio.create_task(cancelled.model.agenerate("x"))
    with pytest.raises(CancelledError, match="deadline"):
        await impatient.model.agenerate("x")
    cancelled.cancel()
    with pytest.raises(CancelledError):
        await other
    loading_host.arrive()
    assert (await task).text == SENTENCE


async def test_a_blocking_call_from_a_coroutine_is_refused_with_its_async_form(context):
    with pytest.raises(HandlerError) as caught:
        context.model.generate("x")
    assert "agenerate" in caught.value.hint
    with pytest.raises(HandlerError):
        context.model.embed("x")


def test_each_text_gets_a_vector(context):
    vectors = context.model.embed(["a", "a b"])
    assert vectors.shape == (2, 2)
    assert vectors.dtype == np.float32
    assert vectors[:, 0].tolist() == [len(context.model.tokenize("a")), len(context.model.tokenize("a b"))]
    assert context.model.embed("a").shape == (1, 2)


@pytest.mark.parametrize("texts", [[], [1], 1, None, {"a": 1}, ["a"] * 5000])
def test_what_is_no_list_of_texts_is_refused(context, texts):
    with pytest.raises(RequestError) as caught:
        context.model.embed(texts)
    assert caught.value.param == "input"


def test_a_text_too_long_to_embed_is_named(context):
    with pytest.raises(ContextLengthError, match="input 1 has"):
        context.model.embed(["a", "b" * 100])


async def test_an_abandoned_embedding_gives_its_place_back(host, context, make_context):
    host.encoder.gate.clear()
    running = asyncio.create_task(context.model.aembed("x"))
    while host.real_embedder.statistics().batches_total + host.real_embedder.statistics().queued == 0:
        await asyncio.sleep(0.005)
    with pytest.raises(CancelledError, match="deadline"):
        await make_context(timeout_s=0.1).model.aembed("x")
    assert host.real_embedder.statistics().queued == 1
    host.encoder.gate.set()
    assert (await running).shape == (1, 2)


def test_cancelling_ends_a_blocking_embedding(host, context):
    host.encoder.gate.clear()
    join = in_a_thread(lambda: context.model.embed("x"))
    until(lambda: host.real_embedder.statistics().queued == 1)
    context.cancel()
    with pytest.raises(CancelledError):
        join()
