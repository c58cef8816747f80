"""Look-ahead in the engine: tokens, texts, log-probabilities and blocks are those without it, in any company.

The proposer is the real one over a model that likes to repeat itself, or one that knows the answers and errs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.support.engine_rig import BLOCK_SIZE, GREEDY, EngineRig, finish
from tests.support.inspection import state_of
from tests.support.proposers import knowing
from tests.support.toy_decoder import ToyDecoder

from teneral.runtime.engine import look_ahead
from teneral.runtime.engine.generation import Generation, GenerationResult
from teneral.runtime.engine.proposals import Proposal
from teneral.runtime.step.requests import FinishReason, Priority, SamplingParams

PATTERN = (5, 9, 11, 3)
VOCAB_SIZE = 64


class RepeatingDecoder(ToyDecoder):
    """Mostly goes on with what followed the last three tokens before: a model that quotes."""

    is_batch_invariant = True

    def logits_after(self, history: Sequence[int]) -> Any:
        logits = super().logits_after(history).copy()
        last = tuple(history[-3:])
        for end in range(len(history) - 1, 2, -1):
            if tuple(history[end - 3 : end]) == last:
                logits[history[end]] += 0 if (end + sum(last)) % 13 == 0 else 12
                return logits
        logits[list(PATTERN)] += 8
        return logits


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...] = PATTERN * 2
    max_tokens: int | None = 30
    sampling: SamplingParams = GREEDY
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    session: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    min_tokens: int = 0

    def submit(self, rig: EngineRig, **fields: Any) -> Generation:
        sampling = {"sampling": self.sampling}
        return rig.submit(**{**asdict(self), **sampling, **fields})


def answers(
    asked: Iterable[Asked], model: ToyDecoder | None = None, **options: Any
) -> list[GenerationResult]:
    """Of all at once."""
    with EngineRig(model=model or RepeatingDecoder(), start=False, **options) as rig:
        generations = [each.submit(rig) for each in asked]
        rig.engine.start()
        return [finish(generation) for generation in generations]


def outcome_of(result: GenerationResult) -> tuple[Any, ...]:
    prompt = None if result.prompt_logprobs is None else list(result.prompt_logprobs)
    return result.text, result.tokens, result.logprobs, result.finish_reason, prompt


samplings = st.one_of(
    st.just(GREEDY),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0]),
        seed=st.integers(0, 9),
        top_p=st.sampled_from([1.0, 0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.1]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        bad_words=st.sampled_from([(), ((9, 11),), ((3,),)]),
    ),
)
asks = st.builds(
    Asked,
    prompt=st.one_of(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple),
        st.integers(1, 14).map(lambda num: (PATTERN * 4)[:num]),
    ),
    max_tokens=st.integers(1, 30),
    sampling=samplings,
    num_top_logprobs=st.sampled_from([None, None, 0, 2]),
    num_prompt_logprobs=st.sampled_from([None, None, None, 1]),
    stop=st.sampled_from([(), ("J",), ("FJ", "LD")]),  # letters of PATTERN
    stop_token_ids=st.sampled_from([frozenset(), frozenset({11}), frozenset(range(40, 50))]),
    session=st.sampled_from(["", "a"]),
    tenant=st.sampled_from(["", "x", "y"]),
    priority=st.sampled_from(list(Priority)),
    min_tokens=st.sampled_from([0, 1]),
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([12, 16, 64]),
        "max_running": st.sampled_from([1, 3, 8]),
        "max_step_tokens": st.sampled_from([8, 16, 64]),
        "max_prefill_tokens": st.sampled_from([2, 8, 64]),
        "prefix_cache": st.booleans(),
        "look_ahead": st.sampled_from([None, 1, 3, 32]),
    }
)


@given(st.lists(asks, min_size=1, max_size=6), engines, st.sampled_from([None, 1, 2, 3]))
@settings(max_examples=60, deadline=None)
def test_answers_are_those_without_look_ahead(
    asked: list[Asked], options: dict[str, Any], errors: int | None
) -> None:
    alone = [answers([each], look_ahead=0)[0] for each in asked]
    with pytest.MonkeyPatch.context() as patch:
        if errors is not None:
            texts = [(*each.prompt, *result.tokens) for each, result in zip(asked, alone, strict=True)]
            patch.setattr(look_ahead, "NgramProposer", knowing(texts, VOCAB_SIZE, errors))
        together = answers(asked, **options)
    assert [outcome_of(each) for each in together] == [outcome_of(each) for each in alone]


def test_an_answer_that_repeats_itself_takes_fewer_steps() -> None:
    asked = Asked(max_tokens=60)
    model, without = RepeatingDecoder(), RepeatingDecoder()
    [found] = answers([asked], model)
    [expected] = answers([asked], without, look_ahead=0)
    assert outcome_of(found) == outcome_of(expected)
    assert found.num_accepted > 20
    assert model.num_passes <= without.num_passes - found.num_accepted
    assert sum(model.batch_tokens) == sum(without.batch_tokens) + found.num_rejected


def test_statistics_have_what_was_accepted_and_rejected() -> None:
    with EngineRig(model=RepeatingDecoder()) as rig:
        result = finish(Asked(max_tokens=60).submit(rig))
        statistics = rig.engine.statistics()
    assert statistics.accepted_look_ahead_total == result.num_accepted > 0
    assert statistics.rejected_look_ahead_total == result.num_rejected
    assert statistics.accepted_proposals_total == 0  # of the draft


def test_a_backend_without_the_promise_gets_no_proposals() -> None:
    class Plain(RepeatingDecoder):
        is_batch_invariant = False

    for model in (Plain(), RepeatingDecoder()):
        limit = None if isinstance(model, Plain) else 0
        [result] = answers([Asked(max_tokens=60)], model, look_ahead=limit)
        assert (result.num_accepted, result.num_rejected) == (0, 0)
        assert set(model.batch_tokens[1:]) == {1}


def test_weights_that_still_arrive_get_no_proposals() -> None:
    class Arriving(RepeatingDecoder):
        is_exact = False

    [result] = answers([Asked(max_tokens=60)], Arriving())
    assert (result.num_accepted, result.num_rejected) == (0, 0)


def always_wrong(tokens: Sequence[int]) -> Any:
    """A proposer of tokens that are never chosen."""

    class Wrong:
        def propose(self, max_tokens: int) -> Any:
            last = RepeatingDecoder().logits_after(tokens).argmax()
            return Proposal([int(last + 1) % VOCAB_SIZE] * max_tokens, 16)

    return Wrong()


def test_rejected_proposals_leave_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step the sequence has the blocks of its own tokens, and only those are found by others."""
    monkeypatch.setattr(look_ahead, "NgramProposer", always_wrong)
    with EngineRig(model=RepeatingDecoder(), look_ahead=9) as rig:
        state = state_of(rig.engine)

        def check(_: Any) -> None:
            with state.changed:
                state.check_integrity(rig.engine.max_context)
                for sequence in state.running:
                    num_computed = sequence.num_computed
                    assert len(sequence.blocks) == -(-num_computed // BLOCK_SIZE)
                    assert sequence.num_remembered <= num_computed // BLOCK_SIZE

        first = finish(Asked(max_tokens=50).submit(rig, on_event=check))
        assert first.num_accepted == 0
        assert first.num_rejected > 50
        again = Asked((*PATTERN * 2, *first.tokens[:40]), max_tokens=10).submit(rig)
        assert finish(again).tokens == first.tokens[40:]
        assert again.num_cached_tokens > 40


def test_proposals_preempt_no_sequence() -> None:
    """In a pool that just holds both answers."""
    asked = [Asked(prompt, max_tokens=24) for prompt in (PATTERN * 2, (1, *PATTERN * 2))]
    with EngineRig(model=RepeatingDecoder(), num_blocks=17, look_ahead=32, start=False) as rig:
        generations = [each.submit(rig) for each in asked]
        rig.engine.start()
        results = [finish(generation) for generation in generations]
        assert rig.engine.statistics().preemptions_total == 0
    assert sum(result.num_accepted for result in results) > 0


def test_batch_work_gets_proposals_only_among_itself() -> None:
    batch = Asked(max_tokens=9, priority=Priority.BATCH)
    shared, _ = answers([batch, Asked(max_tokens=90)], look_ahead=4)
    assert (shared.num_accepted, shared.num_rejected) == (0, 0)
    [alone] = answers([batch], look_ahead=4)
    assert alone.num_accepted > 0
    assert outcome_of(alone) == outcome_of(shared)


def test_a_caller_that_cancels_between_two_tokens_of_a_step_gets_no_more() -> None:
    with EngineRig(model=RepeatingDecoder(), look_ahead=32) as rig:
        seen: list[int] = []

        def stop(event: Any) -> None:
            seen.extend(event.tokens)
            if len(seen) == 20:
                generation.cancel()

        generation = Asked(max_tokens=None).submit(rig, on_event=stop)
        result = finish(generation)
    assert result.finish_reason is FinishReason.CANCELLED
    assert len(result.tokens) == 20


def test_a_step_that_fails_ends_its_sequences_and_no_others() -> None:
    model = RepeatingDecoder()

    def fail(number: int) -> None:
        if number == 4:
            raise ValueError("broken")

    model.before_forward = fail
    with EngineRig(model=model, look_ahead=32) as rig:
        with pytest.raises(Exception, match="broken"):
            finish(Asked(max_tokens=60).submit(rig))
        rig.engine.check_integrity()
        model.before_forward = lambda number: None
        assert len(finish(Asked(max_tokens=60).submit(rig)).tokens) == 60


class Machine(RuleBasedStateMachine):
    """Requests come, go on and are cancelled while others run; a small pool preempts them."""

    @initialize(options=engines, errors=st.sampled_from([None, 1, 2]))
    def begin(self, options: dict[str, Any], errors: int | None) -> None:
        self.patch = pytest.MonkeyPatch()
        self.rig = EngineRig(model=RepeatingDecoder(), **options)
        self.errors = errors
        self.under_way: list[tuple[Asked, Generation]] = []

    @rule(asked=asks)
    def submit(self, asked: Asked) -> None:
        if self.errors is not None:
            [alone] = answers([asked], look_ahead=0)
            texts = [(*asked.prompt, *alone.tokens)]
            self.patch.setattr(look_ahead, "NgramProposer", knowing(texts, VOCAB_SIZE, self.errors))
        self.under_way.append((asked, asked.submit(self.rig)))

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        if self.under_way:
            self.under_way[number % len(self.under_way)][1].cancel()

    @rule()
    def look(self) -> None:
        self.rig.engine.check_integrity()

    @rule()
    def settle(self) -> None:
        for asked, generation in self.under_way:
            result = finish(generation)
            [alone] = answers([asked], look_ahead=0)
            if result.finish_reason is FinishReason.CANCELLED:
                assert result.tokens == alone.tokens[: len(result.tokens)]
            else:
                assert outcome_of(result) == outcome_of(alone)
        self.under_way.clear()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.settle()
            self.patch.undo()
            self.rig.__exit__()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
