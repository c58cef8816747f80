"""Mistral and Ministral: Llama with sliding windows, which older files leave out where they are 4,096."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common, windows_by_type
from ..fields import Fields
from ..rope_config import MAX_POSITIONS

_DEFAULT_WINDOW = 4_096


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family)
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else _DEFAULT_WINDOW
    everywhere = (window,) * common.num_layers
    return replace(common, windows=windows_by_type(config, common.num_layers, window, everywhere))
