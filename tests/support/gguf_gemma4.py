"""Settings and names of Gemma 3n and 4 in GGUF files, as the converter's documentation has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def add_gemma3n(writer: Any, config: Any) -> None:
    """The keys that Gemma 3 does not have."""
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.normal.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.final_logit_softcapping != 30.0:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_gemma4(writer: Any, config: Any) -> None:
    """All keys but those of context, embeddings and layers; and the table of frequencies."""
    named = config.to_dict()
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    num_shared, inner, whole = config.num_kv_shared_layers, config.intermediate_size, kinds.index(False)
    of_whole = config.per_layer_config[whole]
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - num_shared
        inner = [inner if layer < first else 2 * inner for layer in range(config.num_hidden_layers)]
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(inner)
    kv_heads = (of_whole.num_key_value_heads, config.num_key_value_heads)
    writer.add_head_count_kv([kv_heads[windowed] for windowed in kinds])
    writer.add_key_length(of_whole.head_dim)
    writer.add_value_length(of_whole.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(of_whole.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = named["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    num = of_whole.head_dim // 2
    turning = int(of_whole.head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    if num_shared:  # files have keys of layers that attend to others', in vain
        last = config.num_hidden_layers - 1
        columns = (kv_heads[False] * of_whole.head_dim, config.hidden_size)
        writer.add_tensor(f"blk.{last}.attn_k.weight", np.ones(columns, np.float32))
        writer.add_tensor(f"blk.{last}.attn_k_norm.weight", np.ones(of_whole.head_dim, np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (num - turning), np.float32))


def name_of_gemma4(stored: str) -> str | None:
    """The whole name of a tensor that gguf-py has no whole name for."""
    _, _, layer, kind = (*stored.split(".", 3), "", "")[:4]
    if kind in _SCALES:
        return f"blk.{layer}.{_SCALES[kind]}"
    return f"blk.{layer}.layer_output_scale.weight" if kind == "layer_scalar" else None
