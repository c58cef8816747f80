"""Families besides those like Llama, as transformers computes them, by each backend."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.runtime.backends.cuda.implemented import IMPLEMENTED as DEVICE_KERNELS
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.decoder_config import (
    DecoderConfig,
)
from teneral.runtime.models.executor import refusal_of
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.tensors import DType

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
    "rope_theta": 10_000.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2, a key head a query head": ("gemma2", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {}),
    "gemma3, stretched": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
    "granite": ("granite", {}),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2, a key head a query head": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "use_qkv_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi": ("phi", {}),
    "bitnet": ("bitnet", {}),
    "gpt2": ("gpt2", {}),
    "gpt2, unscaled, with a head of its own": (
        "gpt2",
        {"scale_attn_weights": False, "n_inner": None, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron with biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "exaone4": ("exaone4", {}),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 with biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        {
            "attention_bias": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe, one layer, no shared expert": (
        "ernie4_5_moe",
        {"moe_layer_end_index": 1, "moe_num_shared_experts": 0, "moe_k": 3, "tie_word_embeddings": False},
    ),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 12}),
    "phi3, a part of each head": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3 longrope": (
        "phi3",
        {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "ministral": (
        "ministral",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4, whole heads": (
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "cohere2 with biases": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"sliding_window": 12}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, plain layers": (
        "qwen2_moe",
        {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, plain layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, few biases": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "swiglu_alpha": 0.7,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2, biases, a row in two of the pool's layers": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "full_attention"],
            "num_key_value_heads": 1,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 48,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe, no corrections": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, one group, two shared experts": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "use_qk_norm": False, "attention_bias": True},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, low-rank queries, odd sizes": (
        "deepseek_v2",
        {"q_lora_rank": 40, "kv_lora_rank": 36, "v_head_dim": 20, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, heads as published, whole queries": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "llama4_text": ("llama4_text", {}),
    "llama4_text, several experts, no chunks, no norms": (
        "llama4_text",
        {
            "attention_chunk_size": None,
            "use_qk_norm": False,
            "num_experts_per_tok": 2,
            "moe_layers": None,
            "interleave_moe_layer_step": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama4_text, as published": (
        "llama4_text",
        {
            "num_hidden_layers": 5,
            "no_rope_layers": [],
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 32,
            "attn_temperature_tuning": False,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, windows": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}

BACKENDS: list[Any] = [TorchBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def oracle_of(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    family, overrides = VARIANTS[variant]
    return tiny_model(family, dtype=dtype, **overrides)


@functools.cache
def family_has_experts(variant: str) -> bool:
    return DecoderConfig.from_json(config_json(oracle_of(variant))).experts is not None


def decoder_of(oracle: Any, backend: Any) -> Decoder:
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])
    assert isinstance(decoder, Decoder)
    return decoder


@each_backend
@each_variant
def test_a_prefill_gives_the_oracles_logits_in_every_row(variant, backend):
    oracle, prompt = oracle_of(variant), prompt_of(75)

    ours = Stepper(decoder_of(oracle, backend)).step({"a": prompt})["a"]

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@each_backend
@pytest.mark.parametrize(
    "variant", [name for name, (family, _) in VARIANTS.items() if name in (family, "gemma3")]
)
def test_greedy_tokens_of_a_batch_of_different_lengths_are_the_oracles(variant, backend):
    oracle = oracle_of(variant)
    prompts = {"short": prompt_of(3), "middle": prompt_of(17), "long": prompt_of(41)}

    ours = Stepper(decoder_of(oracle, backend)).greedy(prompts, 20)

    assert ours == {name: oracle_behind(oracle, prompt, ours[name]) for name, prompt in prompts.items()}


@each_backend
@each_variant
def test_chunks_in_company_give_the_logits_of_a_whole_prefill(variant, backend):
    decoder = decoder_of(oracle_of(variant), backend)
    prompt, other = prompt_of(75), prompt_of(70, seed=1)
    whole = Stepper(decoder).step({"a": prompt})["a"]
    stepper = Stepper(decoder)
    stepper.step({"b": other[:25]})

    rows = [
        stepper.step({"b": other[25 + at // 2 : 30 + at // 2], "a": prompt[at : at + 10]})["a"]
        for at in range(0, len(prompt), 10)
    ]

    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-4, rtol=1e-4)
    if backend.name == "native":
        assert torch.equal(torch.cat(rows), whole)


@functools.cache
def truth_and_error_in_bf16(variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact logits of a model in bf16, and the error of transformers' in each row."""
    oracle, prompt = oracle_of(variant, torch.bfloat16), prompt_of(75)
    family, overrides = VARIANTS[variant]
    exact = tiny_model(family, **overrides)
    exact.load_state_dict(oracle.state_dict())
    truth = oracle_logits(exact, prompt)
    return truth, (oracle_logits(oracle, prompt) - truth).pow(2).mean(-1).sqrt()


@each_backend
@each_variant
def test_bf16_is_as_close_to_exact_as_the_oracle_is(variant, backend):
    truth, oracle_error = truth_and_error_in_bf16(variant)

    decoder = decoder_of(oracle_of(variant, torch.bfloat16), backend)
    ours = Stepper(decoder).step({"a": prompt_of(75)})["a"]

    own_error = (ours - truth).pow(2).mean(-1).sqrt()
    if family_has_experts(variant):  # a row for which rounding chooses another expert is far off
        assert own_error.quantile(0.25) < 1.25 * oracle_error.quantile(0.25)
    else:
        assert own_error.mean() < 1.25 * oracle_error.mean()


@each_variant
def test_numpy_computes_the_same(variant):
    oracle, prompt = oracle_of(variant), prompt_of(30)

    ours = Stepper(decoder_of(oracle, ReferenceBackend())).step({"a": prompt})["a"]

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@each_backend
def test_longrope_asked_for_beyond_the_pretrained_context_is_that_of_a_long_prefill(backend):
    oracle, prompt = oracle_of("phi3 longrope"), prompt_of(150)
    weights = DictWeights(tensors_of(oracle))

    short, same, longer = (
        build_model(config_json(oracle), weights, backends=[backend], max_context=max_context)
        for max_context in (None, 100, 400)
    )
    ours = Stepper(longer).step({"a": prompt})["a"]

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)
    assert [each.config.max_context for each in (short, same, longer)] == [128, 128, 400]
    assert short.numerics == same.numerics == short.executor.numerics
    assert longer.numerics == f"{short.numerics} context 400"


@pytest.mark.parametrize(
    ("family", "overrides", "longest"),
    [
        ("llama", {}, 512),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        ("gemma3_text", VARIANTS["gemma3, stretched"][1], 512),
        ("phi3", VARIANTS["phi3 longrope"][1], 512),
    ],
)
def test_no_context_is_admitted_that_the_rotary_embedding_was_not_made_for(family, overrides, longest):
    config = DecoderConfig.from_json(config_json(tiny_model(family, **overrides)))

    assert config.admitting(1 << 20).max_context == longest
    assert config.admitting(0) == config


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "granite", "olmo2", "smollm3", "glm", "cohere", "mixtral", "gpt_oss"]
)
def test_a_devices_kernels_refuse_what_they_do_not_implement(family):
    spec = DecoderSpec.of(DecoderConfig.from_json(config_json(tiny_model(family))), DType.BF16)

    assert refusal_of(spec, DEVICE_KERNELS, "kernels") is not None
