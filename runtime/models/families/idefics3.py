"""Idefics 3 and SmolVLM: a SigLIP tower and a pixel-shuffle connector before a Llama decoder."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..decoder_config import DecoderConfig
from ..fields import Fields, text_fields
from ..vision_config import VisionConfig
from . import llama

# transformers' defaults of a text_config, which files leave out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    text = text_fields(config, family, "llama", _DEFAULTS)
    decoder = replace(llama.read(text, family), roots=("model.text_model.",))
    return replace(decoder, vision=VisionConfig.of_idefics3(config, decoder.vocab_size))
