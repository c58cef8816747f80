"""Llama, and what is stored as such: Vicuna, TinyLlama, SmolLM2, Yi and others."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common
from ..fields import Fields

# transformers' defaults of a text_config next to a tower, which files leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    attention_bias = config.boolean("attention_bias", default=False)
    return replace(
        read_common(config, family),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
