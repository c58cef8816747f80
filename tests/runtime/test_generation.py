"""The handle on a sequence: order of events, callbacks, threads."""

import threading

import pytest
from tests.support.load import patience_s

from teneral.runtime.engine.generation import Generation
from teneral.runtime.errors import ModelError
from teneral.runtime.step.requests import FinishReason, GenerationEvent, GenerationRequest

REQUEST = GenerationRequest("r", (1,))
TIMEOUT_S = patience_s(30)


def event(number, finish=None):
    return GenerationEvent(str(number), (number,), finish_reason=finish)


def test_events_can_be_read_more_than_once_and_while_they_come():
    generation = Generation(REQUEST)
    generation.emit(event(1))
    reading = generation.events(TIMEOUT_S)
    assert next(reading).text == "1"
    generation.emit(event(2, FinishReason.STOP))
    assert [each.text for each in reading] == ["2"]
    assert [each.text for each in generation] == ["1", "2"]


def test_the_result_is_all_events_together():
    generation = Generation(REQUEST)
    for each in (event(1), event(2), event(3, FinishReason.LENGTH)):
        generation.emit(each)
    result = generation.result()
    assert (result.text, result.tokens, result.finish_reason) == ("123", (1, 2, 3), FinishReason.LENGTH)


def test_the_result_says_how_many_tokens_were_drafted_and_what_became_of_proposals():
    generation = Generation(REQUEST)
    generation.emit(GenerationEvent("ab", (1, 2), num_drafted=2))
    generation.emit(GenerationEvent("cd", (3, 4), num_drafted=1, num_accepted=3, num_rejected=1))
    generation.emit(GenerationEvent("", (5,), num_accepted=1, finish_reason=FinishReason.STOP))
    result = generation.result()
    assert (result.num_drafted, result.num_accepted, result.num_rejected) == (3, 4, 1)


def test_only_the_first_end_counts():
    ends = []
    generation = Generation(REQUEST, on_end=lambda _, reason: ends.append(reason))
    assert generation.emit(event(1, FinishReason.STOP))
    assert not generation.emit(event(2))
    generation.cancel()
    assert ends == [FinishReason.STOP]
    assert len(list(generation)) == 1


def test_an_error_is_raised_by_the_result():
    generation = Generation(REQUEST)
    error = ModelError("broken")
    generation.emit(GenerationEvent("", (), finish_reason=FinishReason.ERROR, error=error))
    with pytest.raises(ModelError, match="broken"):
        generation.result()


def test_a_callback_that_cancels_sees_the_cancellation_after_it_returns():
    seen = []

    def on_event(each):
        seen.append(("begin", each.finish_reason))
        if each.finish_reason is None:
            generation.cancel()
        seen.append(("end", each.finish_reason))

    generation = Generation(REQUEST, on_event)
    generation.emit(event(1))
    cancelled = FinishReason.CANCELLED
    assert seen == [("begin", None), ("end", None), ("begin", cancelled), ("end", cancelled)]


def test_a_cancellation_does_not_wait_for_a_callback_that_is_busy():
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def on_event(each):
        seen.append(each.finish_reason)
        inside.set()
        leave.wait(TIMEOUT_S)

    generation = Generation(REQUEST, on_event)
    engine = threading.Thread(target=generation.emit, args=(event(1),))
    engine.start()
    assert inside.wait(TIMEOUT_S)
    generation.cancel()
    assert generation.ended
    assert seen == [None], "the callback was entered twice at once"
    leave.set()
    engine.join(TIMEOUT_S)
    assert seen == [None, FinishReason.CANCELLED]


def test_a_callback_that_raises_at_the_last_event_changes_nothing(caplog):
    def on_event(each):
        raise ValueError("no")

    generation = Generation(REQUEST, on_event)
    generation.emit(event(1, FinishReason.STOP))
    assert generation.result().finish_reason is FinishReason.STOP
    assert "on_event raised" in caplog.text


def test_events_of_many_threads_come_in_one_order_with_one_end():
    seen = []
    generation = Generation(REQUEST, seen.append)
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait(TIMEOUT_S)
        for _ in range(50):
            generation.emit(event(number))
        generation.emit(event(number, FinishReason.STOP))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert seen == list(generation)
    assert [each.finish_reason is None for each in seen] == [True] * (len(seen) - 1) + [False]
