"""Phi-1.5 and Phi-2: attention and MLP in parallel, biases everywhere, half of each head turned."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, ModelNames, read_common, refuse_set
from ..fields import Fields, Norm
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.5)
_NAMES = LayerNames(mlp_norm=None, output="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2")


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    refuse_set(config, "qk_layernorm")
    common = read_common(
        config,
        family,
        rope=_ROPE,
        default_activation="gelu_new",
        norm_eps_key="layer_norm_eps",
        norm_eps=1e-5,
    )
    return replace(
        common,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated_mlp=False,
        norm=Norm.LAYER,
        norm_bias=True,
        is_parallel=True,
        names=_NAMES,
        model_names=ModelNames(final_norm="final_layernorm"),
    )
