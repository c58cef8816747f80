"""Hunyuan (dense): Llama with norms of heads behind their rotation, whose base files stretch by alpha."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..fields import Fields
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, may_have_alpha=True)
_NAMES = LayerNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_ROPE, norm_eps=1e-5)
    has_bias = config.boolean("attention_bias", default=False)
    return replace(
        common, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True, late_qk_norm=True, names=_NAMES
    )
