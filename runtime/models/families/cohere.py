"""Command R (Cohere) and Command R7B (Cohere 2): attention and MLP in parallel, after one layer norm without a
bias; Cohere 2 turns only in layers with a window."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    read_common,
    read_windows,
    refuse_set,
)
from ..fields import Fields, Norm

_NAMES = LayerNames(mlp_norm=None)


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
    windows = read_windows(config, common.num_layers, interval=4)
    return replace(
        cohere,
        windows=windows,
        layer_rotary=tuple(LayerRotary.NONE if window is None else LayerRotary.MAIN for window in windows),
    )
