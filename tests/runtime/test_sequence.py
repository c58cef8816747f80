"""One sequence: how it ends, what it gives out, what it keeps when it is preempted."""

import pytest
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.engine.generation import Generation
from teneral.runtime.engine.sequence import Sequence
from teneral.runtime.step.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenLogprob,
)
from teneral.runtime.step.state import Choice

A, B, C, EOS = 0, 1, 2, 9


def make(*, max_new_tokens=100, eos=frozenset({EOS}), **options):
    request = GenerationRequest("r", options.pop("prompt", (A, B)), **options)
    return Sequence(Generation(request), ToyTokenizer(), eos_token_ids=eos, max_new_tokens=max_new_tokens)


def feed(sequence, *tokens):
    return [sequence.accept(Choice(token)) for token in tokens]


def summary(events):
    return [(event.text, event.tokens, event.finish_reason) for event in events]


def test_tokens_become_text_until_the_end_token_which_has_none():
    assert summary(feed(make(), A, C, EOS)) == [
        ("A", (A,), None),
        ("C", (C,), None),
        ("", (EOS,), FinishReason.STOP),
    ]


def test_an_ignored_end_token_is_an_ordinary_one():
    assert summary(feed(make(ignore_eos=True), EOS)) == [("J", (EOS,), None)]


def test_a_stop_token_ends_the_sequence_even_if_end_tokens_are_ignored():
    sequence = make(ignore_eos=True, stop_token_ids=frozenset({C}))
    assert summary(feed(sequence, EOS, C))[-1] == ("", (C,), FinishReason.STOP)


def test_the_last_allowed_token_ends_the_sequence_with_its_text():
    assert summary(feed(make(max_new_tokens=2), A, B))[-1] == ("B", (B,), FinishReason.LENGTH)


def test_a_stop_string_is_not_given_out_nor_its_beginning():
    events = feed(make(stop=("BCA",)), A, B, C, A)
    assert "".join(event.text for event in events) == "A"
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].tokens == (A,)


def test_text_held_back_for_a_stop_string_comes_when_the_length_is_reached():
    events = feed(make(stop=("BCA",), max_new_tokens=3), A, B, C)
    assert [event.text for event in events] == ["A", "", "BC"]


def test_text_held_back_for_a_stop_string_comes_at_the_end_token():
    events = feed(make(stop=("BCA",)), B, C, EOS)
    assert [event.text for event in events] == ["", "", "BC"]


def test_a_stop_string_counts_after_the_least_number_of_tokens():
    events = feed(make(stop=("C",), min_tokens=2), C, A, C)
    assert summary(events) == [("C", (C,), None), ("A", (A,), None), ("", (C,), FinishReason.STOP)]


def test_stops_are_part_of_the_text_where_that_is_asked_for():
    assert feed(make(stop=("BC",), includes_stop=True), A, B, C)[-1].text == "BC"
    events = feed(make(stop=("BCA",), includes_stop=True), B, C, EOS)
    assert events[-1].text == "BCJ"


def test_special_tokens_are_shown_where_that_is_asked_for():
    class Special(ToyTokenizer):
        def decode(self, tokens, skip_special_tokens=True):
            return super().decode([token for token in tokens if token != C or not skip_special_tokens])

    for skips in (True, False):
        request = GenerationRequest("r", (A, B), skips_special_tokens=skips)
        sequence = Sequence(Generation(request), Special(), eos_token_ids=frozenset(), max_new_tokens=9)
        assert "".join(event.text for event in feed(sequence, A, C, B)) == ("AB" if skips else "ACB")


def test_a_stop_string_in_the_prompt_does_not_end_the_sequence():
    events = feed(make(prompt=(B, C), stop=("BCA",)), A)
    assert summary(events) == [("A", (A,), None)]


def test_a_token_brings_its_logprob():
    logprob = TokenLogprob(A, -0.5)
    event = make().accept(Choice(A, logprob))
    assert event.logprobs == (logprob,)
    assert make().accept(Choice(A)).logprobs == ()


def test_a_preempted_sequence_keeps_its_tokens_and_gives_up_its_blocks():
    sequence = make()
    feed(sequence, C)
    sequence.exact.blocks, sequence.exact.num_computed = (4, 5), 2
    assert sequence.forget_computed() == (4, 5)
    assert (sequence.blocks, sequence.num_computed) == ((), 0)
    assert sequence.tokens == [A, B, C]


def test_what_the_penalties_need_is_counted():
    sequence = make(sampling=SamplingParams(repetition_penalty=1.2))
    feed(sequence, C, C, B)
    assert sequence.sampling.output_counts == {C: 2, B: 1}
    assert list(sequence.sampling.seen) == [A, B, C]
    assert sequence.sampling.num_outputs == 3


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"sampling": SamplingParams(temperature=0)}, True),
        ({"sampling": SamplingParams(temperature=0, top_k=5, seed=1)}, True),
        ({"sampling": SamplingParams(temperature=0.1)}, False),
        ({"sampling": SamplingParams(temperature=0, presence_penalty=1)}, False),
        ({"sampling": SamplingParams(temperature=0, logit_bias=((1, 1.0),))}, False),
        ({"sampling": SamplingParams(temperature=0), "num_top_logprobs": 0}, False),
    ],
)
def test_plain_greedy_is_known(options, plain):
    assert make(**options).sampling.is_plain_greedy is plain


def test_without_a_seed_two_sequences_differ_in_theirs():
    assert make().sampling.seed != make().sampling.seed
    assert make(sampling=SamplingParams(seed=-3)).sampling.seed == -3
