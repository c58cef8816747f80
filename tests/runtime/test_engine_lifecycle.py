"""How sequences and the engine end, whatever goes wrong, and what can be seen of them meanwhile."""

import logging
import threading
import time
from contextlib import contextmanager

import pytest
from tests.support.engine_rig import BLOCK_SIZE, TIMEOUT_S, EngineRig, finish
from tests.support.inspection import before_end
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

from teneral.loader.errors import IntegrityError
from teneral.loader.timeline import Timeline
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import (
    DrainingError,
    ModelError,
)
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import FinishReason, GenerationRequest, SamplingParams

# -- how a sequence ends otherwise ---------------------------------------------------------------------------


def test_cancelling_ends_a_sequence_at_once_though_its_weights_have_not_come():
    with EngineRig() as rig:
        rig.model.gate.clear()
        generation = rig.submit(max_tokens=50)
        other = rig.submit((4,), max_tokens=5)
        assert rig.model.entered.wait(TIMEOUT_S)
        generation.cancel()
        assert finish(generation).finish_reason is FinishReason.CANCELLED
        rig.model.gate.set()
        assert finish(other).tokens == rig.expected((4,), 5)
        assert max(rig.model.batch_sizes[1:]) == 1


def test_cancelling_frees_the_blocks_with_the_next_step():
    with EngineRig() as rig:
        two_tokens = threading.Event()
        generation = rig.submit(on_event=lambda event: two_tokens.set())
        assert two_tokens.wait(TIMEOUT_S)
        generation.cancel()
        other = rig.submit((4,), max_tokens=1)
        finish(other)
        statistics = rig.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks


@contextmanager
def ended_halfway(generation, end):
    """Inside, `end` has marked the generation as ended in another thread, and has not yet notified the engine."""
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(TIMEOUT_S)

    before_end(generation, wait)
    thread = threading.Thread(target=end)
    thread.start()
    assert reached.wait(TIMEOUT_S)
    yield
    go_on.set()
    thread.join(TIMEOUT_S)


def wait_until_nothing_runs(engine):
    give_up_s = time.monotonic() + TIMEOUT_S
    while engine.statistics().running and time.monotonic() < give_up_s:
        time.sleep(0.001)
    assert engine.statistics().running == 0


def test_a_cancellation_that_is_half_done_when_the_step_ends_disturbs_no_other():
    with EngineRig() as rig:
        rig.model.gate.clear()
        generation = rig.submit(max_tokens=50)
        assert rig.model.entered.wait(TIMEOUT_S)
        with ended_halfway(generation, generation.cancel):
            rig.model.gate.set()
            wait_until_nothing_runs(rig.engine)
        assert finish(generation).finish_reason is FinishReason.CANCELLED
        assert finish(rig.submit((5,), max_tokens=2)).tokens == rig.expected((5,), 2)


def test_a_stop_that_is_half_done_when_the_step_ends_loses_no_block():
    with EngineRig() as rig:
        rig.model.gate.clear()
        generations = [rig.submit(max_tokens=50), rig.submit(max_tokens=50)]
        assert rig.model.entered.wait(TIMEOUT_S)
        with ended_halfway(generations[0], rig.engine.stop):
            rig.model.gate.set()
            wait_until_nothing_runs(rig.engine)
            rig.engine.check_integrity()
        for generation in generations:
            with pytest.raises(DrainingError):
                finish(generation)


def test_nothing_comes_after_a_cancellation():
    with EngineRig() as rig:
        events = []
        cancelled = threading.Event()

        def take(event):
            events.append(event)
            cancelled.wait(TIMEOUT_S)  # it cannot end before

        generation = rig.submit(on_event=take)
        next(generation.events(TIMEOUT_S))
        generation.cancel()
        generation.cancel()
        cancelled.set()
        finish(rig.submit(max_tokens=3))
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert list(generation) == events


