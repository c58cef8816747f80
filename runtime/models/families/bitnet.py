"""BitNet b1.58: Llama with norms before the last projections of attention and MLP, too, and squared ReLU."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..fields import Fields
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, default_theta=5e5)

_NAMES = LayerNames(attention_inner_norm="self_attn.attn_sub_norm", mlp_inner_norm="mlp.ffn_sub_norm")


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_ROPE, default_activation="relu2", norm_eps=1e-5)
    has_bias = config.boolean("attention_bias", default=False)
    return replace(common, qkv_bias=has_bias, output_bias=has_bias, names=_NAMES)
