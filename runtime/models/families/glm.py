"""GLM-4: gate and up in one matrix, half of each head turned, neighbour with neighbour; GLM-4-0414 with norms behind
attention and MLP, too; GLM-4 MoE (4.5, 4.6) with mixtures of experts in all but the first layers."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..experts_config import read_sigmoid_experts
from ..fields import MAX_LAYERS, Fields
from ..rope_config import RopeConfig

_NAMES = LayerNames(gate_up=("mlp.gate_up_proj",))
_NAMES_0414 = replace(
    _NAMES, attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "glm4_moe":
        return _read_mixture(config, family)
    return replace(
        read_common(config, family, rope=_rope, default_head_dim=128, norm_eps=1.5625e-7),
        qkv_bias=config.boolean("attention_bias", default=True),
        names=_NAMES_0414 if family == "glm4" else _NAMES,
        interleaved_rotary=True,
    )


def _read_mixture(config: Fields, family: str) -> DecoderConfig:
    common = read_common(config, family, rope=_rope, norm_eps=1e-5)
    num_dense = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    layers = [index >= num_dense for index in range(common.num_layers)]
    return replace(
        common,
        qkv_bias=config.boolean("attention_bias", default=False),
        qk_norm=config.boolean("use_qk_norm", default=False),
        experts=read_sigmoid_experts(config, layers, factor=1.0),
    )


def _rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    return RopeConfig.from_fields(
        config, head_dim=head_dim, max_positions=max_positions, may_be_partial=True, default_partial=0.5
    )
