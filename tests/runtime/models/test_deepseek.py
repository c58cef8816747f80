"""DeepSeek V3 as it is published: config.json, the pool of its latents, FP8 in blocks, and a layer that is not used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.support.decoding import Stepper, oracle_logits, prompt_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import DictWeights, build_model
from tests.support.quantized import FP8
from tests.support.tiny_models import config_json, tiny_model, with_tensors

from teneral.loader.native.library import library
from teneral.runtime.backends.cuda.implemented import refusal_of_spec as kernels_refusal
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.native.implemented import refusal_of_spec
from teneral.runtime.errors import ModelError
from teneral.runtime.kv.storage import FloatBlocks, Int8Blocks, KVKind
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.tensors import DType

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_deepseek_v3_as_published() -> None:
    config = DecoderConfig.from_json(V3)
    spec = DecoderSpec.of(config, DType.BF16)
    token = spec.kv_shape(num_blocks=1, block_size=1)

    assert (config.max_context, config.rope.rotary_dim, spec.rotary.factor) == (163840, 64, 1.0)
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.experts is not None
    assert (config.experts.layers.index(True), config.experts.shared_size) == (3, 2048)
    assert FloatBlocks.block_bytes(token) == 61 * 576 * 2
    assert Int8Blocks.block_bytes(token) == 61 * (576 + 2)
    assert token.layout("bfloat16") == "bfloat16[61, 1, 1, 1, 576]"


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    kimi = DecoderConfig.from_json({**V3, "model_type": "kimi_k2"})

    assert replace(kimi, family="deepseek_v3") == DecoderConfig.from_json(V3)


@pytest.mark.skipif(library() is None, reason="the native libraries are not built here")
@pytest.mark.parametrize("kind", KVKind)
def test_fp8_in_blocks_is_multiplied_and_an_unused_layer_left_out(kind: KVKind) -> None:
    """Heads have 24 rows for keys and 16 for values, so blocks of 16 rows begin and end within them."""
    base = tiny_model("deepseek_v3", qk_nope_head_dim=24, num_attention_heads=8, num_key_value_heads=8)
    config, tensors, meant = foreign_checkpoint(base, FP8)
    oracle, prompt = with_tensors(base, meant), prompt_of(60)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(8, 16)

    decoder = build_model(config, DictWeights(tensors), backends=[NativeBackend("float32")])
    stepper = Stepper(decoder)
    stepper.kv = decoder.new_kv(64, 8, kind=kind)
    ours = torch.cat([stepper.step({"a": prompt[:33]})["a"], stepper.step({"a": prompt[33:]})["a"]])

    expected = oracle_logits(oracle, prompt)
    if kind is KVKind.MODEL:
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    else:
        assert 0 < (ours - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "topk_group", 1),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "kv_lora_rank", 1024),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "sparse"]),
    ],
)
def test_an_invalid_field_is_refused_by_its_key(family: str, key: str, value: Any) -> None:
    data = config_json(tiny_model(family))
    with pytest.raises(ModelError, match=key):
        DecoderConfig.from_json({**data, key: value})


def test_backends_say_what_of_latents_they_lack() -> None:
    spec = DecoderSpec.of(DecoderConfig.from_json({**V3, "kv_lora_rank": 640}), DType.BF16)

    assert "head_dim = 704" in str(refusal_of_spec(spec))
    assert "latent" in str(kernels_refusal(replace(spec, experts=None)))
