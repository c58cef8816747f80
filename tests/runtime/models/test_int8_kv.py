"""Keys and values in 8 bits change what a model says by little, and nothing about who shares what."""

from __future__ import annotations

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.load import patience_s
from tests.support.models import DictWeights, torch_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

WAIT_S = patience_s(60)


def decoder_of(family: str, dtype: torch.dtype = torch.float32):
    oracle = tiny_model(family, dtype=dtype)
    return torch_model(config_json(oracle), DictWeights(tensors_of(oracle)))


def logits(decoder, kind: KVKind, prompt: list[int], *, step: int) -> torch.Tensor:
    """All of the prompt's tokens, some at a time."""
    stepper = Stepper(decoder)
    stepper.kv = decoder.new_kv(64, 8, kind=kind)
    rows = [stepper.step({"a": prompt[start : start + step]})["a"] for start in range(0, len(prompt), step)]
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("step", [1, 7, 100])
def test_logits_are_near_those_of_the_models_own_dtype(family, step):
    decoder, prompt = decoder_of(family), prompt_of(40)
    exact = logits(decoder, KVKind.MODEL, prompt, step=step).log_softmax(-1)
    stored = logits(decoder, KVKind.INT8, prompt, step=step).log_softmax(-1)
    divergence = (exact.exp() * (exact - stored)).sum(-1)
    assert 0 < divergence.max() < 0.02
    assert float((exact.argmax(-1) == stored.argmax(-1)).float().mean()) >= 0.9


def test_a_step_at_a_time_is_the_same_as_all_at_once():
    """Each token is stored by itself: how many come together makes no difference."""
    decoder, prompt = decoder_of("llama"), prompt_of(40)
    one, all_at_once = (logits(decoder, KVKind.INT8, prompt, step=step) for step in (1, 100))
    torch.testing.assert_close(one, all_at_once, atol=2e-2, rtol=0)


def test_it_takes_half_of_bf16():
    decoder = decoder_of("llama", torch.bfloat16)
    whole, half = (decoder.kv_block_bytes(16, kind=kind) for kind in KVKind)
    head_dim = decoder.config.head_dim
    assert half / whole == (head_dim + 2) / (2 * head_dim)
    assert decoder.new_kv(3, 16, kind=KVKind.INT8).size_bytes == 3 * half


def test_an_engine_in_8_bits_shares_prefixes():
    decoder = decoder_of("llama")
    kv_bytes = 64 * decoder.kv_block_bytes(4, kind=KVKind.INT8)
    options = EngineOptions(kv_bytes=kv_bytes, block_size=4, kv_dtype=KVKind.INT8)
    engine = Engine(decoder, ToyTokenizer(), options=options, make_backend=host_backend)
    assert engine.statistics().num_blocks == 64
    engine.start()
    try:
        request = GenerationRequest("r", tuple(prompt_of(30)), 8, sampling=SamplingParams(temperature=0))
        first, second = (engine.submit(request) for _ in range(2))
        assert first.result(WAIT_S).tokens == second.result(WAIT_S).tokens
        third = engine.submit(request)
        assert third.result(WAIT_S).tokens == first.result(WAIT_S).tokens
        assert third.num_cached_tokens == 29
    finally:
        assert engine.stop(WAIT_S)
    engine.check_integrity()
