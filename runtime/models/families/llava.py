"""LLaVA-OneVision: a SigLIP tower over the tiles of an image, and a connector, before a decoder of another family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, ModelNames
from ..fields import Fields, text_fields
from ..vision_config import VisionConfig
from . import llama, mistral, qwen

# Of each family inside: transformers' defaults of a text_config, which files leave out.
_FAMILIES: dict[str, tuple[Callable[[Fields, str], DecoderConfig], dict[str, Any]]] = {
    "llama": (llama.read, llama.DEFAULTS),
    "mistral": (
        mistral.read,
        {
            **llama.DEFAULTS,
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen2": (
        qwen.read,
        {
            **llama.DEFAULTS,
            "vocab_size": 151_936,
            "intermediate_size": 22_016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
        },
    ),
}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    given = Fields(config.get("text_config") or {}, where="text_config.")
    kind = given.choice("model_type", tuple(_FAMILIES), default="qwen2")
    read_text, defaults = _FAMILIES[kind]
    decoder = read_text(text_fields(config, family, kind, defaults), kind)
    return replace(
        decoder,
        family=family,
        roots=("model.language_model.", "language_model.model."),
        model_names=ModelNames(adapted_layers="model.language_model.layers"),
        # Files may have it in the text_config.
        tie_word_embeddings=decoder.tie_word_embeddings
        or given.boolean("tie_word_embeddings", default=False),
        vision=VisionConfig.of_llava_onevision(config, decoder.vocab_size, decoder.hidden_size),
    )
