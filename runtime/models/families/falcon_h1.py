"""Falcon-H1: a Mamba-2 layer parallel to each attention; multipliers scale what projections take and make."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, read_common
from ..fields import Fields
from ..mamba_config import Mamba, expanded, read_mamba
from .bamba import MODEL_NAMES, NAMES
from .granite import multiplier


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, norm_eps=1e-5)
    if common.activation not in ("silu", "swish"):
        raise config.wrong("hidden_act", "which is not supported: Mamba-2 layers have silu")
    gate_scale, down_scale = _multipliers(config, "mlp_multipliers", 2)
    bias = config.boolean("attention_bias", default=False)
    # Without biases queries, keys and values are in proportion to what they are made of.
    of_inputs = _input_multiplier(config, "attention_in_multiplier", "attention_bias", has_bias=bias)
    score_scale = multiplier(config, "key_multiplier") * of_inputs**2
    return replace(
        common,
        names=NAMES,
        model_names=MODEL_NAMES,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        mamba=_mamba(config, common),
        attention_scale=common.head_dim**-0.5 * score_scale,
        attention_output_scale=multiplier(config, "attention_out_multiplier") * of_inputs,
        gate_scale=gate_scale,
        mlp_output_scale=down_scale,
        embedding_scale=multiplier(config, "embedding_multiplier"),
        logits_scale=multiplier(config, "lm_head_multiplier"),
    )


def _mamba(config: Fields, common: DecoderConfig) -> Mamba:
    num_values: int | None = None
    if "mamba_d_ssm" in config or not config.states("mamba_d_ssm"):
        num_values = config.integer("mamba_d_ssm", low=1, high=1 << 24, default=1_024)
    mamba = read_mamba(config, [True] * common.num_layers, num_values or expanded(config, common.hidden_size))
    assert mamba is not None
    has_norm = config.boolean("mamba_rms_norm", default=False)
    if has_norm and config.boolean("mamba_norm_before_gate", default=True):
        raise config.wrong("mamba_norm_before_gate", "which is not supported with mamba_rms_norm")
    of_inputs = _input_multiplier(config, "ssm_in_multiplier", "mamba_proj_bias", has_bias=mamba.has_bias)
    scales = _multipliers(config, "ssm_multipliers", 5)
    gates, values, keys, queries, steps = (of_inputs * scale for scale in scales)
    return replace(
        mamba,
        has_output_bias=config.boolean("projectors_bias", default=False),
        has_norm=has_norm,
        is_parallel=True,
        scales=(gates, values, keys, queries, steps),
        output_scale=multiplier(config, "ssm_out_multiplier"),
    )


def _multipliers(config: Fields, key: str, length: int) -> tuple[float, ...]:
    return config.filled({key: [1.0] * length}).numbers(key, length=length, low=1e-6, high=1e6)


def _input_multiplier(config: Fields, key: str, bias_key: str, *, has_bias: bool) -> float:
    """That of what a projection takes, by which its outputs are multiplied instead."""
    factor = multiplier(config, key)
    if has_bias and factor != 1.0:
        raise config.wrong(key, f"which is not supported with {bias_key}")
    return factor
