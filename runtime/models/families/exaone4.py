"""EXAONE 4: norms as in OLMo 2, but of each head; where layers have windows, those without one turn nothing."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerRotary, read_common, read_windows
from ..fields import Fields
from .olmo2 import NAMES


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, norm_eps=1e-5)
    windows = read_windows(config, common.num_layers, interval=4)
    exaone = replace(common, windows=windows, qk_norm=True, names=NAMES)
    if "sliding_window" not in config and config.states("sliding_window"):
        return exaone
    rotary = tuple(LayerRotary.NONE if window is None else LayerRotary.MAIN for window in windows)
    return replace(exaone, layer_rotary=rotary)
