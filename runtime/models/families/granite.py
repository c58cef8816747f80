"""Granite 3 and 4 (dense): Llama with multipliers of embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig
from ..fields import Fields
from . import llama


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    return with_multipliers(config, llama.read(config, family))


def with_multipliers(config: Fields, model: DecoderConfig) -> DecoderConfig:
    """The model with those that the file states."""
    return replace(
        model,
        attention_scale=multiplier(config, "attention_multiplier"),
        embedding_scale=multiplier(config, "embedding_multiplier"),
        residual_scale=multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / multiplier(config, "logits_scaling"),
    )


def multiplier(config: Fields, key: str) -> float:
    """1 in files without it."""
    return config.number(key, low=1e-6, high=1e6, default=1.0)
