"""Qwen2 with biases in queries, keys and values; Qwen3 with norms of each head, and mixtures of experts."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, Experts, read_common, read_experts, windows_by_type
from ..fields import Fields
from ..rope_config import MAX_POSITIONS

_DEFAULT_WINDOW = 4_096


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_third = family != "qwen2"
    common = read_common(config, family, default_head_dim=128 if family == "qwen3" else None)
    attention_bias = is_third and config.boolean("attention_bias", default=False)
    qwen = replace(
        common,
        qkv_bias=attention_bias or not is_third,
        output_bias=attention_bias,
        qk_norm=is_third,
    )
    if family != "qwen3_moe":
        return replace(qwen, windows=_windows(config, common.num_layers))
    window = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    if not config.boolean("use_sliding_window", default=False):
        window = None
    return replace(qwen, windows=(window,) * common.num_layers, experts=_experts(config, common.num_layers))


def _experts(config: Fields, num_layers: int) -> Experts:
    """In each `decoder_sparse_step`-th layer but for those of `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", low=1, high=1 << 16, default=1)
    plain = config.get("mlp_only_layers")
    if plain is not None and (
        not isinstance(plain, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in plain)
    ):
        raise config.wrong("mlp_only_layers", "but must be a list of layers")
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=[(index + 1) % step == 0 and index not in (plain or ()) for index in range(num_layers)],
        sum_to_1=config.boolean("norm_topk_prob", default=False),
        rounds_weights=True,
    )


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Those of the layers from `max_window_layers` on, unless the file says it layer by layer."""
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else _DEFAULT_WINDOW
    first_windowed = config.integer("max_window_layers", low=0, high=1 << 16, default=28)
    if not config.boolean("use_sliding_window", default=False):
        window = None
    later = [window if index >= first_windowed else None for index in range(num_layers)]
    return windows_by_type(config, num_layers, window, later)
