"""Command R (Cohere) and Command R7B (Cohere 2): attention and MLP in parallel, after one layer norm without a
bias; Cohere 2 turns only in layers with a window."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    Norm,
    read_common,
    refuse_set,
    windows_by_type,
)
from ..fields import Fields
from ..rope_config import MAX_POSITIONS

_NAMES = LayerNames(mlp_norm=None)
_DEFAULT_INTERVAL = 4  # of layers that see all


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    refuse_set(config, "use_qk_norm")
    common = read_common(config, family, norm_eps_key="layer_norm_eps", norm_eps=1e-5, is_tied=True)
    attention_bias = config.boolean("attention_bias", default=False)
    cohere = replace(
        common,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm=Norm.LAYER,
        names=_NAMES,
        wide_rotary=True,
        interleaved_rotary=True,
        is_parallel=True,
        logits_scale=config.number("logit_scale", low=1e-6, high=1e6, default=0.0625),
    )
    if family == "cohere":
        return cohere
    windows = _windows(config, common.num_layers)
    return replace(
        cohere,
        windows=windows,
        layer_rotary=tuple(LayerRotary.NONE if window is None else LayerRotary.MAIN for window in windows),
    )


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer. In files without `layer_types` each `sliding_window_pattern`-th sees all."""
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else 4_096
    interval = config.integer("sliding_window_pattern", low=1, high=1 << 16, default=_DEFAULT_INTERVAL)
    by_place = [None if (index + 1) % interval == 0 else window for index in range(num_layers)]
    return windows_by_type(config, num_layers, window, by_place)
