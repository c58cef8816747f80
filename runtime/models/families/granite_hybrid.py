"""Granite 4: Mamba-2 layers and attention, mostly without positions, with Granite's multipliers; an MLP, or a mixture
of experts with a shared one.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, LayerRotary, has_names_of_llama, read_common
from ..experts_config import read_experts
from ..fields import MAX_EXPERTS, MAX_WIDTH, Fields
from ..mamba_config import expanded, read_layers, read_mamba
from .granite import with_multipliers

_DENSE = LayerNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_MIXTURE = LayerNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}.",  # where the packer took them apart
    shared_expert="shared_mlp.",
    expert_gate_up=("input_linear",),
    expert_down="output_linear",
    stacked_experts="block_sparse_moe.",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
)
_NO_MLP = {"intermediate_size": 1}  # of files without experts, which need none


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config.filled(_NO_MLP), family)
    num_layers = common.num_layers
    kinds = "layers_block_type" if "layers_block_type" in config else "layer_types"
    num_values = expanded(config, common.hidden_size)
    mamba = read_mamba(config, read_layers(config, num_layers, kinds), num_values)
    if mamba is not None and common.activation not in ("silu", "swish"):
        raise config.wrong("hidden_act", "which is not supported: Mamba-2 layers have silu")
    bias = config.boolean("attention_bias", default=False)
    turned = config.choice("position_embedding_type", ("rope", "nope"), default="nope") == "rope"
    model = replace(
        with_multipliers(config, common),
        layer_rotary=(LayerRotary.MAIN if turned else LayerRotary.NONE,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mamba=mamba,
    )
    shared_size = config.integer("shared_intermediate_size", low=1, high=MAX_WIDTH, default=1_024)
    dense, mixture = (LayerNames(),) * 2 if has_names_of_llama(config) else (_DENSE, _MIXTURE)
    if not config.integer("num_local_experts", low=0, high=MAX_EXPERTS, default=8):
        return replace(model, intermediate_size=shared_size, names=dense)
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=[True] * num_layers,
        sum_to_1=True,
        rounds_weights=True,
    )
    return replace(model, experts=replace(experts, shared_size=shared_size), names=mixture)
