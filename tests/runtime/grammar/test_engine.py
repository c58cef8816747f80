"""Answers that follow grammars, out of a real engine over a tiny model with random weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from tests.support.grammar_answers import SCHEMA
from tests.support.instances import SteeredModel, TinyParts
from tests.support.load import patience_s

from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.grammar.spec import GrammarSpec
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import FinishReason, GenerationEvent, GenerationRequest, SamplingParams

TIMEOUT_S = patience_s(60)


class Rig:
    def __init__(self, parts: TinyParts, **options: Any) -> None:
        self.tokenizer = parts.tokenizer
        self.model = SteeredModel(parts.model)
        kv_bytes = options.pop("num_blocks", 64) * self.model.kv_block_bytes(16)
        self.engine = Engine(
            self.model,
            parts.tokenizer,
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            eos_token_ids=parts.tokenizer.eos_token_ids,
            make_backend=host_backend,
        )
        self.engine.start()

    def submit(
        self, prompt: str = "Hello", spec: GrammarSpec | None = None, seed: int | None = None, **fields: Any
    ) -> Any:
        return self.engine.submit(
            GenerationRequest(
                "r",
                tuple(self.tokenizer.encode(prompt)),
                grammar=None if spec is None else self.tokenizer.compile_grammar(spec),
                sampling=SamplingParams(temperature=0 if seed is None else 1.0, seed=seed),
                **{"max_tokens": 120, **fields},
            )
        )


@pytest.fixture
def rig(parts: TinyParts) -> Iterator[Rig]:
    rig = Rig(parts)
    yield rig
    rig.model.release()
    assert rig.engine.stop(TIMEOUT_S)
    rig.engine.check_integrity()


def test_every_answer_is_of_the_schema_while_others_are_free(rig: Rig) -> None:
    judge = jsonschema_rs.validator_for(SCHEMA)
    spec = GrammarSpec.json_schema(SCHEMA)
    free = [rig.submit(seed=seed, ignore_eos=True, max_tokens=40) for seed in range(4)]
    bound = [rig.submit(spec=spec, seed=seed) for seed in range(24)]
    results = [each.result(TIMEOUT_S) for each in bound]
    assert {result.finish_reason for result in results} == {FinishReason.STOP}
    for result in results:
        judge.validate(json.loads(result.text))
        assert " " not in result.text.split('"tags"')[0]  # compact
    assert len({result.text for result in results}) > 1
    alone = [rig.submit(seed=seed, ignore_eos=True, max_tokens=40).result(TIMEOUT_S) for seed in range(4)]
    assert [each.result(TIMEOUT_S).tokens for each in free] == [each.tokens for each in alone]


def test_the_beginning_is_sent_before_anything_is_computed(rig: Rig) -> None:
    rig.model.hold()
    generation = rig.submit(spec=GrammarSpec.json_schema(SCHEMA))
    first = next(generation.events(TIMEOUT_S))
    assert first.text
    assert '{"kind":"'.startswith(first.text)
    assert generation.timings.first_computed_s is None
    assert rig.engine.statistics().output_tokens_total == len(first.tokens)
    rig.model.release()
    held = generation.result(TIMEOUT_S)
    assert held.text == rig.submit(spec=GrammarSpec.json_schema(SCHEMA)).result(TIMEOUT_S).text


def test_an_answer_that_is_forced_as_a_whole_needs_no_model(rig: Rig) -> None:
    rig.model.hold()
    result = rig.submit(spec=GrammarSpec.json_schema({"const": {"ok": True}})).result(TIMEOUT_S)
    assert json.loads(result.text) == {"ok": True}
    assert result.finish_reason is FinishReason.STOP


def test_forced_tokens_save_steps(rig: Rig) -> None:
    result = rig.submit(spec=GrammarSpec.json_schema(SCHEMA)).result(TIMEOUT_S)
    assert rig.engine.statistics().steps_total < len(result.tokens)


def test_logprobs_are_there_for_every_token(rig: Rig) -> None:
    result = rig.submit(spec=GrammarSpec.choice(["yes", "no"]), num_top_logprobs=2).result(TIMEOUT_S)
    assert result.text in ("yes", "no")
    assert [entry.token for entry in result.logprobs] == list(result.tokens)


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, {"stop": ('"kin',)}])
def test_limits_hold_within_forced_tokens(rig: Rig, fields: dict[str, Any]) -> None:
    result = rig.submit(spec=GrammarSpec.json_schema(SCHEMA), **fields).result(TIMEOUT_S)
    if "stop" in fields:
        assert (result.text, result.finish_reason) == ("{", FinishReason.STOP)
    else:
        assert (len(result.tokens), result.finish_reason) == (3, FinishReason.LENGTH)


def test_preempted_answers_go_on_where_they_were(parts: TinyParts) -> None:
    spec = GrammarSpec.json_schema(SCHEMA)
    wide, narrow = Rig(parts), Rig(parts, num_blocks=14, max_context=100)
    try:
        prompts = ["Hello there", "What is it", "One more"]
        expected = [wide.submit(prompt, spec, seed=7).result(TIMEOUT_S).text for prompt in prompts]
        together = [narrow.submit(prompt, spec, seed=7) for prompt in prompts]
        assert [each.result(TIMEOUT_S).text for each in together] == expected
    finally:
        assert wide.engine.stop(TIMEOUT_S)
        assert narrow.engine.stop(TIMEOUT_S)


def test_events_come_in_order_from_two_threads(rig: Rig) -> None:
    """The caller's thread hands out the forced beginning, the engine's the rest."""
    texts: list[str] = []
    done = threading.Event()

    def on_event(event: GenerationEvent) -> None:
        texts.append(event.text)
        if event.finish_reason is not None:
            done.set()

    for _ in range(20):
        texts.clear()
        done.clear()
        request = GenerationRequest(
            "r",
            tuple(rig.tokenizer.encode("Hello")),
            max_tokens=120,
            grammar=rig.tokenizer.compile_grammar(GrammarSpec.json_schema(SCHEMA)),
            sampling=SamplingParams(temperature=0),
        )
        generation = rig.engine.submit(request, on_event)
        assert done.wait(TIMEOUT_S)
        assert "".join(texts) == generation.result(TIMEOUT_S).text
        json.loads("".join(texts))
