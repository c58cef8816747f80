"""From a model's config.json and its weights to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..weights import Weights
from .config import DecoderConfig, EncoderConfig, is_encoder
from .decoder import Decoder
from .encoder import Encoder


def build_model(
    config: Mapping[str, Any],
    weights: Weights,
    *,
    modules: Any = None,
    pooling: Any = None,
    sentence_bert: Any = None,
) -> Decoder | Encoder:
    """The model that a parsed config.json describes, over weights that may still be empty.

    Encoders also take what modules.json, 1_Pooling/config.json and sentence_bert_config.json hold, where
    they are there. Every tensor that the model needs is looked up and checked; none is copied, and no
    content is read. Raises `ModelError` when the config is not supported, or a tensor is missing or does
    not fit.
    """
    if is_encoder(config):
        encoder_config = EncoderConfig.from_json(
            config, modules=modules, pooling=pooling, sentence_bert=sentence_bert
        )
        return Encoder(encoder_config, weights)
    return Decoder(DecoderConfig.from_json(config), weights)
