"""Batching of embedding calls over a toy encoder."""

import threading
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.load import patience_s

from teneral.loader.errors import UnavailableError
from teneral.loader.timeline import Timeline
from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.errors import (
    CapacityError,
    ContextLengthError,
    DrainingError,
    ModelError,
    RequestError,
)

TIMEOUT_S = patience_s(30)


@dataclass(frozen=True)
class ToyLimits:
    max_tokens: int
    vocab_size: int = 100


class ToyEncoder:
    """A text's embedding is (its length, the sum of its tokens, its last token)."""

    def __init__(self, max_tokens=16):
        self.config = ToyLimits(max_tokens)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = None
        self.batches = []

    def embed(self, token_lists, type_lists=None):
        self.batches.append([list(tokens) for tokens in token_lists])
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return np.array([[len(tokens), sum(tokens), tokens[-1]] for tokens in token_lists], np.float32)


class Rig:
    """An embedder over a toy; leaving it stops it."""

    def __init__(self, *, start=True, max_tokens=16, **options):
        self.model = ToyEncoder(max_tokens)
        self.embedder = Embedder(self.model, **options)
        if start:
            self.embedder.start()

    def embed(self, *texts):
        return self.embedder.embed(texts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.model.gate.set()
        assert self.embedder.stop(TIMEOUT_S)
        assert self.embedder.statistics().queued == 0


def expected(*texts):
    return np.array([[len(text), sum(text), text[-1]] for text in texts], dtype=np.float32)


def assert_embeds(future, *texts):
    embeddings = future.result(TIMEOUT_S)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, expected(*texts))


def test_each_text_gets_its_own_embedding_in_its_own_order():
    texts = [[1, 2], [3], [4, 5, 6, 7], [8, 9]]
    with Rig() as rig:
        assert_embeds(rig.embed(*texts), *texts)


def test_calls_that_wait_share_a_batch():
    with Rig(start=False) as rig:
        futures = [rig.embed([number], [number, 1]) for number in range(5)]
        rig.embedder.start()
        for number, future in enumerate(futures):
            assert_embeds(future, [number], [number, 1])
        assert len(rig.model.batches) == 1


def test_a_long_call_is_spread_over_batches_of_bounded_size():
    texts = [[1] * (1 + number % 10) for number in range(40)]
    with Rig(max_batch_tokens=30) as rig:
        assert_embeds(rig.embed(*texts), *texts)
        for batch in rig.model.batches:
            assert len(batch) * max(map(len, batch)) <= 30


def test_texts_of_similar_length_share_a_batch():
    texts = [[1] * length for length in (1, 9, 1, 9, 1, 9)]
    with Rig(max_batch_tokens=27) as rig:
        assert_embeds(rig.embed(*texts), *texts)
        assert [sorted(map(len, batch)) for batch in rig.model.batches] == [[9, 9, 9], [1, 1, 1]]


def test_texts_of_similar_length_share_a_batch_across_calls():
    short, long = [1] * 2, [1] * 90
    with Rig(start=False, max_tokens=100) as rig:
        futures = [rig.embed(text) for text in (short, long, short, long)]
        rig.embedder.start()
        for future, text in zip(futures, (short, long, short, long), strict=True):
            assert_embeds(future, text)
        assert rig.model.batches == [[short, short], [long, long]]


def test_who_is_alone_never_waits_for_others():
    with Rig(max_delay_s=TIMEOUT_S) as rig:
        for number in range(3):
            assert_embeds(rig.embed([number]), [number])


def test_the_callers_of_the_last_batch_are_given_time_to_come_back():
    with Rig(start=False, max_delay_s=TIMEOUT_S) as rig:
        futures = [rig.embed([number]) for number in range(3)]
        rig.embedder.start()
        assert not wait(futures, TIMEOUT_S).not_done
        futures = [rig.embed([number]) for number in range(3)]
        assert not wait(futures, TIMEOUT_S).not_done
        assert [len(batch) for batch in rig.model.batches] == [3, 3]


def test_an_absent_caller_is_waited_for_no_longer_than_the_delay():
    with Rig(start=False, max_delay_s=0.01) as rig:
        futures = [rig.embed([number]) for number in range(3)]
        rig.embedder.start()
        assert not wait(futures, TIMEOUT_S).not_done
        assert_embeds(rig.embed([5]), [5])
        assert_embeds(rig.embed([6]), [6])


