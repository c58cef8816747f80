"""LFM2: gated short convolutions in most layers, attention with norms of heads in the others; mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, ModelNames, ShortConvolutions, read_common
from ..experts_config import Experts, ExpertShares, read_experts
from ..fields import MAX_LAYERS, MAX_WIDTH, Fields
from ..rope_config import RopeConfig

_NAMES = LayerNames(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    expert="feed_forward.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    expert_correction="feed_forward.expert_bias",
)
# Older files' names, which count where both are there, as they do for transformers.
_RENAMED: Mapping[str, str] = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
_MAX_SIZE = 16  # of a convolution
_ROPE = partial(RopeConfig.from_fields, default_theta=1e6)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    config = config.renamed(_RENAMED)
    common = read_common(config, family, rope=_ROPE, norm_eps_key="norm_eps", norm_eps=1e-5, is_tied=True)
    is_mixture = family == "lfm2_moe"
    stated = common.intermediate_size
    return replace(
        common,
        intermediate_size=stated if is_mixture else _inner_size(config, stated),
        experts=_experts(config, common.num_layers) if is_mixture else None,
        qk_norm=True,
        convolutions=_convolutions(config, common.num_layers),
        names=_NAMES,
        model_names=ModelNames(final_norm="embedding_norm"),
    )


def _inner_size(config: Fields, stated: int) -> int:
    """The MLP's size: two thirds of the stated one, times a factor, rounded up, unless the file says otherwise."""
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return stated
    factor = config.optional_number("block_ffn_dim_multiplier", low=1e-3, high=1e3)
    if factor is None and config.states("block_ffn_dim_multiplier"):
        return 2 * stated // 3
    multiple = config.integer("block_multiple_of", low=1, high=MAX_WIDTH, default=256)
    size = -(-int((factor or 1.0) * (2 * stated // 3)) // multiple) * multiple
    if not 1 <= size <= MAX_WIDTH:
        raise config.wrong("block_ffn_dim_multiplier", f"but makes an MLP of {size} columns")
    return size


def _experts(config: Fields, num_layers: int) -> Experts:
    """In all layers but the first ones."""
    num_dense = config.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=2)
    common = read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=[index >= num_dense for index in range(num_layers)],
        sum_to_1=config.boolean("norm_topk_prob", default=True),
        rounds_weights=True,
    )
    return replace(
        common,
        shares=ExpertShares.SIGMOID,
        has_correction=config.boolean("use_expert_bias", default=True),
        sum_eps=1e-6,
        factor=config.number("routed_scaling_factor", low=1e-6, high=1e6, default=1.0),
    )


def _convolutions(config: Fields, num_layers: int) -> ShortConvolutions | None:
    kinds = config.texts("layer_types")
    if kinds is None:
        attending = config.get("full_attn_idxs")
        if attending is not None and (
            not isinstance(attending, list) or not all(type(index) is int for index in attending)
        ):
            raise config.wrong("full_attn_idxs", "but must be a list of layers")
        kinds = ["conv" if attending is not None and index not in attending else "full_attention"
                 for index in range(num_layers)]  # fmt: skip
    if len(kinds) != num_layers or not set(kinds) <= {"conv", "full_attention"}:
        raise config.wrong(
            "layer_types", f"but must say conv or full_attention for each of {num_layers} layers"
        )
    if "conv" not in kinds:
        return None
    return ShortConvolutions(
        size=config.integer("conv_L_cache", low=1, high=_MAX_SIZE, default=3),
        layers=tuple(kind == "conv" for kind in kinds),
        has_bias=config.boolean("conv_bias", default=False),
    )
