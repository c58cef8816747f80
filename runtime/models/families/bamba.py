"""Bamba: Mamba-2 layers, and a few that attend and turn half of each head."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, ModelNames, read_common
from ..fields import Fields
from ..mamba_config import expanded, read_mamba
from ..rope_config import RopeConfig

NAMES = LayerNames(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
MODEL_NAMES = ModelNames(final_norm="final_layernorm")
_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.5)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_ROPE, norm_eps=1e-5)
    if common.activation not in ("silu", "swish"):
        raise config.wrong("hidden_act", "which is not supported: Mamba-2 layers have silu")
    bias = config.boolean("attention_bias", default=False)
    return replace(
        common,
        names=NAMES,
        model_names=MODEL_NAMES,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
        mamba=read_mamba(config, _layers(config, common.num_layers), expanded(config, common.hidden_size)),
    )


def _layers(config: Fields, num_layers: int) -> list[bool]:
    """A flag for each layer, True if it is a Mamba-2 layer: all but those of `attn_layer_indices`."""
    attending = config.get("attn_layer_indices")
    if (
        not isinstance(attending, list)
        or not attending
        or any(isinstance(one, bool) or not isinstance(one, int) for one in attending)
        or not all(0 <= one < num_layers for one in attending)
    ):
        raise config.wrong(
            "attn_layer_indices", f"but must be a list of layers below {num_layers}, at least one"
        )
    return [index not in attending for index in range(num_layers)]
