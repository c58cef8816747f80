"""ERNIE 4.5: Llama that turns number 2 i of a head with number 2 i + 1; with mixtures of experts, chosen by corrected
shares, and a shared one."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common, refuse_set
from ..experts_config import Experts, read_experts
from ..fields import MAX_EXPERTS, MAX_LAYERS, Fields
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, default_theta=5e5)
_NAMES = LayerNames(expert_correction="mlp.moe_statics.e_score_correction_bias")
# Names of other mixtures
_RENAMED = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_mixture = family == "ernie4_5_moe"
    default_head_dim = None if is_mixture or config.states("head_dim") else 128
    common = read_common(
        config, family, rope=_ROPE, default_head_dim=default_head_dim, norm_eps=1e-5, is_tied=True
    )
    if is_mixture:
        refuse_set(config, "use_bias")
    has_bias = config.boolean("use_bias", default=False)
    return replace(
        common,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        wide_rotary=True,
        interleaved_rotary=True,
        names=_NAMES if is_mixture else LayerNames(),
        experts=_experts(config.renamed(_RENAMED), common.num_layers) if is_mixture else None,
    )


def _experts(config: Fields, num_layers: int) -> Experts:
    """In each `moe_layer_interval`-th layer from the first to the last one that the file names."""
    interval = config.integer("moe_layer_interval", low=1, high=MAX_LAYERS, default=1)
    first = config.integer("moe_layer_start_index", low=0, high=MAX_LAYERS, default=1)
    last = config.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
    end = num_layers if last == -1 else last + 1
    common = read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=[(index + 1) % interval == 0 and first <= index < end for index in range(num_layers)],
        sum_to_1=True,
        rounds_weights=True,
    )
    num_shared = config.integer("moe_num_shared_experts", low=0, high=MAX_EXPERTS, default=2)
    return replace(
        common,
        wide_scores=True,
        has_correction=True,
        sum_eps=config.number("moe_norm_min", low=0.0, high=1e-6, default=1e-12),
        shared_size=num_shared * common.size,
    )
