"""StarCoder 2: layer norms with biases, and an MLP without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..fields import Fields, Norm
from ..rope_config import MAX_POSITIONS

_NAMES = LayerNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(
        config,
        family,
        default_activation="gelu_pytorch_tanh",
        norm_eps_key="norm_epsilon",
        norm_eps=1e-5,
        is_tied=True,
    )
    has_bias = config.boolean("use_bias", default=True)
    window = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    return replace(
        common,
        windows=(window,) * common.num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        gated_mlp=False,
        norm=Norm.LAYER,
        norm_bias=True,
        names=_NAMES,
    )
