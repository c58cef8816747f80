"""Families besides those like Llama, as transformers computes them, by each backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, oracle_greedy, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.runtime.backends.cuda.implemented import IMPLEMENTED as DEVICE_KERNELS
from teneral.runtime.backends.native.backend import NativeBackend, ReferenceBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.decoder_config import (
    FAMILY_MODULES,
    DecoderConfig,
    LayerRotary,
    Norm,
    decoder_architectures,
)
from teneral.runtime.models.decoder_tensors import take_decoder
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
    "exaone4": ("exaone4", {}),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 with biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
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


def oracle_of(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    family, overrides = VARIANTS[variant]
    return tiny_model(family, dtype=dtype, **overrides)


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

    assert ours == {name: oracle_greedy(oracle, prompt, 20) for name, prompt in prompts.items()}


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


@each_backend
@each_variant
def test_bf16_is_as_close_to_exact_as_the_oracle_is(variant, backend):
    oracle, exact = oracle_of(variant, torch.bfloat16), oracle_of(variant)
    exact.load_state_dict(oracle.state_dict())
    prompt = prompt_of(75)
    truth = oracle_logits(exact, prompt)

    ours = Stepper(decoder_of(oracle, backend)).step({"a": prompt})["a"]

    own_error = (ours - truth).pow(2).mean(-1).sqrt()
    oracle_error = (oracle_logits(oracle, prompt) - truth).pow(2).mean(-1).sqrt()
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


# -- config.json ------------------------------------------------------------------------------------------

# As published, in the spelling of transformers 4
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3 = {
    **GEMMA_2,
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}

LFM_2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}


def test_gemma_2_as_published():
    config = DecoderConfig.from_json(GEMMA_2)
    spec = DecoderSpec.of(config, DType.BF16)

    assert config.tie_word_embeddings
    assert config.windows[:4] == (4096, None, 4096, None)
    assert (spec.score_cap, spec.logit_cap, spec.norm) == (50.0, 30.0, Norm.RMS_PLUS_ONE)
    assert (spec.embedding_scale, spec.attention_scale) == (48.0, 1 / 16)
    assert spec.input_norms
    assert spec.output_norms


def test_gemma_3_as_published():
    config = DecoderConfig.from_json(GEMMA_3)
    spec = DecoderSpec.of(config, DType.BF16)

    assert config.windows[4:7] == (512, None, 512)
    assert config.layer_rotary[4:7] == (LayerRotary.LOCAL, LayerRotary.MAIN, LayerRotary.LOCAL)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert spec.embedding_scale == 34.0, "sqrt(1152) as bf16 has it"
    assert (spec.score_cap, spec.logit_cap) == (None, None)


def test_phi_4_mini_as_published():
    config = DecoderConfig.from_json(PHI_4_MINI)

    assert config.rope.rotary_dim == 96
    assert config.max_context == 4096
    np.testing.assert_allclose(config.rope.attention_factor, 1.1902380714238083)
    assert (
        DecoderConfig.from_json({**PHI_4_MINI, "rope_scaling": {**PHI_4_MINI["rope_scaling"], "type": "su"}})
        == config
    )


def test_lfm2_as_published():
    config = DecoderConfig.from_json(LFM_2)
    spec = DecoderSpec.of(config, DType.BF16)

    assert config.intermediate_size == 8192
    assert config.tie_word_embeddings
    assert config.rope.theta == 1e6
    assert [index for index in range(16) if not config.convolves(index)] == [2, 5, 8, 10, 12, 14]
    assert spec.kv_layers()[:5] == (0, 2, 4, 5, 7), "a row of a convolution fills two of the pool's layers"
    assert spec.kv_shape(num_blocks=1, block_size=1).num_layers == 6 + 2 * 10


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({**LFM_2, "full_attn_idxs": [2, "5"]}, "full_attn_idxs"),
        ({**LFM_2, "layer_types": ["conv"] * 15}, "layer_types"),
        ({**LFM_2, "layer_types": ["conv"] * 15 + ["mamba"]}, "layer_types"),
        ({**LFM_2, "conv_L_cache": 17}, "conv_L_cache"),
        ({**LFM_2, "block_multiple_of": 0}, "block_multiple_of"),
        ({**LFM_2, "block_ff_dim": 1 << 20, "block_ffn_dim_multiplier": 9.0}, "block_ffn_dim_multiplier"),
        ({**GEMMA_2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA_2, "hidden_activation": "gelu_7"}, "hidden_activation"),
        ({**GEMMA_2, "attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ({**GEMMA_2, "final_logit_softcapping": "30"}, "final_logit_softcapping"),
        ({**GEMMA_2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**GEMMA_2, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**GEMMA_2, "layer_types": ["full_attention"] * 25}, "layer_types"),
        ({**GEMMA_3, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({**GEMMA_3, "rope_local_base_freq": -1}, "rope_local_base_freq"),
        ({**GEMMA_3, "rope_parameters": {"sliding_attention": {"rope_type": "x"}}}, "rope_type"),
        ({**GEMMA_3, "rope_parameters": {"full_attention": 7}}, "full_attention"),
        (
            {**GEMMA_3, "rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear"}},
            "rope_scaling",
        ),
        ({**PHI_4_MINI, "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({**PHI_4_MINI, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}}, "long_factor"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(data, named):
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json(data)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "num_local_experts", 0),
        ("mixtral", "num_local_experts", 1 << 20),
        ("mixtral", "num_experts_per_tok", 5),
        ("qwen3_moe", "moe_intermediate_size", -1),
        ("qwen3_moe", "mlp_only_layers", "all"),
        ("qwen3_moe", "mlp_only_layers", [True]),
        ("glm4_moe", "n_group", 3),
        ("glm4_moe", "topk_group", 1),
        ("glm4_moe", "routed_scaling_factor", 0.0),
        ("lfm2_moe", "num_dense_layers", -1),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "norm_topk_prob", "yes"),
        ("olmoe", "clip_qkv", 8.0),
    ],
)
def test_an_invalid_mixture_is_refused_by_its_key(family, key, value):
    data = config_json(tiny_model(family))
    with pytest.raises(ModelError, match=key):
        DecoderConfig.from_json({**data, key: value})


@pytest.mark.parametrize("layers", [[1, 0], [1, 0, 2], [True, False, True], "101", {}])
def test_invalid_layers_without_rotation_are_refused(layers):
    data = config_json(tiny_model("smollm3"))
    with pytest.raises(ModelError, match="no_rope_layers"):
        DecoderConfig.from_json({**data, "no_rope_layers": layers})


@pytest.mark.parametrize(
    "key", ["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"]
)
@pytest.mark.parametrize("value", [0, -1.0, "1", True, float("nan")])
def test_invalid_multipliers_are_refused(key, value):
    data = config_json(tiny_model("granite"))
    with pytest.raises(ModelError, match=key):
        DecoderConfig.from_json({**data, key: value})


def test_the_hint_for_an_unknown_architecture_names_all_that_generate():
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_json({"architectures": ["GPT2LMHeadModel"]})

    assert all(names[0] in caught.value.hint for names in decoder_architectures().values())


def test_every_family_can_be_imported_and_reads_a_model_of_its_own():
    for family in FAMILY_MODULES:
        oracle = tiny_model(family)
        config = DecoderConfig.from_json(config_json(oracle))
        weights, _ = take_decoder(config, DictWeights(tensors_of(oracle)))
        assert len(weights.layers) == config.num_layers == 3
