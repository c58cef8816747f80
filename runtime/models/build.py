"""From a model's config.json and its weights to the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..weights import Weights
from .classifier import Classifier
from .compute_dtype import ComputePolicy
from .config import DecoderConfig, EncoderConfig, is_encoder
from .decoder import Decoder
from .encoder import Encoder

logger = logging.getLogger(__name__)


def build_model(
    config: Mapping[str, Any],
    weights: Weights,
    *,
    modules: Any = None,
    pooling: Any = None,
    sentence_bert: Any = None,
    policy: ComputePolicy | None = None,
) -> Decoder | Encoder:
    """The model that a parsed config.json describes, over weights that may still be empty.

    Encoders also take what modules.json, 1_Pooling/config.json and sentence_bert_config.json hold, where
    they are there. The model computes in the dtype that `policy` chooses; without one, in that of its
    weights. Every tensor that it needs is looked up and checked; none is copied, and no content is read.
    Raises `ModelError` when the config is not supported, or a tensor is missing or does not fit.
    """
    model: Decoder | Encoder
    if is_encoder(config):
        encoder_config = EncoderConfig.from_json(
            config, modules=modules, pooling=pooling, sentence_bert=sentence_bert
        )
        model = (Classifier if encoder_config.labels else Encoder)(encoder_config, weights, policy)
    else:
        model = Decoder(DecoderConfig.from_json(config), weights, policy)
    told = model.computes.told
    logger.info("weights in %(stored_dtype)s, computing in %(compute_dtype)s: %(why)s", told)
    return model
