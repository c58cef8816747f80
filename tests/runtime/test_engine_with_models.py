"""Engine and embedder over real models: in company, chunked and preempted they say what transformers says."""

import numpy as np
import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.proposers import knowing
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.native.library import library
from teneral.runtime.engine import look_ahead
from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import FinishReason, GenerationRequest, SamplingParams

NUM_TOKENS = 32
BLOCK_SIZE = 4
TIMEOUT_S = patience_s(60)
PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(5)]


@pytest.fixture(scope="module", params=["llama", "qwen3", "lfm2", "deepseek_v3", "gemma4_text"])
def model(request):
    """(transformers' model, our decoder over the same weights)"""
    oracle = tiny_model(request.param)
    return oracle, build_model(config_json(oracle), DictWeights(tensors_of(oracle)))


def say(decoder, sampling, *, num_blocks, **options):
    """The tokens of every prompt, run together, and the statistics."""
    kv_bytes = num_blocks * decoder.kv_block_bytes(BLOCK_SIZE)
    engine = Engine(
        decoder,
        ToyTokenizer(),
        options=EngineOptions(kv_bytes=kv_bytes, block_size=BLOCK_SIZE, max_context=96, **options),
        make_backend=host_backend,
    )
    generations = [
        engine.submit(GenerationRequest(str(number), prompt, NUM_TOKENS, sampling))
        for number, prompt in enumerate(PROMPTS)
    ]
    engine.start()
    results = [generation.result(TIMEOUT_S) for generation in generations]
    engine.check_integrity()
    statistics = engine.statistics()
    assert engine.stop(TIMEOUT_S)
    assert statistics.free_blocks == statistics.num_blocks
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    return [result.tokens for result in results], statistics


def test_greedy_tokens_are_those_of_transformers(model):
    oracle, decoder = model
    tokens, _ = say(decoder, SamplingParams(temperature=0), num_blocks=200)
    with torch.no_grad():
        expected = [tuple(oracle_greedy(oracle, prompt, NUM_TOKENS)) for prompt in PROMPTS]
    assert tokens == expected


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9, seed=11)],
    ids=["greedy", "seeded"],
)
def test_chunks_and_preemption_change_no_token(model, sampling):
    _, decoder = model
    roomy, _ = say(decoder, sampling, num_blocks=200)
    tight, statistics = say(
        decoder, sampling, num_blocks=26, max_step_tokens=24, max_running=5, max_prefill_tokens=7
    )
    assert statistics.preemptions_total > 0
    assert tight == roomy


@pytest.mark.skipif(library() is None, reason="without the native core there is no look-ahead")
def test_rejected_look_ahead_changes_no_token(model, monkeypatch):
    _, decoder = model
    greedy = SamplingParams(temperature=0)
    expected, _ = say(decoder, greedy, num_blocks=200, look_ahead=0)
    texts = [(*prompt, *tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(look_ahead, "NgramProposer", knowing(texts, 250, seed=1))
    tokens, statistics = say(decoder, greedy, num_blocks=200, look_ahead=9)
    assert tokens == expected
    assert statistics.rejected_look_ahead_total > 0
    assert statistics.accepted_look_ahead_total > 0


def test_embeddings_are_the_encoders_in_any_batch():
    oracle = tiny_model("bert")
    encoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    texts = [list(prompt) for prompt in PROMPTS]
    embedder = Embedder(encoder, max_batch_tokens=64)
    futures = [embedder.embed([text]) for text in texts] + [embedder.embed(texts)]
    embedder.start()
    *alone, together = [future.result(TIMEOUT_S) for future in futures]
    assert embedder.stop(TIMEOUT_S)
    expected = np.concatenate([encoder.embed([text]) for text in texts])
    np.testing.assert_allclose(together, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(alone), expected, atol=1e-5, rtol=1e-5)
