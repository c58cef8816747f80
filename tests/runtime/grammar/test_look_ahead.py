"""Look-ahead under grammars: answers are those without it, and no proposal is accepted that the grammar forbids."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.grammar_answers import SCHEMA
from tests.support.instances import TinyParts
from tests.support.load import patience_s
from tests.support.proposers import knowing

from teneral.runtime.engine import look_ahead
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.grammar.spec import GrammarSpec
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import FinishReason, GenerationRequest, SamplingParams
from teneral.runtime.step.state import SamplingState

TIMEOUT_S = patience_s(60)
SPECS = (GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex("(ab|cd){3,9}(e|f)"))


class Promising:
    """The model, which computes fp32 in one thread, so that its choices do not depend on other rows."""

    is_batch_invariant = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def answers(parts: TinyParts, requests: list[GenerationRequest], **options: Any) -> list[Any]:
    model = Promising(parts.model)
    engine = Engine(
        model,
        parts.tokenizer,
        options=EngineOptions(kv_bytes=128 * model.kv_block_bytes(16), **options),
        eos_token_ids=parts.tokenizer.eos_token_ids,
        make_backend=host_backend,
    )
    generations = [engine.submit(request) for request in requests]
    engine.start()
    results = [generation.result(TIMEOUT_S) for generation in generations]
    assert engine.stop(TIMEOUT_S)
    engine.check_integrity()
    return results


def request_of(parts: TinyParts, spec: GrammarSpec, seed: int | None, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        "r",
        tuple(parts.tokenizer.encode("Hello")),
        120,
        SamplingParams(temperature=0 if seed is None else 1.0, seed=seed),
        grammar=parts.tokenizer.compile_grammar(spec),
        **fields,
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(SPECS), st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, None, 1])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 2, 9]),
    st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_answers_are_those_without_look_ahead(
    parts: TinyParts, asked: list[Any], max_proposals: int | None, errors: int
) -> None:
    requests = [
        request_of(parts, spec, seed, num_top_logprobs=num_logprobs) for spec, seed, num_logprobs in asked
    ]
    alone = [answers(parts, [request], look_ahead=0)[0] for request in requests]
    texts = [
        (*request.prompt_tokens, *result.tokens) for request, result in zip(requests, alone, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look_ahead, "NgramProposer", knowing(texts, 250, errors))
        together = answers(parts, requests, look_ahead=max_proposals)
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.text for each in together] == [each.text for each in alone]
    judge = jsonschema_rs.validator_for(SCHEMA)
    for (spec, _, _), result in zip(asked, together, strict=True):
        if spec is SPECS[0] and result.finish_reason is FinishReason.STOP:
            judge.validate(json.loads(result.text))


def test_a_guess_is_cut_where_the_grammar_forbids_it_and_follows_what_it_forces(parts: TinyParts) -> None:
    encode = parts.tokenizer.encode
    state = SamplingState(request_of(parts, GrammarSpec.regex("(a|b)(c|d)"), None))
    [a], [c], [x] = (encode(letter, add_special_tokens=False) for letter in "acx")
    assert state.possible([a, c]) == [a, c]
    assert state.possible([a, x, c]) == [a]
    assert state.possible([x, a]) == []
    assert state.possible([a, c, c]) == [a, c]
    state.add(a)  # guessing moved nothing
    assert state.possible([c]) == [c]
    forcing = SamplingState(request_of(parts, GrammarSpec.json_schema(SCHEMA), None))
    forced = forcing.forced()
    assert forced
    assert forcing.possible([x] * 99)[: len(forced)] == forced


def test_without_a_grammar_any_guess_is_possible(parts: TinyParts) -> None:
    assert SamplingState(GenerationRequest("r", (1,))).possible([3, 4]) == [3, 4]
