"""DeepSeek V2 and V3, and models of their shape: Kimi K2, Moonlight, GLM-4.7-Flash. Attention over latents, mixtures of
experts with shared ones in all but the first layers. The layer for multi-token prediction is not used."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LatentAttention, LayerNames, read_common, refuse_set
from ..experts_config import Experts, read_experts, read_groups, read_sigmoid_experts
from ..fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH, Fields
from ..rope_config import RopeConfig

_NORM_EPS = 1e-6  # of the norms in attention, whatever the file says of the others
_GROUPS = {"deepseek_v3": (8, 4), "kimi_k2": (8, 4)}  # where the file does not say
_FACTORS = {"deepseek_v3": 2.5, "kimi_k2": 2.5, "glm4_moe_lite": 1.8}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    rotary_dim = config.integer("qk_rope_head_dim", low=2, high=MAX_HEAD_DIM, default=64)
    common = read_common(
        config.renamed({"qk_rope_head_dim": "head_dim"}),
        family,
        rope=partial(_rope, rotary_dim),
        default_head_dim=rotary_dim,
        norm_eps=1e-5 if family == "glm4_moe_lite" else 1e-6,
    )
    refuse_set(config, "attention_bias", "mlp_bias")
    if "num_key_value_heads" in config and common.num_kv_heads != common.num_heads:
        raise config.wrong("num_key_value_heads", f"but latents are of all {common.num_heads} heads")
    is_v2 = family == "deepseek_v2"
    latent = _latent(config, rotary_dim)
    layers = _layers_with_experts(config, family, common.num_layers)
    return replace(
        common,
        num_kv_heads=1,
        head_dim=latent.rank + rotary_dim,
        latent=latent,
        attention_scale=(latent.plain_dim + rotary_dim) ** -0.5 * common.rope.score_factor,
        interleaved_rotary=is_v2 or config.boolean("rope_interleave", default=True),
        wide_rotary=is_v2,
        experts=_softmax_experts(config, layers) if is_v2 else _sigmoid_experts(config, family, layers),
        names=LayerNames(
            qkv=(
                "self_attn.q_a_proj" if latent.query_rank else "self_attn.q_proj",
                "self_attn.kv_a_proj_with_mqa",
            ),
            query_norm="self_attn.q_a_layernorm",
            key_norm="self_attn.kv_a_layernorm",
        ),
    )


def _rope(rotary_dim: int, config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    return RopeConfig.from_fields(config, head_dim=rotary_dim, max_positions=max_positions)


def _latent(config: Fields, rotary_dim: int) -> LatentAttention:
    is_low = "q_lora_rank" in config or not config.states("q_lora_rank")
    return LatentAttention(
        rank=config.integer("kv_lora_rank", low=1, high=MAX_HEAD_DIM - rotary_dim, default=512),
        query_rank=config.integer("q_lora_rank", low=1, high=MAX_WIDTH) if is_low else 0,
        plain_dim=config.integer("qk_nope_head_dim", low=1, high=MAX_HEAD_DIM),
        value_dim=config.integer("v_head_dim", low=1, high=MAX_HEAD_DIM),
        norm_eps=_NORM_EPS,
    )


def _layers_with_experts(config: Fields, family: str, num_layers: int) -> list[bool]:
    """All but the first ones, unless `mlp_layer_types` has them one by one."""
    kinds = config.texts("mlp_layer_types") if family == "glm4_moe_lite" else None
    if kinds is not None:
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise config.wrong(
                "mlp_layer_types", f"but must say dense or sparse for each of {num_layers} layers"
            )
        return [kind == "sparse" for kind in kinds]
    if config.get("moe_layer_freq") not in (None, 1):
        raise config.wrong("moe_layer_freq", "which is not supported")
    default = {"deepseek_v2": 0, "glm4_moe_lite": 1}.get(family, 3)
    num_dense = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=default)
    return [index >= num_dense for index in range(num_layers)]


def _softmax_experts(config: Fields, layers: list[bool]) -> Experts:
    """V2's kind: softmax shares, which do not sum to 1; groups by their best expert, where the method says so."""
    config.choice("scoring_func", ["softmax"], default="softmax")
    method = config.choice("topk_method", ["greedy", "group_limited_greedy"], default="greedy")
    refuse_set(config, "norm_topk_prob")
    common = read_experts(
        config, size_key="moe_intermediate_size", layers=layers, sum_to_1=False, rounds_weights=False
    )
    groups = (1, 1) if method == "greedy" else read_groups(config, common)
    return replace(
        common,
        wide_scores=True,
        num_groups=groups[0],
        num_groups_used=groups[1],
        factor=config.number("routed_scaling_factor", low=1e-6, high=1e6, default=1.0),
        shared_size=config.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=2) * common.size,
    )


def _sigmoid_experts(config: Fields, family: str, layers: list[bool]) -> Experts:
    config.choice("scoring_func", ["sigmoid"], default="sigmoid")
    config.choice("topk_method", ["noaux_tc"], default="noaux_tc")
    factor, groups = _FACTORS[family], _GROUPS.get(family, (1, 1))
    return read_sigmoid_experts(config, layers, factor=factor, groups=groups)
