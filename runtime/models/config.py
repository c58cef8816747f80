"""The kind of model that a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder_config import decoder_architectures
from .encoder_config import ENCODERS
from .fields import Fields, family_of


def is_encoder(data: Mapping[str, Any]) -> bool:
    """True if a config.json describes an encoder. Raises `ModelError` for families not supported."""
    return family_of(Fields(data), decoder_architectures() | ENCODERS) in ENCODERS