def test_a_sequence_that_has_ended_cannot_be_cancelled():
    with EngineRig() as rig:
        generation = rig.submit(max_tokens=2)
        finish(generation)
        generation.cancel()
        assert generation.finish_reason is FinishReason.LENGTH


def test_a_callback_that_raises_loses_its_own_sequence_only(caplog):
    def fail(event):
        raise ValueError("the client went away")

    with EngineRig() as rig, caplog.at_level(logging.ERROR):
        bad = rig.submit(max_tokens=50, on_event=fail, request_id="bad")
        good = rig.submit((4,), max_tokens=20)
        assert finish(bad).finish_reason is FinishReason.CANCELLED
        assert finish(good).tokens == rig.expected((4,), 20)
    assert "request bad: on_event raised" in caplog.text


def test_a_callback_may_use_the_engine():
    with EngineRig() as rig:
        submitted = threading.Event()
        generations = []

        def again(event):
            if not generations:
                rig.engine.statistics()
                generations.append(rig.submit((5,), max_tokens=3))
                submitted.set()

        finish(rig.submit(max_tokens=3, on_event=again))
        assert submitted.wait(TIMEOUT_S)
        assert finish(generations[0]).tokens == rig.expected((5,), 3)


def test_a_model_that_fails_loses_the_sequences_of_that_step_only(caplog):
    model = ToyDecoder()

    def fail_once(number):
        if number == 2:
            raise RuntimeError("out of memory")

    model.before_forward = fail_once
    with EngineRig(model=model) as rig:
        with pytest.raises(ModelError, match="RuntimeError: out of memory") as caught:
            finish(rig.submit(max_tokens=10))
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert finish(rig.submit(max_tokens=10)).tokens == rig.expected((1, 2, 3), 10)
        assert rig.engine.statistics().ended_total == {FinishReason.ERROR: 1, FinishReason.LENGTH: 1}
    assert "a step failed" in caplog.text


def test_weights_that_never_come_fail_every_sequence_now_and_later():
    model = ToyDecoder()

    def lose(number):
        raise IntegrityError("part 3 differs from its digest", where="part 3")

    model.before_forward = lose
    with EngineRig(model=model, max_running=1) as rig:
        model.gate.clear()
        generations = [rig.submit(max_tokens=2) for _ in range(3)]
        model.gate.set()
        for generation in generations:
            with pytest.raises(IntegrityError, match="part 3"):
                finish(generation)
        with pytest.raises(IntegrityError):
            rig.submit(max_tokens=2)


def test_logits_that_are_no_numbers_fail_their_sequence_only():
    class Broken(ToyDecoder):
        def logits_after(self, history):
            logits = super().logits_after(history)
            return logits * float("nan") if history[0] == 13 else logits

    with EngineRig(model=Broken()) as rig:
        bad, good = rig.submit((13,), max_tokens=5), rig.submit((4,), max_tokens=5)
        with pytest.raises(ModelError, match="finite"):
            finish(bad)
        assert len(finish(good).tokens) == 5


def test_a_decoder_of_text_that_fails_loses_its_sequence_only(caplog):
    class Fragile(ToyTokenizer):
        def decode(self, tokens):
            if 13 in tokens:
                raise ValueError("unlucky")
            return super().decode(tokens)

    model = ToyDecoder()
    options = EngineOptions(kv_bytes=64 * model.kv_block_bytes(BLOCK_SIZE), block_size=BLOCK_SIZE)
    engine = Engine(model, Fragile(), options=options, make_backend=host_backend)
    engine.start()
    force = SamplingParams(temperature=0, logit_bias=((13, 100.0),))
    bad = engine.submit(GenerationRequest("bad", (1,), 5, force))
    good = engine.submit(
        GenerationRequest("good", (1,), 5, SamplingParams(temperature=0, logit_bias=((13, -100),)))
    )
    with pytest.raises(ModelError, match="unlucky"):
        finish(bad)
    assert len(finish(good).tokens) == 5
    engine.stop()
    engine.check_integrity()
    assert "detokenising failed" in caplog.text


