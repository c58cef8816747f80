"""The engine over a toy model that knows every right answer and checks the KV pool at each step."""

import logging
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teneral.loader.errors import IntegrityError, UsageError
from teneral.loader.timeline import Timeline
from teneral.runtime.engine import Engine, EngineOptions
from teneral.runtime.errors import (
    CapacityError,
    ContextLengthError,
    DrainingError,
    ModelError,
    RequestError,
)
from teneral.runtime.requests import FinishReason, GenerationRequest, SamplingParams

from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0)
TIMEOUT_S = 30.0  # of waits that end at once unless something is broken


class Rig:
    """An engine that is checked when it is left: nobody waits, no block is lost."""

    def __init__(self, *, num_blocks=64, model=None, start=True, eos=(), timeline=None, **options):
        self.model = model or ToyDecoder()
        options.setdefault("block_size", BLOCK_SIZE)
        kv_bytes = num_blocks * self.model.kv_block_bytes(options["block_size"])
        self.engine = Engine(
            self.model,
            ToyTokenizer(),
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            timeline=timeline,
            eos_token_ids=frozenset(eos),
        )
        if start:
            self.engine.start()

    def submit(self, prompt=(1, 2, 3), *, on_event=None, request_id="r", **fields):
        fields.setdefault("sampling", GREEDY)
        return self.engine.submit(GenerationRequest(request_id, tuple(prompt), **fields), on_event)

    def expected(self, prompt, num_tokens):
        return self.model.greedy(prompt, num_tokens)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.model.gate.set()
        assert self.engine.stop(TIMEOUT_S), "the thread has not ended"
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks
        assert (statistics.running, statistics.queued) == (0, 0)


def finish(generation):
    return generation.result(TIMEOUT_S)


# -- what a sequence says ------------------------------------------------------------------------------------


def test_the_tokens_are_the_models():
    with Rig() as rig:
        result = finish(rig.submit(max_tokens=20))
        assert result.tokens == rig.expected((1, 2, 3), 20)
        assert result.text == ToyTokenizer().decode(list(result.tokens))
        assert result.finish_reason is FinishReason.LENGTH


def test_each_token_is_an_event_and_the_last_has_the_reason():
    with Rig() as rig:
        events = list(rig.submit(max_tokens=4).events(TIMEOUT_S))
        assert [len(event.tokens) for event in events] == [1, 1, 1, 1]
        assert [event.finish_reason for event in events] == [None, None, None, FinishReason.LENGTH]


def test_many_sequences_together_say_what_each_says_alone():
    with Rig(num_blocks=200) as rig:
        prompts = [(number, 5, number % 3) for number in range(20)]
        generations = [rig.submit(prompt, max_tokens=12) for prompt in prompts]
        for prompt, generation in zip(prompts, generations, strict=True):
            assert finish(generation).tokens == rig.expected(prompt, 12)
    assert max(rig.model.batch_sizes) > 1


