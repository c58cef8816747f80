"""Qwen3-Next and Qwen3.5's text: gated delta nets in most layers, gated attention that turns a quarter of each head in
the others; mixtures of experts in Qwen3-Next and Qwen3.5 MoE. Those that also see images are read by `qwen_vl.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..delta_nets_config import DeltaNets, DeltaOrder
from ..fields import MAX_HEADS, Fields, Norm
from ..rope_config import RopeConfig
from .qwen import read_shared_experts

_DEFAULT_INTERVAL = 4  # every fourth layer attends, where the file does not say it layer by layer
_KINDS = {"linear_attention", "full_attention"}
_MAX_CONVOLUTION = 16
_MAX_HEAD_SIZE = 256
_NEXT = LayerNames(shared_expert="mlp.shared_expert.", delta_net_inputs=("in_proj_qkvz", "in_proj_ba"))
_MIXTURE = LayerNames(shared_expert="mlp.shared_expert.", stacked_experts="mlp.experts.")
# Names of tensors that are not in transformers' order, by this order, so that nothing takes them for those that are
_REORDERED: dict[DeltaOrder, dict[str, Any]] = {
    DeltaOrder.SPLIT: {"delta_net_inputs": ("in_proj_qkv", "in_proj_z", "in_proj_ba")},
    DeltaOrder.TILED: {"delta_net": "tiled_linear_attn."},
}
_NO_MLP = {"intermediate_size": 1}  # of files of mixtures in all layers
_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.25)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_next, is_mixture = family == "qwen3_next", "_moe" in family
    if is_mixture:
        config = config.filled(_NO_MLP)
    common = read_common(config, family, rope=_ROPE, default_head_dim=256)
    if common.activation != "silu":
        raise config.wrong("hidden_act", "which is not supported: delta nets have silu")
    if not config.boolean("attn_output_gate", default=True):
        raise config.wrong("attn_output_gate", "which is not supported")
    bias = config.boolean("attention_bias", default=False)
    if is_next or is_mixture:
        common = replace(
            common,
            names=_NEXT if is_next else _MIXTURE,
            experts=read_shared_experts(config, common.num_layers, default_size=512, sum_to_1=True),
        )
    nets = _delta_nets(config, common.num_layers, is_next=is_next)
    return replace(
        common,
        names=common.names if nets is None else replace(common.names, **_REORDERED.get(nets.order, {})),
        norm=Norm.RMS_PLUS_ONE,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        gated_attention=True,
        delta_nets=nets,
    )


def _delta_nets(config: Fields, num_layers: int, *, is_next: bool) -> DeltaNets | None:
    kinds = config.texts("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", low=1, high=1 << 16, default=_DEFAULT_INTERVAL)
        kinds = ["linear_attention" if (index + 1) % interval else "full_attention"
                 for index in range(num_layers)]  # fmt: skip
    if len(kinds) != num_layers or not set(kinds) <= _KINDS or "full_attention" not in kinds:
        raise config.wrong(
            "layer_types",
            f"but must say linear_attention or full_attention for each of {num_layers} layers, and this at least once",
        )
    if "linear_attention" not in kinds:
        return None
    num_key_heads = config.integer("linear_num_key_heads", low=1, high=MAX_HEADS, default=16)
    num_value_heads = config.integer("linear_num_value_heads", low=1, high=MAX_HEADS, default=32)
    if num_value_heads % num_key_heads:
        raise config.wrong("linear_num_value_heads", f"but must be a multiple of {num_key_heads} key heads")
    orders = ("grouped", "split") if is_next else ("apart", "tiled")  # the second is that of GGUF files
    order = config.choice("delta_net_order", orders, default=orders[0])
    return DeltaNets(
        num_key_heads,
        num_value_heads,
        key_size=config.integer("linear_key_head_dim", low=4, high=_MAX_HEAD_SIZE, default=128),
        value_size=config.integer("linear_value_head_dim", low=1, high=_MAX_HEAD_SIZE, default=128),
        convolution_size=config.integer("linear_conv_kernel_dim", low=1, high=_MAX_CONVOLUTION, default=4),
        layers=tuple(kind == "linear_attention" for kind in kinds),
        order=DeltaOrder[order.upper()],
    )
