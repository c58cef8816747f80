"""Mixtral: Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..experts_config import read_experts
from ..fields import Fields
from ..rope_config import MAX_POSITIONS

_NAMES = LayerNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, norm_eps=1e-5)
    window = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    experts = read_experts(
        config,
        size_key="intermediate_size",
        layers=[True] * common.num_layers,
        sum_to_1=True,
        rounds_weights=False,
    )
    return replace(common, windows=(window,) * common.num_layers, names=_NAMES, experts=experts)
