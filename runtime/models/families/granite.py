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
        attention_scale=_multiplier(config, "attention_multiplier"),
        embedding_scale=_multiplier(config, "embedding_multiplier"),
        residual_scale=_multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / _multiplier(config, "logits_scaling"),
    )


def _multiplier(config: Fields, key: str) -> float:
    return config.number(key, low=1e-6, high=1e6, default=1.0)
