"""Idefics 3 and SmolVLM: a SigLIP tower and a pixel-shuffle connector before a Llama decoder."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig
from ..fields import Fields, text_fields
from ..vision_config import VisionConfig
from . import llama


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    text = text_fields(config, family, "llama", llama.DEFAULTS)
    decoder = replace(llama.read(text, family), roots=("model.text_model.",))
    return replace(decoder, vision=VisionConfig.of_idefics3(config, decoder.vocab_size))