def test_a_sequence_joins_while_another_goes_on():
    with Rig() as rig:
        rig.model.gate.clear()
        first = rig.submit(max_tokens=30)
        assert rig.model.entered.wait(TIMEOUT_S)
        second = rig.submit((9, 9), max_tokens=5)
        rig.model.gate.set()
        assert finish(second).tokens == rig.expected((9, 9), 5)
        assert finish(first).tokens == rig.expected((1, 2, 3), 30)
        assert rig.model.batch_sizes[:2] == [1, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_the_others():
    with Rig(max_prefill_tokens=8, max_step_tokens=32, max_running=4) as rig:
        rig.model.gate.clear()
        first = rig.submit(max_tokens=30)
        assert rig.model.entered.wait(TIMEOUT_S)
        prompt = tuple(number % 60 for number in range(50))
        second = rig.submit(prompt, max_tokens=3)
        rig.model.gate.set()
        assert finish(second).tokens == rig.expected(prompt, 3)
        assert finish(first).tokens == rig.expected((1, 2, 3), 30)
        assert rig.model.batch_tokens[1:8] == [9, 9, 9, 9, 9, 9, 3]


def test_a_prompt_longer_than_a_step_is_computed_over_several():
    with Rig(max_step_tokens=16, max_running=4) as rig:
        prompt = tuple(number % 60 for number in range(50))
        assert finish(rig.submit(prompt, max_tokens=2)).tokens == rig.expected(prompt, 2)
        assert rig.model.batch_tokens == [16, 16, 16, 2, 1]


def test_an_end_token_ends_the_sequence():
    end = ToyDecoder().greedy((1, 2, 3), 6)[-1]
    with Rig(eos=[end]) as rig:
        result = finish(rig.submit(max_tokens=50))
        assert result.finish_reason is FinishReason.STOP
        assert result.tokens[-1] == end
        assert result.text == ToyTokenizer().decode(list(result.tokens[:-1]))
        assert finish(rig.submit(max_tokens=20, ignore_eos=True)).tokens == rig.expected((1, 2, 3), 20)


def test_a_stop_string_ends_the_sequence_and_does_not_show():
    text = ToyTokenizer().decode(list(ToyDecoder().greedy((1, 2, 3), 20)))
    stop = text[7:10]
    with Rig() as rig:
        result = finish(rig.submit(stop=(stop,), max_tokens=20))
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason is FinishReason.STOP


def test_without_a_limit_a_sequence_goes_on_to_the_end_of_the_context():
    with Rig(model=ToyDecoder(max_context=40)) as rig:
        result = finish(rig.submit())
        assert result.tokens == rig.expected((1, 2, 3), 37)
        assert result.finish_reason is FinishReason.LENGTH


def test_a_limit_beyond_the_context_ends_there_too():
    with Rig(model=ToyDecoder(max_context=40)) as rig:
        assert len(finish(rig.submit(max_tokens=1_000)).tokens) == 37


def test_no_tokens_asked_for_are_none_at_once():
    with Rig(start=False) as rig:
        result = finish(rig.submit(max_tokens=0))
        assert (result.tokens, result.finish_reason) == ((), FinishReason.LENGTH)


def test_logprobs_are_the_models():
    with Rig() as rig:
        result = finish(rig.submit(max_tokens=5, num_top_logprobs=3))
        history = [1, 2, 3]
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            expected = rig.model.logits_after(history).log_softmax(-1)
            assert logprob.token == token
            assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-5)
            assert [other for other, _ in logprob.top] == expected.topk(3).indices.tolist()
            history.append(token)


# -- sampling ------------------------------------------------------------------------------------------------


def seeded(seed, **params):
    return SamplingParams(temperature=1.0, seed=seed, **params)


def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    with Rig(num_blocks=200) as rig:
        alone = finish(rig.submit(max_tokens=25, sampling=seeded(7))).tokens
        company = [rig.submit((number,), max_tokens=25, sampling=seeded(number)) for number in range(8)]
        again = finish(rig.submit(max_tokens=25, sampling=seeded(7)))
        assert again.tokens == alone
        assert len({finish(generation).tokens for generation in company}) == 8


def test_without_a_seed_two_answers_differ():
    with Rig() as rig:
        options = {"max_tokens": 30, "sampling": SamplingParams()}
        assert finish(rig.submit(**options)).tokens != finish(rig.submit(**options)).tokens


def test_penalties_follow_the_output():
    with Rig(model=ToyDecoder(vocab_size=8)) as rig:
        sampling = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
        result = finish(rig.submit(max_tokens=8, sampling=sampling))
        history, counts = [1, 2, 3], torch.zeros(8)
        for token in result.tokens:
            scores = rig.model.logits_after(history) - 2.0 * counts - 2.0 * (counts > 0)
            assert token == int(scores.argmax())
            history.append(token)
            counts[token] += 1


# -- blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, seeded(3)], ids=["greedy", "seeded"])
def test_preemption_loses_nothing(sampling):
    prompts = [(number, 1) for number in range(6)]

    def run(num_blocks):
        with Rig(num_blocks=num_blocks, model=ToyDecoder(max_context=48)) as rig:
            rig.model.gate.clear()
            generations = [rig.submit(prompt, max_tokens=40, sampling=sampling) for prompt in prompts]
            rig.model.gate.set()
            tokens = [finish(generation).tokens for generation in generations]
            return tokens, rig.engine.statistics().preemptions_total

    roomy, none = run(num_blocks=100)
    tight, some = run(num_blocks=13)
    assert (none, some > 0) == (0, True)
    assert tight == roomy


def test_a_preempted_sequence_is_told_no_token_twice():
    with Rig(num_blocks=12, model=ToyDecoder(max_context=48)) as rig:
        generations = [rig.submit((number,), max_tokens=40) for number in range(4)]
        for number, generation in enumerate(generations):
            tokens = [token for event in generation.events(TIMEOUT_S) for token in event.tokens]
            assert tuple(tokens) == rig.expected((number,), 40)
        statistics = rig.engine.statistics()
        assert statistics.preemptions_total > 0
        assert statistics.prompt_tokens_total == 4
        assert statistics.output_tokens_total == 160
        assert statistics.computed_tokens_total > 164