def test_a_text_larger_than_a_batch_goes_alone():
    with Rig(max_batch_tokens=4) as rig:
        assert_embeds(rig.embed([1] * 9, [2]), [1] * 9, [2])
        assert [len(batch) for batch in rig.model.batches] == [1, 1]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ([], RequestError, "nothing to embed"),
        ([[1], []], RequestError, "input 1 is empty"),
        ([[1] * 17], ContextLengthError, "input 0 has 17 tokens.* 16"),
        ([[1], [2], [100]], RequestError, "input 2 .* 0 to 99"),
        ([[-1]], RequestError, "input 0"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_position(texts, error, message):
    with Rig() as rig:
        with pytest.raises(error, match=message) as caught:
            rig.embed(*texts)
        assert caught.value.param == "input"
        assert rig.model.batches == []


def test_beyond_its_capacity_it_refuses():
    with Rig(max_queued=2, start=False) as rig:
        for _ in range(3):
            rig.embed([1])
        with pytest.raises(CapacityError) as caught:
            rig.embed([1])
        assert caught.value.retry_after_s > 0


def test_a_cancelled_call_gives_its_place_back_and_is_not_computed():
    with Rig(max_queued=0, start=False) as rig:
        cancelled = rig.embed([1])
        assert cancelled.cancel()
        assert wait([cancelled], TIMEOUT_S).done == {cancelled}
        future = rig.embed([2])
        rig.embedder.start()
        assert_embeds(future, [2])
        assert rig.model.batches == [[[2]]]


def test_a_call_that_is_worked_on_cannot_be_cancelled():
    with Rig() as rig:
        rig.model.gate.clear()
        future = rig.embed([1])
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not future.cancel()
        rig.model.gate.set()
        assert_embeds(future, [1])


def test_a_batch_that_fails_loses_its_calls_only(caplog):
    with Rig() as rig:
        rig.model.error = RuntimeError("out of memory")
        with pytest.raises(ModelError, match="out of memory"):
            rig.embed([1]).result(TIMEOUT_S)
        rig.model.error = None
        assert_embeds(rig.embed([2]), [2])
    assert "a batch failed" in caplog.text


def test_weights_that_never_come_fail_every_call_now_and_later():
    with Rig(max_batch_tokens=1) as rig:
        rig.model.gate.clear()
        futures = [rig.embed([number]) for number in range(3)]
        rig.model.error = UnavailableError("the store does not answer")
        rig.model.gate.set()
        for future in futures:
            with pytest.raises(UnavailableError):
                future.result(TIMEOUT_S)
        with pytest.raises(UnavailableError):
            rig.embed([1])


def test_draining_finishes_what_was_taken_and_refuses_what_comes():
    with Rig(max_batch_tokens=1) as rig:
        futures = [rig.embed([number]) for number in range(10)]
        assert rig.embedder.drain(TIMEOUT_S)
        assert all(future.done() for future in futures)
        assert_embeds(futures[-1], [9])
        with pytest.raises(DrainingError):
            rig.embed([1])


def test_a_drain_that_takes_too_long_ends_what_is_left():
    with Rig(max_batch_tokens=1) as rig:
        rig.model.gate.clear()
        futures = [rig.embed([number]) for number in range(3)]
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not rig.embedder.drain(0.01)
        assert not wait(futures, TIMEOUT_S).not_done
        assert all(isinstance(future.exception(), DrainingError) for future in futures)


def test_stopping_before_the_start_ends_what_waits():
    with Rig(start=False) as rig:
        future = rig.embed([1])
        assert rig.embedder.stop()
        assert isinstance(future.exception(TIMEOUT_S), DrainingError)


def test_statistics_and_timeline_tell_what_was_done():
    timeline = Timeline()
    with Rig(timeline=timeline) as rig:
        rig.embed([1, 2], [3]).result(TIMEOUT_S)
        statistics = rig.embedder.statistics()
        assert (statistics.batches_total, statistics.texts_total, statistics.tokens_total) == (1, 2, 3)
        assert statistics.embed_s_total >= 0
    span = timeline.first("execute", "batch 0")
    assert span.attributes == {"texts": 2, "tokens": 3}


def test_many_threads_get_what_is_theirs():
    with Rig(max_batch_tokens=16) as rig:

        def call(number):
            text = [number % 100] * (1 + number % 7)
            assert_embeds(rig.embed(text, [1]), text, [1])
            ended.append(number)

        ended = []
        threads = [threading.Thread(target=call, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert sorted(ended) == list(range(24))
