"""ERNIE 4.5: Llama that turns number 2 i of a head with number 2 i + 1."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common
from ..fields import Fields
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, default_theta=5e5)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    default_head_dim = None if config.states("head_dim") else 128
    common = read_common(
        config, family, rope=_ROPE, default_head_dim=default_head_dim, norm_eps=1e-5, is_tied=True
    )
    has_bias = config.boolean("use_bias", default=False)
    return replace(
        common,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        wide_rotary=True,
        interleaved_rotary=True,
    )
