"""Qwen2 with biases in queries, keys and values; Qwen3 with norms of each head; mixtures of experts in both, in Qwen2's
with a shared one behind a gate."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common, refuse_set, windows_by_type
from ..experts_config import Experts, read_experts
from ..fields import MAX_WIDTH, Fields
from ..rope_config import MAX_POSITIONS, RopeConfig

_DEFAULT_WINDOW = 4_096
_SECOND_MIXTURE = LayerNames(shared_expert="mlp.shared_expert.")


def read(
    config: Fields, family: str, *, rope: Callable[..., RopeConfig] = RopeConfig.from_fields
) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "qwen2_moe":
        return _read_second_mixture(config, family)
    is_third = family != "qwen2"
    common = read_common(config, family, rope=rope, default_head_dim=128 if family == "qwen3" else None)
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


def _read_second_mixture(config: Fields, family: str) -> DecoderConfig:
    refuse_set(config, "use_sliding_window")
    common = read_common(config, family)
    return replace(
        common,
        qkv_bias=config.boolean("qkv_bias", default=True),
        names=_SECOND_MIXTURE,
        experts=read_shared_experts(config, common.num_layers, default_size=5_632),
    )


def read_shared_experts(
    config: Fields, num_layers: int, *, default_size: int, sum_to_1: bool = False
) -> Experts:
    """Mixtures with a gated shared expert; `sum_to_1` is the default of `norm_topk_prob`."""
    size = config.integer("shared_expert_intermediate_size", low=1, high=MAX_WIDTH, default=default_size)
    return replace(_experts(config, num_layers, sum_to_1=sum_to_1), shared_size=size, has_shared_gate=True)


def _experts(config: Fields, num_layers: int, *, sum_to_1: bool = False) -> Experts:
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
        sum_to_1=config.boolean("norm_topk_prob", default=sum_to_1),
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
