"""On the native core a request's tokens and log-probabilities are its own: the same bits alone and in any company.

With other sequences in its steps, a prompt in pieces, sequences that have to begin again, prefixes that are found,
keys and values in 8 bits, any number of threads, drafts that are confirmed, and look-ahead, right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.early_rig import EarlyRig, packed_tiny
from tests.support.models import DictWeights, build_model
from tests.support.proposers import knowing
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.native.library import library
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.engine import look_ahead
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library for this processor")

TIMEOUT_S = 60.0
BLOCK_SIZE = 8
STEM = tuple((index * 11) % 250 for index in range(60))
MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama bf16": ("llama", torch.bfloat16, {}),
    "qwen3 fp32": ("qwen3", torch.float32, {}),
    "mistral bf16, that forgets": ("mistral", torch.bfloat16, {"sliding_window": 12}),
}
_built: dict[str, Any] = {}


def decoder_of(name: str) -> Any:
    if name not in _built:
        family, dtype, overrides = MODELS[name]
        oracle = tiny_model(family, dtype=dtype, **overrides)
        _built[name] = build_model(
            config_json(oracle), DictWeights(tensors_of(oracle)), backends=[NativeBackend()]
        )
    return _built[name]


@dataclass(frozen=True)
class Asked:
    """A request, and how much of the others' beginning it shares."""

    num_shared: int
    own: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams

    def request(self, number: int) -> GenerationRequest:
        prompt = (*STEM[: self.num_shared], *self.own)
        return GenerationRequest(
            str(number), prompt, self.num_tokens, self.sampling, num_top_logprobs=3, ignore_eos=True
        )


samplings = st.one_of(
    st.just(SamplingParams(temperature=0)),
    st.builds(
        SamplingParams,
        seed=st.integers(0, 99),
        temperature=st.sampled_from([0.7, 1.3]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 12]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
    ),
)
asked = st.builds(
    Asked,
    num_shared=st.sampled_from([0, 8, 21, 40, 60]),
    own=st.lists(st.integers(0, 250), min_size=1, max_size=25).map(tuple),
    num_tokens=st.integers(1, 12),
    sampling=samplings,
)


def answers_of(
    decoder: Any, kind: KVKind, requests: Sequence[Asked], *, num_blocks: int, **options: Any
) -> list[Any]:
    """What an engine says to these when they come together: tokens and log-probabilities."""
    kv_bytes = num_blocks * decoder.kv_block_bytes(BLOCK_SIZE, kind=kind)
    engine = Engine(
        decoder,
        ToyTokenizer(),
        options=EngineOptions(
            kv_bytes=kv_bytes, block_size=BLOCK_SIZE, max_context=120, kv_dtype=kind, **options
        ),
        make_backend=host_backend,
    )
    generations = [engine.submit(each.request(number)) for number, each in enumerate(requests)]
    engine.start()
    results = [generation.result(TIMEOUT_S) for generation in generations]
    assert engine.stop(TIMEOUT_S)
    engine.check_integrity()
    return [(result.tokens, result.logprobs) for result in results]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(list(MODELS)),
    kind=st.sampled_from(list(KVKind)),
    requests=st.lists(asked, min_size=2, max_size=7),
    chunk=st.sampled_from([1, 7, 16, 64]),
    num_blocks=st.sampled_from([16, 24, 200]),
    threads=st.sampled_from([1, 2, 3]),
    max_proposals=st.sampled_from([0, None, 1, 9]),
    errors=st.integers(0, 9),
)
def test_a_request_gets_the_bits_that_it_gets_alone(
    model, kind, requests, chunk, num_blocks, threads, max_proposals, errors
):
    decoder = decoder_of(model)
    own = library()
    assert own is not None
    alone = [
        answers_of(decoder, kind, [each], num_blocks=200, prefix_cache=False, look_ahead=0)[0]
        for each in requests
    ]
    texts = [
        (*each.request(0).prompt_tokens, *tokens) for each, (tokens, _) in zip(requests, alone, strict=True)
    ]
    own.functions.tn_set_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look_ahead, "NgramProposer", knowing(texts, 250, errors))
        together = answers_of(
            decoder,
            kind,
            requests,
            num_blocks=num_blocks,
            max_running=min(chunk, 7),
            max_step_tokens=chunk,
            max_prefill_tokens=chunk,
            look_ahead=max_proposals,
        )
    assert together == alone


def test_sequences_that_begin_again_say_the_same():
    """In a pool that does not hold them all."""
    decoder = decoder_of("llama bf16")
    requests = [
        Asked(0, tuple(range(number, number + 30)), 30, SamplingParams(temperature=0)) for number in range(6)
    ]
    roomy = answers_of(decoder, KVKind.MODEL, requests, num_blocks=200)
    assert answers_of(decoder, KVKind.MODEL, requests, num_blocks=18, max_running=6) == roomy


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_tiny(tmp_path_factory.mktemp("native"))


def test_a_confirmed_draft_is_what_the_exact_weights_say_alone(artifact: Path) -> None:
    prompts = [
        tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(3)
    ]
    with EarlyRig(artifact, backends=[NativeBackend()]) as rig:
        rig.start()
        generations = [rig.submit(prompt) for prompt in prompts]
        rig.refine()
        drafted = [generation.result(TIMEOUT_S).tokens for generation in generations]
        alone = [rig.submit(prompt).result(TIMEOUT_S).tokens for prompt in prompts]
    assert drafted == alone
