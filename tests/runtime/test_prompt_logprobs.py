"""Log-probabilities of a prompt's own tokens: all of them, whatever the steps that computed it were made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.support.decoding import oracle_logits, prompt_of
from tests.support.device_engine import DeviceRig, Repeater, decoder_of
from tests.support.early_rig import EarlyRig, packed_tiny
from tests.support.engine_rig import BLOCK_SIZE, TIMEOUT_S, EngineRig, finish
from tests.support.models import DictWeights, build_model
from tests.support.reference_kernels import ReferenceKernels
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import GenerationResult
from teneral.runtime.engine.sequence import Lane
from teneral.runtime.errors import ContextLengthError, RequestError
from teneral.runtime.step import logprobs
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.batch import Epoch, Rows, build_batch, join, select
from teneral.runtime.step.logprobs import PromptScores, token_logprob
from teneral.runtime.step.requests import FinishReason, FirstToken, GenerationRequest, SamplingParams
from teneral.runtime.step.state import SamplingState

PROMPT = tuple(number * 7 % 60 for number in range(5 * BLOCK_SIZE + 2))
GREEDY = SamplingParams(temperature=0)


def assert_of_toy(model: ToyDecoder, result: GenerationResult, prompt: tuple[int, ...], num_top: int) -> None:
    assert result.prompt_logprobs is not None
    expected = [
        token_logprob(model.logits_after(prompt[:end]), prompt[end], num_top) for end in range(1, len(prompt))
    ]
    assert list(result.prompt_logprobs) == expected
    for end, rank in enumerate(result.prompt_logprobs.ranks.tolist(), 1):
        scores = model.logits_after(prompt[:end])
        assert rank == 1 + int((scores > scores[prompt[end]]).sum())


@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 3, "max_step_tokens": 5, "max_running": 4}])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_they_are_the_models_and_come_with_the_first_event(options, max_tokens):
    with EngineRig(**options) as rig:
        generation = rig.submit(PROMPT, max_tokens=max_tokens, num_prompt_logprobs=3)
        assert_of_toy(rig.model, finish(generation), PROMPT, 3)
        first, *others = generation.events()
        assert first.prompt_logprobs is not None
        assert all(event.prompt_logprobs is None for event in others)
        result = finish(generation)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.tokens == rig.expected(PROMPT, max_tokens)


def test_a_prompt_of_one_token_has_none():
    with EngineRig() as rig:
        result = finish(rig.submit((1,), max_tokens=0, num_prompt_logprobs=0))
        assert result.prompt_logprobs is not None
        assert list(result.prompt_logprobs) == []


def test_a_prompt_that_was_seen_is_computed_again_and_found_by_the_next():
    with EngineRig() as rig:
        finish(rig.submit(PROMPT, max_tokens=4))
        asking = rig.submit(PROMPT, max_tokens=4, num_prompt_logprobs=0)
        assert_of_toy(rig.model, finish(asking), PROMPT, 0)
        assert asking.num_cached_tokens == 0
        after = rig.submit(PROMPT, max_tokens=4)
        assert finish(after).tokens == rig.expected(PROMPT, 4)
        assert after.num_cached_tokens == len(PROMPT) - 1


def test_many_that_preempt_each_other_get_all_of_theirs():
    with EngineRig(num_blocks=16, max_prefill_tokens=6, max_step_tokens=12, max_running=8) as rig:
        prompts = [(*PROMPT[: 9 + number], number) for number in range(8)]
        asked = [rig.submit(prompt, max_tokens=20, num_prompt_logprobs=2) for prompt in prompts]
        for generation, prompt in zip(asked, prompts, strict=True):
            assert_of_toy(rig.model, finish(generation), prompt, 2)
            assert finish(generation).tokens == rig.expected(prompt, 20)
        assert rig.engine.statistics().preemptions_total > 0


def test_they_are_bounded():
    with pytest.raises(RequestError, match="prompt_logprobs"):
        GenerationRequest("r", (1, 2), num_prompt_logprobs=21)
    with pytest.raises(RequestError, match="more than 262144"):
        GenerationRequest("r", (1,) * 20_000, num_prompt_logprobs=20)
    with EngineRig(model=ToyDecoder(max_context=8)) as rig, pytest.raises(ContextLengthError):
        rig.submit((1,) * 8, max_tokens=0, num_prompt_logprobs=0)


def test_rows_without_finite_scores_have_no_probability():
    scores = PromptScores((1, 2), 1)
    scores.add(0, np.full((1, 4), math.nan, np.float32))
    (entry,) = scores.result()
    assert (entry.logprob, entry.top) == (-math.inf, ())


def test_batches_keep_them_when_they_are_joined_and_taken_apart():
    prompts = [(1, 2, 3, 4), (5, 6, 7)]
    batches = []
    for number, prompt in enumerate(prompts):
        lane = Lane(Epoch.EXACT, list(prompt), SamplingState(GenerationRequest("r", prompt)))
        lane.blocks = (number,)
        rows = Rows(lane, lane.tokens, 1, len(prompt), 1, PromptScores(prompt, 0))
        batches.append(build_batch([rows], BLOCK_SIZE))
    joined = join(batches)
    assert [(each.position, each.start, each.length) for each in joined.scored] == [(1, 0, 2), (1, 3, 1)]
    second, _ = select(joined, [1])
    (kept,) = second.scored
    assert (kept.scores, kept.position, kept.start, kept.length) == (batches[1].scored[0].scores, 1, 0, 1)


def expected_of(oracle, prompt):
    """(rows, vocab) by transformers."""
    return oracle_logits(oracle, prompt).log_softmax(-1)


def assert_close(result: GenerationResult, rows: torch.Tensor, prompt: tuple[int, ...]) -> None:
    assert result.prompt_logprobs is not None
    for entry, row, token in zip(result.prompt_logprobs, rows, prompt[1:], strict=False):
        assert entry.token == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert entry.top[0][1] == pytest.approx(row.max().item(), abs=1e-3)
    assert len(result.prompt_logprobs) == len(prompt) - 1


@pytest.mark.parametrize("backend", [NativeBackend, TorchBackend])
def test_they_are_transformers_however_few_rows_of_logits_are_held(backend, monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_LOGITS_BYTES", 4 * 320 * 5)
    oracle = tiny_model("llama")
    prompt = tuple(prompt_of(33))
    model = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend()])
    kv_bytes = 50 * model.kv_block_bytes(4)
    engine = Engine(
        model,
        ToyTokenizer(),
        options=EngineOptions(kv_bytes=kv_bytes, block_size=4),
        make_backend=host_backend,
    )
    engine.start()
    request = GenerationRequest("r", prompt, 1, sampling=GREEDY, num_prompt_logprobs=2)
    assert_close(engine.submit(request).result(TIMEOUT_S), expected_of(oracle, prompt), prompt)
    engine.stop()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_device_says_the_same(recorded):
    oracle = tiny_model("llama")
    prompts = [tuple(prompt_of(length)) for length in (3, 30, 17)]
    recorder = Repeater() if recorded else None
    with DeviceRig(decoder_of("llama"), ReferenceKernels(), recorder=recorder, max_running=5) as rig:
        rig.engine.start()
        for generation, prompt in zip(rig.submit(prompts, 3, num_prompt_logprobs=1), prompts, strict=True):
            assert_close(generation.result(TIMEOUT_S), expected_of(oracle, prompt), prompt)


@pytest.mark.parametrize("first_token", list(FirstToken))
def test_while_weights_arrive_they_are_those_of_the_exact_ones(tmp_path, first_token):
    oracle = tiny_model("llama", hidden_size=64, num_hidden_layers=3)
    prompts = [tuple(prompt_of(length)) for length in (3, 30, 17)]
    with EarlyRig(packed_tiny(tmp_path), max_step_tokens=32) as rig:
        asked = [
            rig.engine.submit(
                GenerationRequest(
                    "r", prompt, 3, sampling=GREEDY, num_prompt_logprobs=1, first_token=first_token
                )
            )
            for prompt in prompts
        ]
        free = rig.engine.submit(GenerationRequest("r", prompts[1], 6, sampling=GREEDY))
        rig.start()
        rig.refine(*rig.groups)
        for generation, prompt in zip(asked, prompts, strict=True):
            assert_close(generation.result(TIMEOUT_S), expected_of(oracle, prompt), prompt)
        assert free.result(TIMEOUT_S).prompt_logprobs is None
