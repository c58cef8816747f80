"""Idefics 3 and SmolVLM: a SigLIP tower and a pixel-shuffle connector before a Llama decoder."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...errors import ModelError
from ..decoder_config import DecoderConfig
from ..fields import Fields
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
# Of the whole model, where its decoder looks for them.
_SHARED = ("quantization_config", "compression_config", "dtype", "torch_dtype")


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    given = config.get("text_config")
    if not isinstance(given, dict):
        raise ModelError(f"config.json: a model of the family {family!r} needs a text_config")
    whole = {key: config.get(key) for key in _SHARED if key in config}
    # Which of the two ties them is the whole model's to say, as in transformers.
    tied = config.boolean("tie_word_embeddings", default=False)
    text = Fields({**_DEFAULTS, **given, **whole, "tie_word_embeddings": tied}, where="text_config.")
    text.choice("model_type", ("llama",), default="llama")
    decoder = replace(llama.read(text, family), roots=("model.text_model.",))
    return replace(decoder, vision=VisionConfig.of_idefics3(config, decoder.vocab_size))
