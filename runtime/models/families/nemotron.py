"""Nemotron (Minitron, Nemotron-4): layer norms by 1 + weight, squared ReLU without a gate, half of each head turned."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..fields import Fields, Norm
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.5)
_NAMES = LayerNames(gate_up=("mlp.up_proj",))


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(
        config, family, rope=_ROPE, default_activation="relu2", norm_eps_key="norm_eps", norm_eps=1e-5
    )
    attention_bias = config.boolean("attention_bias", default=False)
    return replace(
        common,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        gated_mlp=False,
        norm=Norm.LAYER_PLUS_ONE,
        norm_bias=True,
        names=_NAMES,
    )
