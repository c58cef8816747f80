"""Fields of families' config.json: as published, and wrong ones refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import DECODERS, config_json, tensors_of, tiny_model

from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import (
    DecoderConfig,
    LayerRotary,
    Norm,
    decoder_architectures,
)
from teneral.runtime.models.decoder_tensors import take_decoder
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.tensors import DType

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

PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 25000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}

GPT_2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def test_gpt_2_as_published():
    config = DecoderConfig.from_json(GPT_2)
    spec = DecoderSpec.of(config, DType.F32)

    assert (config.intermediate_size, config.max_context, config.admitting(4096).max_context) == (
        3072,
        1024,
        1024,
    )
    assert (spec.learned_positions, spec.tied_head, spec.head_dim) == (True, True, 64)
    assert set(spec.layer_rotary) == {LayerRotary.NONE}
    stretched = {**GPT_2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert DecoderConfig.from_json(stretched).max_context == 1024
    for key in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        with pytest.raises(ModelError, match=key):
            DecoderConfig.from_json({**GPT_2, key: True})


def test_an_old_checkpoint_of_gpt_2_has_masks_and_names_without_a_prefix():
    oracle, prompt = tiny_model("gpt2"), prompt_of(20)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(oracle).items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512, dtype=torch.uint8).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    ours = Stepper(build_model(config_json(oracle), DictWeights(tensors))).step({"a": prompt})["a"]

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


def test_pythia_as_published():
    config = DecoderConfig.from_json(PYTHIA)
    spec = DecoderSpec.of(config, DType.F16)

    assert (config.rope.theta, config.rope.rotary_dim) == (25_000.0, 16)
    assert (spec.parallel_norms, spec.interleaved_qkv, spec.qkv_bias, spec.tied_head) == (
        True,
        True,
        True,
        False,
    )
    assert not DecoderSpec.of(
        DecoderConfig.from_json(PYTHIA | {"use_parallel_residual": False}), DType.F16
    ).parallel_norms


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
        ({**LFM_2, "block_ff_dim": 0}, "block_ff_dim is 0, but must"),
        ({**GPT_2, "n_layer": "12"}, "n_layer is '12', but must"),
        ({**GPT_2, "n_head": None}, "config.json has no n_head or num_attention_heads"),
        ({**LFM_2, "block_ff_dim": 1 << 20, "block_ffn_dim_multiplier": 9.0}, "block_ffn_dim_multiplier"),
        ({**GEMMA_2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA_3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
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
        ("ernie4_5_moe", "use_bias", True),
        ("ernie4_5_moe", "moe_layer_interval", 0),
        ("ernie4_5_moe", "moe_norm_min", 0.1),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "norm_topk_prob", "yes"),
        ("olmoe", "clip_qkv", 8.0),
        ("qwen2_moe", "shared_expert_intermediate_size", 0),
        ("qwen2_moe", "use_sliding_window", True),
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
        DecoderConfig.from_json({"architectures": ["GPTJForCausalLM"]})

    assert all(names[0] in caught.value.hint for names in decoder_architectures().values())


def test_every_family_can_be_imported_and_reads_a_model_of_its_own():
    for family in DECODERS:
        oracle = tiny_model(family)
        config = DecoderConfig.from_json(config_json(oracle))
        weights, _ = take_decoder(config, DictWeights(tensors_of(oracle)))
        assert len(weights.layers) == config.num_layers == 3


@pytest.mark.parametrize("family", ["stablelm", "phi"])
def test_norms_of_heads_with_biases_are_refused(family):
    data = config_json(tiny_model(family))
    with pytest.raises(ModelError, match="qk_layernorm"):
        DecoderConfig.from_json({**data, "qk_layernorm": True})
