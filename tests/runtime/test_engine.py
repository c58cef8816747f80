"""The engine's answers and refusals, over a toy model that knows every right answer and checks the
KV pool.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_rig import GREEDY, TIMEOUT_S, EngineRig, finish, seeded
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

from teneral.loader.errors import UsageError
from teneral.runtime.engine.engine import EngineOptions
from teneral.runtime.errors import (
    CapacityError,
    ContextLengthError,
    RequestError,
)
from teneral.runtime.step.requests import FinishReason, SamplingParams

# -- what a sequence says ------------------------------------------------------------------------------------


def test_the_tokens_are_the_models():
    with EngineRig() as rig:
        result = finish(rig.submit(max_tokens=20))
        assert result.tokens == rig.expected((1, 2, 3), 20)
        assert result.text == ToyTokenizer().decode(list(result.tokens))
        assert result.finish_reason is FinishReason.LENGTH


def test_each_token_is_an_event_and_the_last_has_the_reason():
    with EngineRig() as rig:
        events = list(rig.submit(max_tokens=4).events(TIMEOUT_S))
        assert [len(event.tokens) for event in events] == [1, 1, 1, 1]
        assert [event.finish_reason for event in events] == [None, None, None, FinishReason.LENGTH]


def test_many_sequences_together_say_what_each_says_alone():
    with EngineRig(num_blocks=200) as rig:
        prompts = [(number, 5, number % 3) for number in range(20)]
        generations = [rig.submit(prompt, max_tokens=12) for prompt in prompts]
        for prompt, generation in zip(prompts, generations, strict=True):
            assert finish(generation).tokens == rig.expected(prompt, 12)
    assert max(rig.model.batch_sizes) > 1


def test_a_sequence_joins_while_another_goes_on():
    with EngineRig() as rig:
        rig.model.gate.clear()
        first = rig.submit(max_tokens=30)
        assert rig.model.entered.wait(TIMEOUT_S)
        second = rig.submit((9, 9), max_tokens=5)
        rig.model.gate.set()
        assert finish(second).tokens == rig.expected((9, 9), 5)
        assert finish(first).tokens == rig.expected((1, 2, 3), 30)
        assert rig.model.batch_sizes[:2] == [1, 2]


def test_a_long_prompt_is_computed_in_chunks_together_with_the_others():
    with EngineRig(max_prefill_tokens=8, max_step_tokens=32, max_running=4) as rig:
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
    with EngineRig(max_step_tokens=16, max_running=4) as rig:
        prompt = tuple(number % 60 for number in range(50))
        assert finish(rig.submit(prompt, max_tokens=2)).tokens == rig.expected(prompt, 2)
        assert rig.model.batch_tokens == [16, 16, 16, 2, 1]


def test_an_end_token_ends_the_sequence():
    end = ToyDecoder().greedy((1, 2, 3), 6)[-1]
    with EngineRig(eos=[end]) as rig:
        result = finish(rig.submit(max_tokens=50))
        assert result.finish_reason is FinishReason.STOP
        assert result.tokens[-1] == end
        assert result.text == ToyTokenizer().decode(list(result.tokens[:-1]))
        assert finish(rig.submit(max_tokens=20, ignore_eos=True)).tokens == rig.expected((1, 2, 3), 20)


def test_a_stop_string_ends_the_sequence_and_does_not_show():
    text = ToyTokenizer().decode(list(ToyDecoder().greedy((1, 2, 3), 20)))
    stop = text[7:10]
    with EngineRig() as rig:
        result = finish(rig.submit(stop=(stop,), max_tokens=20))
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason is FinishReason.STOP


def test_without_a_limit_a_sequence_goes_on_to_the_end_of_the_context():
    with EngineRig(model=ToyDecoder(max_context=40)) as rig:
        result = finish(rig.submit())
        assert result.tokens == rig.expected((1, 2, 3), 37)
        assert result.finish_reason is FinishReason.LENGTH


def test_a_limit_beyond_the_context_ends_there_too():
    with EngineRig(model=ToyDecoder(max_context=40)) as rig:
        assert len(finish(rig.submit(max_tokens=1_000)).tokens) == 37


def test_no_tokens_asked_for_are_none_at_once():
    with EngineRig(start=False) as rig:
        result = finish(rig.submit(max_tokens=0))
        assert (result.tokens, result.finish_reason) == ((), FinishReason.LENGTH)


def test_logprobs_are_the_models():
    with EngineRig() as rig:
        result = finish(rig.submit(max_tokens=5, num_top_logprobs=3))
        history = [1, 2, 3]
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            logits = rig.model.logits_after(history)
            expected = logits - np.logaddexp.reduce(logits)
            assert logprob.token == token
            assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-5)
            assert [other for other, _ in logprob.top] == np.argsort(-expected)[:3].tolist()
            history.append(token)


# -- sampling ------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    with EngineRig(num_blocks=200) as rig:
        alone = finish(rig.submit(max_tokens=25, sampling=seeded(7))).tokens
        company = [rig.submit((number,), max_tokens=25, sampling=seeded(number)) for number in range(8)]
        again = finish(rig.submit(max_tokens=25, sampling=seeded(7)))
        assert again.tokens == alone
        assert len({finish(generation).tokens for generation in company}) == 8


def test_without_a_seed_two_answers_differ():
    with EngineRig() as rig:
        options = {"max_tokens": 30, "sampling": SamplingParams()}
        assert finish(rig.submit(**options)).tokens != finish(rig.submit(**options)).tokens


def test_penalties_follow_the_output():
    with EngineRig(model=ToyDecoder(vocab_size=8)) as rig:
        sampling = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
        result = finish(rig.submit(max_tokens=8, sampling=sampling))
        history, counts = [1, 2, 3], np.zeros(8)
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
        with EngineRig(num_blocks=num_blocks, model=ToyDecoder(max_context=48)) as rig:
            rig.model.gate.clear()
            generations = [rig.submit(prompt, max_tokens=40, sampling=sampling) for prompt in prompts]
            rig.model.gate.set()
            tokens = [finish(generation).tokens for generation in generations]
            return tokens, rig.engine.statistics().preemptions_total

    roomy, none = run(num_blocks=100)
    tight, some = run(num_blocks=13)
    assert (none, some > 0) == (0, True)
    assert tight == roomy


def test_a_preempted_sequence_gets_no_token_twice():
    with EngineRig(num_blocks=12, model=ToyDecoder(max_context=48)) as rig:
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
    with EngineRig(num_blocks=5) as rig:
        assert rig.engine.max_context == 20
        assert len(finish(rig.submit()).tokens) == 17


def test_the_context_can_be_limited_further():
    with EngineRig(max_context=10) as rig:
        assert rig.engine.statistics().max_context == 10
        assert len(finish(rig.submit()).tokens) == 7


def test_a_pool_without_room_for_a_block_is_refused():
    with pytest.raises(UsageError, match="too small") as caught:
        EngineRig(num_blocks=0.5, start=False)
    assert caught.value.key == "kv_bytes"


@pytest.mark.parametrize(
    "options",
    [{"kv_bytes": 0}, {"max_running": 0}, {"max_queued": -1}, {"max_step_tokens": 8}, {"max_context": 1}],
    ids=str,
)
def test_invalid_bounds_are_refused_by_name(options):
    with pytest.raises(UsageError) as caught:
        EngineOptions(**{"kv_bytes": 1 << 20, **options})
    assert caught.value.key == next(iter(options))


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    with EngineRig(model=ToyDecoder(max_context=32)) as rig:
        with pytest.raises(ContextLengthError, match=r"40 tokens.* 32") as caught:
            rig.submit(range(40))
        assert caught.value.param == "prompt"
        assert rig.model.num_passes == 0


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_unless_none_is_wanted():
    with EngineRig(model=ToyDecoder(max_context=32)) as rig:
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
    with EngineRig() as rig:
        with pytest.raises(RequestError, match="0 to 63") as caught:
            rig.submit(**fields)
        assert caught.value.param == param


def test_beyond_its_capacity_an_engine_refuses_and_says_when_to_come_back():
    with EngineRig(max_running=2, max_queued=3, start=False) as rig:
        for _ in range(5):
            rig.submit(max_tokens=1)
        with pytest.raises(CapacityError) as caught:
            rig.submit(max_tokens=1)
        assert 1 <= caught.value.retry_after_s <= 30
        assert rig.engine.statistics().queued == 5


def test_a_cancelled_request_gives_its_place_in_the_queue_back_at_once():
    with EngineRig(max_running=1, max_queued=0, start=False) as rig:
        rig.submit(max_tokens=1).cancel()
        generation = rig.submit(max_tokens=1)
        rig.engine.start()
        assert len(finish(generation).tokens) == 1


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
    reference = EngineRig(num_blocks=400, max_running=1)
    with reference, EngineRig(num_blocks=num_blocks, model=ToyDecoder(max_context=60), **options) as rig:
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