def test_a_pool_smaller_than_the_models_context_limits_it():
    with Rig(num_blocks=5) as rig:
        assert rig.engine.max_context == 20
        assert len(finish(rig.submit()).tokens) == 17


def test_the_context_can_be_limited_further():
    with Rig(max_context=10) as rig:
        assert rig.engine.statistics().max_context == 10
        assert len(finish(rig.submit()).tokens) == 7


def test_a_pool_without_room_for_a_block_is_refused():
    with pytest.raises(UsageError, match="too small") as caught:
        Rig(num_blocks=0.5, start=False)
    assert caught.value.key == "kv_bytes"


@pytest.mark.parametrize(
    "options",
    [{"kv_bytes": 0}, {"max_running": 0}, {"max_queued": -1}, {"max_step_tokens": 8}, {"max_context": 1}],
    ids=str,
)
def test_bounds_that_cannot_be_meant_are_refused_by_name(options):
    with pytest.raises(UsageError) as caught:
        EngineOptions(**{"kv_bytes": 1 << 20, **options})
    assert caught.value.key == next(iter(options))


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    with Rig(model=ToyDecoder(max_context=32)) as rig:
        with pytest.raises(ContextLengthError, match="40 tokens.* 32") as caught:
            rig.submit(range(40))
        assert caught.value.param == "prompt"
        assert rig.model.num_passes == 0


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_unless_none_is_wanted():
    with Rig(model=ToyDecoder(max_context=32)) as rig:
        with pytest.raises(ContextLengthError):
            rig.submit(range(32))
        assert finish(rig.submit(range(32), max_tokens=0)).tokens == ()
        assert finish(rig.submit(range(31))).tokens == rig.expected(range(31), 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": (1, 64)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"sampling": SamplingParams(logit_bias=((64, 1.0),))}, "logit_bias"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(fields, param):
    with Rig() as rig:
        with pytest.raises(RequestError, match="0 to 63") as caught:
            rig.submit(**fields)
        assert caught.value.param == param


def test_beyond_its_capacity_an_engine_refuses_and_says_when_to_come_back():
    with Rig(max_running=2, max_queued=3, start=False) as rig:
        for _ in range(5):
            rig.submit(max_tokens=1)
        with pytest.raises(CapacityError) as caught:
            rig.submit(max_tokens=1)
        assert 1 <= caught.value.retry_after_s <= 30
        assert rig.engine.statistics().queued == 5


def test_a_cancelled_request_gives_its_place_in_the_queue_back_at_once():
    with Rig(max_running=1, max_queued=0, start=False) as rig:
        rig.submit(max_tokens=1).cancel()
        generation = rig.submit(max_tokens=1)
        rig.engine.start()
        assert len(finish(generation).tokens) == 1


# -- how a sequence ends otherwise ---------------------------------------------------------------------------


def test_cancelling_ends_a_sequence_at_once_though_its_weights_have_not_come():
    with Rig() as rig:
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
    with Rig() as rig:
        two_tokens = threading.Event()
        generation = rig.submit(on_event=lambda event: two_tokens.set())
        assert two_tokens.wait(TIMEOUT_S)
        generation.cancel()
        other = rig.submit((4,), max_tokens=1)
        finish(other)
        statistics = rig.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks


def test_nothing_comes_after_a_cancellation():
    with Rig() as rig:
        events = []
        generation = rig.submit(on_event=events.append)
        next(generation.events(TIMEOUT_S))
        generation.cancel()
        generation.cancel()
        finish(rig.submit(max_tokens=3))
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert list(generation) == events


def test_a_sequence_that_has_ended_cannot_be_cancelled():
    with Rig() as rig:
        generation = rig.submit(max_tokens=2)
        finish(generation)
        generation.cancel()
        assert generation.finish_reason is FinishReason.LENGTH


def test_a_callback_that_raises_loses_its_own_sequence_only(caplog):
    def fail(event):
        raise ValueError("the client went away")

    with Rig() as rig, caplog.at_level(logging.ERROR):
        bad = rig.submit(max_tokens=50, on_event=fail, request_id="bad")
        good = rig.submit((4,), max_tokens=20)
        assert finish(bad).finish_reason is FinishReason.CANCELLED
        assert finish(good).tokens == rig.expected((4,), 20)
    assert "request bad: on_event raised" in caplog.text


def test_a_callback_may_use_the_engine():
    with Rig() as rig:
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
    with Rig(model=model) as rig:
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
    with Rig(model=model, max_running=1) as rig:
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

    with Rig(model=Broken()) as rig:
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
    engine = Engine(model, Fragile(), options=options)
    engine.start()
    force = SamplingParams(temperature=0, logit_bias=((13, 100.0),))
    bad = engine.submit(GenerationRequest("bad", (1,), 5, force))
    good = engine.submit(GenerationRequest("good", (1,), 5, SamplingParams(temperature=0, logit_bias=((13, -100),))))
    with pytest.raises(ModelError, match="unlucky"):
        finish(bad)
    assert len(finish(good).tokens) == 5
    engine.stop()
    engine.check_integrity()
    assert "detokenising failed" in caplog.text


# -- the end of the engine -----------------------------------------------------------------------------------


def test_draining_finishes_what_was_taken_and_refuses_what_comes():
    with Rig() as rig:
        generations = [rig.submit((number,), max_tokens=20) for number in range(5)]
        assert rig.engine.drain(TIMEOUT_S)
        for number, generation in enumerate(generations):
            assert finish(generation).tokens == rig.expected((number,), 20)
        with pytest.raises(DrainingError):
            rig.submit()


def test_a_drain_that_takes_too_long_gives_every_sequence_its_last_event():
    with Rig(max_running=1) as rig:
        rig.model.gate.clear()
        running, waiting = rig.submit(max_tokens=2), rig.submit(max_tokens=2)
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not rig.engine.drain(0.01)
        for generation in (running, waiting):
            with pytest.raises(DrainingError):
                finish(generation)


def test_a_cancelled_sequence_does_not_hold_up_a_drain():
    with Rig() as rig:
        rig.model.gate.clear()
        generation = rig.submit()
        assert rig.model.entered.wait(TIMEOUT_S)
        threading.Timer(0.05, generation.cancel).start()
        assert rig.engine.drain(TIMEOUT_S)


def test_stopping_ends_every_sequence_even_if_the_engine_never_started():
    with Rig(start=False) as rig:
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
    with Rig() as rig:
        rig.model.gate.clear()
        rig.submit()
        assert rig.model.entered.wait(TIMEOUT_S)
        assert not rig.engine.stop(0.01)


# -- what can be seen ----------------------------------------------------------------------------------------


def test_the_moments_of_a_request_are_in_order():
    with Rig() as rig:
        timings = finish(rig.submit(max_tokens=3)).timings
        moments = [timings.queued_s, timings.started_s, timings.first_token_s, timings.finished_s]
        assert moments == sorted(moments)


def test_statistics_count_what_happened():
    with Rig() as rig:
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
    with Rig(timeline=timeline) as rig:
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
    with Rig(start=False) as rig:
        generation = rig.submit(max_tokens=1)
        with pytest.raises(TimeoutError, match="no event"):
            next(generation.events(0.01))
        with pytest.raises(TimeoutError, match="has not ended"):
            generation.result(0.01)


# -- all of it -----------------------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 63), min_size=1, max_size=30),
        st.integers(1, 25),
        st.sampled_from([None, 0, 5]),  # seed; None: greedy
        st.sampled_from(["run", "run", "run", "cancel"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(
    requests=requests,
    num_blocks=st.integers(15, 40),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(8, 40),
    max_prefill_tokens=st.integers(1, 20),
)
def test_any_company_in_any_pool_gives_each_sequence_its_own_tokens(requests, num_blocks, **options):
    reference = Rig(num_blocks=400, max_running=1)
    with reference, Rig(num_blocks=num_blocks, model=ToyDecoder(max_context=60), **options) as rig:
        generations = []
        for prompt, max_tokens, seed, fate in requests:
            sampling = GREEDY if seed is None else seeded(seed, top_p=0.9)
            generation = rig.submit(prompt, max_tokens=max_tokens, sampling=sampling)
            if fate == "cancel":
                generation.cancel()
            generations.append(generation)
        for (prompt, max_tokens, seed, fate), generation in zip(requests, generations, strict=True):
            result = finish(generation)
            sampling = GREEDY if seed is None else seeded(seed, top_p=0.9)
            alone = finish(reference.submit(prompt, max_tokens=max_tokens, sampling=sampling)).tokens
            assert result.tokens == alone[: len(result.tokens)]
            assert fate == "cancel" or len(result.tokens) == max_tokens
        rig.engine.check_integrity()
