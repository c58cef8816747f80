"""gpt-oss (20b, 120b): a mixture of experts in each layer, in MXFP4 or bf16, attention sinks, and windows in every
other layer."""

from __future__ import annotations

from msgspec.structs import replace

from ...errors import ModelError
from ..decoder_config import DecoderConfig, LayerNames, read_common, windows_by_type
from ..experts_config import ClampedSwiglu, read_experts
from ..fields import Fields, Norm
from ..rope_config import MAX_POSITIONS, RopeConfig

_NAMES = LayerNames(router="mlp.router", stacked_experts="mlp.experts.", stacked_alternating=True)
_DEFAULT_WINDOW = 128
_THETA = 150_000.0  # where the file leaves it out


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_rope, default_head_dim=64, norm_eps=1e-5)
    attention_bias = config.boolean("attention_bias", default=True)
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else _DEFAULT_WINDOW
    by_place = [None if index % 2 else window for index in range(common.num_layers)]
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=[True] * common.num_layers,
        sum_to_1=True,
        rounds_weights=True,
        has_bias=True,
        swiglu=ClampedSwiglu(
            config.number("swiglu_alpha", low=1e-3, high=1e3, default=1.702),
            config.number("swiglu_limit", low=1e-3, high=1e6, default=7.0),
        ),
    )
    return replace(
        common,
        windows=windows_by_type(config, common.num_layers, window, by_place),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm=Norm.RMS_WIDE,
        names=_NAMES,
        has_sinks=True,
        experts=experts,
    )


def _rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    """The file must state it: transformers stretches by YaRN where it does not."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise ModelError("config.json has neither rope_scaling nor rope_parameters")
    return RopeConfig.from_fields(
        config, head_dim=head_dim, max_positions=max_positions, default_theta=_THETA
    )
