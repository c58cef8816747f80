"""OLMoE: a mixture of experts in each layer, and one norm over all heads of the queries or keys."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common
from ..experts_config import read_experts
from ..fields import Fields


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if "clip_qkv" in config:
        raise config.wrong("clip_qkv", "which is not supported")
    common = read_common(config, family, norm_eps=1e-5)
    attention_bias = config.boolean("attention_bias", default=False)
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=[True] * common.num_layers,
        sum_to_1=config.boolean("norm_topk_prob", default=False),
        rounds_weights=True,
    )
    return replace(
        common,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        joint_qk_norm=True,
        experts=experts,
    )
