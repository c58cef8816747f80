"""Models with Mamba-2 layers in GGUF files: what llama.cpp's converter makes of their settings, names and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "hybrid": "H"}
# Granite's names → those by which gguf-py knows what becomes of them
_EXPERTS = {"gate_linear": "gate_proj", "up_linear": "up_proj", "output_linear": "down_proj"}


def kinds_of(config: Any) -> str:
    """A letter for each layer; "" of models without Mamba-2 layers."""
    if config.model_type not in ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"):
        return ""
    return "".join(_KINDS[kind] for kind in config.layers_block_type)


def _heads(config: Any) -> tuple[int, int, int, int, int]:
    """Heads, the size of each, groups, the size of a state, tokens that a convolution sees."""
    if config.model_type == "nemotron_h":
        sizes = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups)
        return *sizes, config.ssm_state_size, config.conv_kernel
    sizes = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups)
    return *sizes, config.mamba_d_state, config.mamba_d_conv


def mamba_kv_heads(config: Any) -> int | list[int]:
    """One number, or of each layer."""
    kinds, number = kinds_of(config), config.num_key_value_heads
    return [number if kind == "*" else 0 for kind in kinds] if kinds and "H" not in kinds else number


def add_mamba(writer: Any, config: Any) -> None:
    kinds, family = kinds_of(config), config.model_type
    if not kinds:
        return
    heads, head_dim, groups, state_size, seen = _heads(config)
    writer.add_ssm_conv_kernel(seen)
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)
    if family in ("granitemoehybrid", "bamba"):
        writer.add_rope_scaling_finetuned(family == "bamba")
    if family == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if family == "nemotron_h":
        width = config.moe_intermediate_size if "E" in kinds else config.intermediate_size
        writer.add_feed_forward_length([width if kind in "-E" else 0 for kind in kinds])
        if "E" in kinds:
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)


def mamba_factors(config: Any, stored: str) -> Any:
    """The multipliers of Falcon-H1 that become part of a tensor: a number, or one for each row."""
    if config.model_type != "falcon_h1":
        return np.float32(1.0)
    heads, head_dim, groups, state_size, _ = _heads(config)
    values, keys = heads * head_dim, groups * state_size
    of_parts = np.repeat(np.float32(config.ssm_multipliers), [values, values, keys, keys, heads])
    found = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": (of_parts * np.float32(config.ssm_in_multiplier))[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return np.float32(found.get(stored.split(".")[-2], 1.0))


def mamba_shaped(config: Any, stored: str, data: np.ndarray) -> np.ndarray:
    if not kinds_of(config):
        return data
    if stored.endswith(("A_log", ".D")):
        return data.reshape(-1, 1)
    return (
        data.reshape(_heads(config)[2], -1)
        if stored.endswith(("mamba.norm.weight", "mixer.norm.weight"))
        else data
    )


def known_of_mamba(config: Any, stored: str) -> str:
    """The name by which gguf-py knows a tensor."""
    if config.model_type == "nemotron_h":
        if ".experts." in stored:
            return stored.replace("mixer", "mlp")
        return stored.replace("model.", "backbone.")
    if config.model_type == "granitemoehybrid":
        for own, known in _EXPERTS.items():
            stored = stored.replace(f"block_sparse_moe.experts.{own}", f"mlp.experts.{known}")
            shared = "mlp.shared_experts" if config.num_local_experts else "mlp"
            stored = stored.replace(f"shared_mlp.{own}", f"{shared}.{known}")
    # gguf-py knows this name of Falcon-H1's with its end, and leaves that out.
    return stored
