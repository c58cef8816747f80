"""OLMo 2: norms behind attention and MLP instead of before, and one norm over all heads of the queries or keys."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, Norm, read_common
from ..fields import Fields

_NAMES = LayerNames(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    attention_bias = config.boolean("attention_bias", default=False)
    return replace(
        read_common(config, family, norm_eps=1e-5),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        joint_qk_norm=True,
        norm=Norm.RMS_WIDE,
        names=_NAMES,
        wide_rotary=True,
    )
