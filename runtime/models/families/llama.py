"""Llama, and what is stored as such: Vicuna, TinyLlama, SmolLM2, Yi and others."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common
from ..fields import Fields


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    attention_bias = config.boolean("attention_bias", default=False)
    return replace(
        read_common(config, family),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
