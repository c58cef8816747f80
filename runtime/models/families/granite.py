"""Granite 3 and 4 (dense): Llama with multipliers of embeddings, attention scores, residuals and logits."""

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
        attention_scale=_multiplier(config, "attention_multiplier"),
        embedding_scale=_multiplier(config, "embedding_multiplier"),
        residual_scale=_multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / _multiplier(config, "logits_scaling"),
    )


def _multiplier(config: Fields, key: str) -> float:
    return config.number(key, low=1e-6, high=1e6, default=1.0)