# -- the end of the engine -----------------------------------------------------------------------------------


def test_draining_finishes_what_was_taken_and_refuses_what_comes():
    with EngineRig() as rig:
        generations = [rig.submit((number,), max_tokens=20) for number in range(5)]
        assert rig.engine.drain(TIMEOUT_S)
        for number, generation in enumerate(generations):
            assert finish(generation).tokens == rig.expected((number,), 20)
        with pytest.raises(DrainingError):
            rig.submit()


def test_a_drain_that_takes_too_long_gives_every_sequence_its_last_event():
    with EngineRig(max_running=1) as rig:
        rig.model.gate.clear()
        running, waiting = rig.submit(max_tokens=2), rig.submit(max_tokens=2)
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not rig.engine.drain(0.01)
        for generation in (running, waiting):
            with pytest.raises(DrainingError):
                finish(generation)


def test_a_cancelled_sequence_does_not_hold_up_a_drain():
    with EngineRig() as rig:
        rig.model.gate.clear()
        generation = rig.submit()
        assert rig.model.entered.wait(TIMEOUT_S)
        threading.Timer(0.05, generation.cancel).start()
        assert rig.engine.drain(TIMEOUT_S)


def test_stopping_ends_every_sequence_even_if_the_engine_never_started():
    with EngineRig(start=False) as rig:
        events = []
        generation = rig.submit(on_event=events.append)
        assert rig.engine.stop()
        assert [event.finish_reason for event in events] == [FinishReason.ERROR]
        with pytest.raises(DrainingError):
            finish(generation)
        with pytest.raises(DrainingError):
            rig.submit()
        with pytest.raises(RuntimeError, match="once"):
            rig.engine.start()


def test_an_engine_that_waits_for_weights_says_that_it_has_not_stopped():
    with EngineRig() as rig:
        rig.model.gate.clear()
        rig.submit()
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not rig.engine.stop(0.01)


# -- what can be seen ----------------------------------------------------------------------------------------


def test_the_moments_of_a_request_are_in_order():
    with EngineRig() as rig:
        timings = finish(rig.submit(max_tokens=3)).timings
        moments = [timings.queued_s, timings.started_s, timings.first_token_s, timings.finished_s]
        assert moments == sorted(moments)


def test_statistics_count_what_happened():
    with EngineRig() as rig:
        finish(rig.submit(max_tokens=10))
        statistics = rig.engine.statistics()
        assert statistics.prompt_tokens_total == 3
        assert statistics.output_tokens_total == 10
        assert statistics.computed_tokens_total == 12
        assert statistics.steps_total == 10
        assert statistics.forward_s_total > 0
        assert statistics.ended_total == {FinishReason.LENGTH: 1}
        assert statistics.kv_bytes == 64 * rig.model.kv_block_bytes(BLOCK_SIZE)


def test_the_timeline_shows_the_first_steps_and_each_request():
    timeline = Timeline()
    with EngineRig(timeline=timeline) as rig:
        finish(rig.submit(max_tokens=20, request_id="first"))
        finish(rig.submit(max_tokens=0))
    executed = [span.name for span in timeline.spans() if span.lane == "execute"]
    assert executed == ["layers.0", *(f"step {number}" for number in range(8))]
    spans = [
        span for span in timeline.spans() if span.lane == "request" and span.attributes["request"] == "first"
    ]
    assert [span.name for span in spans] == ["queued", "prefill", "decode", "first token", "last token"]
    queued, prefill, decode, first, last = spans
    assert queued.end_s == prefill.start_s
    assert prefill.end_s == decode.start_s == first.start_s
    assert decode.end_s == last.end_s
    assert last.attributes["finish"] == "length"


def test_waiting_for_an_event_can_be_given_up():
    with EngineRig(start=False) as rig:
        generation = rig.submit(max_tokens=1)
        with pytest.raises(TimeoutError, match="no event"):
            next(generation.events(0.01))
        with pytest.raises(TimeoutError, match="has not ended"):
            generation.result(0.01)
