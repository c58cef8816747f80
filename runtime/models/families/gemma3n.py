"""Gemma 3n's text model: several streams of x, low-rank products next to attention, gates of which the largest alone
pass in the first layers, and inputs of layers.

As in Gemma 4, norms are by the weight itself, queries, keys and values are normalised, scores are not scaled, and the
last layers attend to earlier ones' keys and values. Towers for images and audio are not used.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerRotary,
    LayerShape,
    read_common,
    read_windows,
)
from ..fields import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Fields, Norm, text_fields
from ..layer_inputs_config import LayerInputs, Streams
from .gemma import NAMES, local_rope, main_rope, read_cap
from .gemma4 import read_sharing

_ROOTS = ("model.language_model.", "language_model.model.")  # next to towers
# transformers' defaults of keys that files leave out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2_048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
}
_PERIOD = 5  # layers, of which the last has no window
_NUM_CUT, _CUT_SHARE = 10, 0.95  # first layers of deeper models, and the share of their gates that become 0
_MAX_STREAMS = 16
_MAX_CUT_SHARE = 1 - 1e-6


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "gemma3n":
        text = text_fields(config, family, "gemma3n_text", is_tied=True)
        return replace(read(text, "gemma3n_text"), family=family, roots=_ROOTS)
    cap = read_cap(config, "final_logit_softcapping", 30.0)
    config = config.filled(_DEFAULTS)
    sizes = _intermediate_sizes(config)
    common = read_common(
        config.replaced({"intermediate_size": max(sizes)}),
        family,
        rope=main_rope,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    attention_bias = config.boolean("attention_bias", default=False)
    windows = read_windows(config, common.num_layers, interval=_PERIOD, interval_key=None)
    sharing = read_sharing(config, windows)
    return replace(
        common,
        windows=windows,
        layer_shapes=tuple(
            LayerShape(common.num_kv_heads, common.head_dim, size, keys_of)
            for size, keys_of in zip(sizes, sharing, strict=True)
        ),
        max_context=common.rope.max_positions,  # which is stretched already
        local_rope=local_rope(config, common),
        layer_rotary=tuple(LayerRotary.MAIN if window is None else LayerRotary.LOCAL for window in windows),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        unit_value_norm=True,
        norm=Norm.RMS_WIDE,
        names=NAMES,
        attention_scale=1.0,
        logit_cap=cap,
        scales_embeddings=True,
        layer_inputs=_inputs(config),
        streams=_streams(config),
        laurel_rank=config.integer("laurel_rank", low=1, high=MAX_WIDTH, default=64),
        gate_cuts=_gate_cuts(config, common.num_layers),
    )


def _intermediate_sizes(config: Fields) -> list[int]:
    """Of each layer: the file states one for all, or a list."""
    num_layers = config.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    stated = config.get("intermediate_size")
    if not isinstance(stated, list):
        return [config.integer("intermediate_size", low=1, high=MAX_WIDTH)] * num_layers
    sizes = config.numbers("intermediate_size", length=num_layers, low=1, high=MAX_WIDTH)
    if any(not isinstance(size, int) for size in stated):
        raise config.wrong("intermediate_size", "but must be whole numbers")
    return [int(size) for size in sizes]


def _inputs(config: Fields) -> LayerInputs:
    """Tokens behind the table's rows take the first one."""
    size = config.integer("hidden_size_per_layer_input", low=1, high=MAX_WIDTH, default=256)
    rows = config.integer("vocab_size_per_layer_input", low=1, high=MAX_VOCABULARY, default=262_144)
    return LayerInputs(size, rows, rounds_factors=True)


def _streams(config: Fields) -> Streams:
    num = config.integer("altup_num_inputs", low=2, high=_MAX_STREAMS, default=4)
    active = config.integer("altup_active_idx", low=0, high=num - 1, default=0)
    return Streams(num, active, config.boolean("altup_correct_scale", default=True))


def _gate_cuts(config: Fields, num_layers: int) -> tuple[float | None, ...]:
    """The standard deviations above the mean below which the stated share of a normal distribution lies."""
    key = "activation_sparsity_pattern"
    if key in config:
        shares = config.numbers(key, length=num_layers, low=0.0, high=_MAX_CUT_SHARE)
    else:
        num_cut = _NUM_CUT if num_layers > _NUM_CUT else 0
        shares = (_CUT_SHARE,) * num_cut + (0.0,) * (num_layers - num_cut)
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)
