"""A description of a model from its config.json alone: its family, and whether the native core
computes it.
"""

from __future__ import annotations

import json
from typing import Any

from ..dtypes import DType
from ..errors import ModelError
from ..models.config import is_encoder
from ..models.decoder_config import DecoderConfig
from ..models.encoder_config import EncoderConfig
from ..models.executor import refusal_of
from ..models.spec import DecoderSpec, EncoderSpec
from .native.decoder import NAME, refusal_of_spec
from .native.encoder import IMPLEMENTED as ENCODERS_IMPLEMENTED


def describe_model(config_json: bytes) -> dict[str, Any]:
    """A JSON-ready value: `family`, `kind`, `max_tokens`, and `native_refuses`, the reason or null;
    or `refused`, the reason why the runtime does not support the model. Imports no torch, and
    raises nothing for any content of the file.
    """
    try:
        config = json.loads(config_json)
        if is_encoder(config):
            encoder = EncoderConfig.from_json(config)
            refusal = refusal_of(EncoderSpec.of(encoder, DType.F32), ENCODERS_IMPLEMENTED, NAME)
            return _described(encoder.family, "encoder", encoder.max_tokens, refusal)
        decoder = DecoderConfig.from_json(config)
    except (ModelError, ValueError, RecursionError) as error:
        return {"refused": str(getattr(error, "message", error))}
    return _described(
        decoder.family,
        "decoder",
        decoder.max_context,
        refusal_of_spec(DecoderSpec.of(decoder, DType.BF16)),
    )


def _described(family: str, kind: str, max_tokens: int, native_refuses: str | None) -> dict[str, Any]:
    return {
        "refused": None,
        "family": family,
        "kind": kind,
        "max_tokens": max_tokens,
        "native_refuses": native_refuses,
    }
